"""Whether logits of a decoder depend on what comes later, on the CPU and on a GPU alike."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.train import model as models


def decoder(recipe: hb.Recipe, device: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a decoder whose token 255 has one feature alone, which decides the amax of a tensor."""
    torch.manual_seed(0)
    model = models.Decoder(dataclasses.replace(models.model_preset("tiny"), vocab_size=256))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
        # Behind a norm no other token has as large a value.
        model.embed_tokens.weight[255] = 0
        model.embed_tokens.weight[255, 0] = 30
    model = model.to(device, dtype)
    hb.quantize_(model, recipe, keep=hb.Keep(names=("lm_head",), last_fraction=0))
    return model


def check_causal(recipe: hb.Recipe, causal: bool, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Check that what comes later in a sequence, or in another one, changes no bit of what came before, or some."""
    model = decoder(recipe, device, dtype)
    tokens = torch.arange(48, device=device).reshape(2, 24)
    later, elsewhere = tokens.clone(), tokens.clone()
    later[:, -1] = 255
    elsewhere[1] = 255

    def logits(given: Tensor) -> Tensor:
        with torch.no_grad():
            return model(given)

    y = logits(tokens)
    assert torch.equal(y, logits(tokens)), "two forwards of the same tokens differ"
    assert not torch.equal(y[:, -1], logits(later)[:, -1]), "what changed changes nothing"
    assert torch.equal(y[:, :-1], logits(later)[:, :-1]) is causal
    assert torch.equal(y[0], logits(elsewhere)[0]) is causal
