"""Experts that exist as codes alone train as those in bf16, bit for bit, on any number of ranks."""

import io

import pytest
import ranks
import torch
import zero_expert_checks as checks

import halfbyte as hb
from halfbyte.export import trained
from halfbyte.tensor import PrimaryWeight


@pytest.mark.parametrize("world", [1, 2])  # 3 and 4 in tests/scale
def test_experts_in_codes_train_as_in_bf16(world):
    checks.train_alike(world)


def test_experts_whose_tiles_would_have_rows_of_two_stay_in_bf16():
    for rank in ranks.run(2, checks.trained, "nvfp4", (3, 40), 1 << 20):
        assert rank["equal"] and rank["forms"]["nvfp4"][0] == ["first.weight", "down.weight"]


def test_experts_in_codes_are_pickled_and_exported_one_by_one():
    model, _, zero = checks.build("nvfp4", "nvfp4", (3, 48), 1 << 20)
    plain, _, _ = checks.build("plain", "nvfp4", (3, 48), 1 << 20)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["up.weight"]
    assert type(loaded) is PrimaryWeight and torch.equal(loaded.dequantize(), model.up.weight.dequantize())
    one, other = (trained_of(m.up, m.up.weight) for m in (model, plain))
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape == (48, 40) and torch.equal(a.amax, b.amax) and torch.equal(a.qdata, b.qdata)
        assert torch.equal(a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8))
    del zero


def trained_of(layer: hb.nn.GroupedLinear, weight: torch.Tensor) -> tuple[hb.QuantTensor, ...]:
    """What an export would write of a weight."""
    if isinstance(weight, PrimaryWeight):
        return trained._held(weight)
    return trained._quantized(layer, weight, torch.bfloat16)
