"""Amaxes of earlier steps on two ranks: the greatest of both, equal on both, whole and under FSDP2."""

from __future__ import annotations

import delayed_checks as checks
import numpy as np
import oracle
import pytest
import ranks
import torch


@pytest.fixture(scope="module")
def found() -> list:
    return ranks.run(2, checks.of_a_rank)


def test_both_hold_the_greatest_of_both(found):
    (one, _), (other, _) = found[0][0], found[1][0]
    assert one == other
    first = next(values for _, values in sorted(one["amaxes"].items(), key=lambda item: int(item[0])))
    greatest = [max(float(checks.batch(step, rank).abs().max()) for rank in range(2)) for step in range(checks.STEPS)]
    assert first["held"][0] == float(np.float32(1.25) * np.float32(greatest[2]))
    assert first["seen"][0] == greatest[4], "that of the step which has just been, of both"


def test_outputs_are_those_of_the_amax_of_both(found):
    """The first layer's x by the oracle: in step 2 with what step 0 measured on either rank."""
    held = np.float32(1.25) * np.float32(max(float(checks.batch(0, rank).abs().max()) for rank in range(2)))
    for rank in range(2):
        model, _ = checks.converted(rank)
        spec = checks.recipe().fprop.a
        x = checks.batch(2, rank)
        later = oracle.dequantize(oracle.quantize(x.numpy(), spec, amax=[held]), spec)
        own = oracle.dequantize(oracle.quantize(x.numpy(), spec), spec)
        layer = model[0].eval()
        layer.amaxes.held[0].fill_(float(held))
        layer.amaxes.is_held = [True] * 4
        layer.train()
        got = layer(x.requires_grad_()).detach().double()
        w = oracle.dequantize(
            oracle.quantize(layer.weight.detach().numpy(), checks.recipe().fprop.b), checks.recipe().fprop.b
        )
        bound = torch.from_numpy(np.abs(later).astype(np.float64) @ np.abs(w.T).astype(np.float64)) * 2e-6
        want = torch.from_numpy(later.astype(np.float64) @ w.T.astype(np.float64))
        assert ((got - want).abs() <= bound).all() and not np.array_equal(later, own)


def test_fsdp_gives_the_same(found):
    for rank in range(2):
        (state, outputs), (sharded_state, sharded) = found[rank]
        assert outputs[:2] == sharded[:2]
        assert sharded_state["amaxes"].keys() == state["amaxes"].keys()
        for a, b in zip(torch.tensor(outputs), torch.tensor(sharded), strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))
    assert found[0][1][0] == found[1][1][0]


def test_one_rank_writes_for_all_once_they_have_settled():
    written, nothing = ranks.run(2, checks.written_by_one)
    first = next(iter(written["amaxes"].values()))
    assert first["seen"][0] == max(float(checks.batch(0, rank).abs().max()) for rank in range(2)) and nothing is None


def test_a_state_that_was_asked_for_earlier_in_the_step_does_not_end_it():
    one, other = ranks.run(2, checks.asked_before_and_after)
    greatest = max(float(checks.batch(0, rank).abs().max()) for rank in range(2))
    assert one == other and next(iter(one["amaxes"].values()))["seen"][0] == greatest
