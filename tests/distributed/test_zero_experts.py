"""Experts that exist as codes alone train as those in bf16, bit for bit, on any number of ranks."""

import io
from types import SimpleNamespace

import pytest
import ranks
import torch
import zero_expert_checks as checks

import halfbyte as hb
from halfbyte.distributed import same
from halfbyte.distributed.cast import Share
from halfbyte.distributed.zero_parts import StoredPart
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


def test_experts_of_a_group_that_begins_with_another_rank_than_0_are_compared(monkeypatch):
    """Notes come in the order of the group, here of ranks 2, 5 and 7, of which the first and the last share experts."""
    monkeypatch.setattr(same, "ranks_of", lambda group: (2, 5, 7))
    shared, alone = ["up [4, 16, 16]", "down [4, 16, 16]"], ["up [2, 16, 16]"]
    notes = [{(2, 7): shared}, {(5,): alone}, {(2, 7): shared}]
    same.check_same_experts(notes, object())
    notes[2] = {(2, 7): shared[:1]}
    with pytest.raises(ValueError, match=r"ranks \[2, 7\] differ: down .* on rank 2, nothing on rank 7;"):
        same.check_same_experts(notes, object())


@pytest.mark.parametrize("span", [(0, 64), (0, 65), (64, 128), (70, 71), (127, 128), (128, 200), (0, 200), (100, 300)])
def test_the_elements_of_one_expert_that_a_rank_has(span):
    """The second of some experts of 4 rows of 16: elements 64 to 127 of their parameter."""
    part = StoredPart(SimpleNamespace(rows=4), 16, 64)
    common = sorted(set(range(*span)) & set(range(64, 128)))
    found = part.share(Share(*span))
    assert found == (Share(common[0] - 64, common[-1] + 1 - 64) if common else None)
