"""The decoder: stated sizes, names, causality, initial weights."""

import math

import pytest
import torch
import torch.nn.functional as F

from halfbyte.train import model

STATED = {
    "tiny": 0.09e6,
    "nano": 0.62e6,
    "2m": 2e6,
    "10m": 10e6,
    "60m": 60e6,
    "125m": 125e6,
    "300m": 300e6,
    "1b": 1.24e9,
    "3b": 3.21e9,
    "8b": 8.03e9,
    "moe-tiny": 0.16e6,
    "moe-2m": 2.2e6,
    "moe-10m": 11e6,
    "moe-60m": 60e6,
    "moe-300m": 300e6,
    "moe-1b": 1.03e9,
}


@pytest.mark.parametrize("name", model.PRESETS)
def test_presets_have_the_stated_size(name):
    shape = model.model_preset(name)
    with torch.device("meta"):
        decoder = model.Decoder(shape)
    assert sum(p.numel() for p in decoder.parameters()) == shape.parameters
    assert shape.parameters == pytest.approx(STATED[name], rel=0.06)


@pytest.mark.parametrize("name", model.PRESETS)
def test_presets_fill_whole_blocks(name):
    shape = model.model_preset(name)
    widths = (shape.dim, shape.hidden, shape.kv_heads * shape.head_dim)
    assert all(width % model.WIDTH_MULTIPLE == 0 for width in widths)


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"model='7b' is not a preset; use one of tiny, nano"):
        model.model_preset("7b")


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"kv_heads": 3}, {"layers": 0}, {"heads": 128}])
def test_shapes_that_cannot_be_are_refused(wrong):
    values = {"dim": 128, "hidden": 64, "layers": 1, "heads": 4, "kv_heads": 2, "vocab_size": 16}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        model.ModelConfig(**values | wrong)


@pytest.fixture
def decoder():
    made = model.Decoder(model.model_preset("tiny"))
    model.initialise_(made, 0)
    return made


def test_names_are_those_of_hugging_face(decoder):
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    expected = {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    for block in (f"layers.{i}" for i in range(2)):
        expected |= {f"{block}.self_attn.{name}.weight" for name in projections}
        expected |= {f"{block}.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
        expected |= {f"{block}.input_layernorm.weight", f"{block}.post_attention_layernorm.weight"}
    assert set(decoder.state_dict()) == expected


def test_a_token_sees_nothing_after_it(decoder):
    tokens = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 12:] = 255 - changed[0, 12:]
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_attention_is_grouped_rotated_and_causal(decoder):
    """Against a plain loop over heads with the rotation written as complex multiplication."""
    attention, shape = decoder.layers[0].self_attn, decoder.config
    length, width = 10, shape.head_dim
    x = torch.randn(1, length, shape.dim, generator=torch.Generator().manual_seed(1))
    frequency = shape.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones(length, width // 2).double(), torch.outer(torch.arange(length).double(), frequency))

    def rotated(vectors):
        pairs = torch.complex(vectors[:, : width // 2].double(), vectors[:, width // 2 :].double()) * turn
        return torch.cat((pairs.real, pairs.imag), dim=1)

    heads = []
    for head in range(shape.heads):
        group = head // (shape.heads // shape.kv_heads)
        q = rotated(attention.q_proj(x)[0, :, head * width : (head + 1) * width])
        k = rotated(attention.k_proj(x)[0, :, group * width : (group + 1) * width])
        v = attention.v_proj(x)[0, :, group * width : (group + 1) * width].double()
        scores = (q @ k.T / math.sqrt(width)).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    expected = attention.o_proj(torch.cat(heads, dim=1).float())
    torch.testing.assert_close(attention(x, *decoder.rotary(length))[0], expected, atol=1e-5, rtol=1e-4)


def test_first_loss_is_that_of_a_uniform_guess(decoder):
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(decoder(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_initial_weights_follow_the_seed(decoder):
    again, other = model.Decoder(model.model_preset("tiny")), model.Decoder(model.model_preset("tiny"))
    model.initialise_(again, 0)
    model.initialise_(other, 1)
    for name, weight in decoder.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(decoder.lm_head.weight, other.lm_head.weight)


def test_tied_embeddings_are_one_parameter():
    shape = model.ModelConfig(dim=32, hidden=32, layers=1, heads=2, kv_heads=1, vocab_size=64, tie_embeddings=True)
    decoder = model.Decoder(shape)
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert sum(p.numel() for p in decoder.parameters()) == shape.parameters


@pytest.mark.parametrize("name", ["nano", "moe-tiny"])
def test_initial_weights_are_drawn_once(name):
    """torch's own are not drawn before, and none of them is left."""
    config = model.model_preset(name)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    found = model.initialised(config, 3)
    assert torch.equal(torch.get_rng_state(), before)
    wanted = model.Decoder(config)
    model.initialise_(wanted, 3)
    assert found.state_dict().keys() == wanted.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.buffers(), wanted.buffers(), strict=True))
