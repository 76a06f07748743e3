"""hb.quantize_ in the place of torchao's: the same arguments in the same order."""

from __future__ import annotations

import inspect

import torch
from torchao.quantization import Float8WeightOnlyConfig
from torchao.quantization import quantize_ as theirs

import halfbyte as hb


def positions(function):
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_one_call_fits_both():
    assert positions(theirs)[:3] == ["model", "config", "filter_fn"]
    assert positions(hb.quantize_) == ["model", "recipe", "filter_fn"]
    asked = {}
    for function, how in ((theirs, Float8WeightOnlyConfig()), (hb.quantize_, "nvfp4_forward")):
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        names = asked.setdefault(function, [])
        function(
            model, how, lambda module, name, names=names: isinstance(module, torch.nn.Linear) and not names.append(name)
        )
        assert {"0", "1"} <= set(names)
