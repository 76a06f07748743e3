"""Layers that were converted and then replaced, as transformers' resize_token_embeddings does: said once, by name."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import halfbyte as hb

ALL = hb.Keep(names=(), last_fraction=0)
SAID = r"was converted, and a torch\.nn\.Linear was put in its place since.*Resize before converting"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 48)

    def forward(self, x):
        return self.lm_head(self.body(x))


def build():
    model = Net()
    return model, hb.quantize_(model, "nvfp4", keep=ALL)


def train(model, report, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        report.state.advance()


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


def test_a_head_that_was_replaced_is_named_once():
    model, report = build()
    model.lm_head = nn.Linear(32, 64)
    with pytest.warns(UserWarning, match=f"^lm_head {SAID}"):
        train(model, report, steps=1)
    assert said(lambda: train(model, report)) == []
    assert hb.quantize_(model, "nvfp4", keep=ALL).converted == ("lm_head",)  # the remedy


def test_several_are_counted():
    model, report = build()
    model.lm_head, model.body[0] = nn.Linear(32, 64), nn.Linear(32, 32)
    with pytest.warns(UserWarning, match=rf"^body\.0 \(and 1 more\) {SAID}"):
        train(model, report)


def taken_out(model, report):
    hb.unquantize_(model)


def taken_out_by_hand(model, report):
    model.lm_head = model.lm_head.to_module()


def wrapped(model, report):
    model.lm_head = nn.Sequential(model.lm_head, nn.Linear(48, 8))


def untouched(model, report):
    pass


@pytest.mark.parametrize("change", (untouched, taken_out, taken_out_by_hand, wrapped))
def test_what_was_meant_is_not_called_lost(change):
    model, report = build()
    change(model, report)
    assert said(lambda: train(model, report)) == []


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))))
def test_copies_compute_as_the_model_does(copied):
    model, _ = build()
    x = torch.randn(4, 32)
    other = copied(model)
    assert torch.equal(other(x), model(x))
    assert [other.lm_head.places, len(model.lm_head.places)] == [[], 1]


def test_transformers_resizes_a_head():
    transformers = pytest.importorskip("transformers", minversion="5.23")
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, tie_word_embeddings=False, **size))
    hb.quantize_(model, "nvfp4", keep=ALL)
    model.resize_token_embeddings(64)
    assert type(model.lm_head) is nn.Linear
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(64, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.warns(UserWarning, match=f"^lm_head {SAID}"):
        optimizer.step()
