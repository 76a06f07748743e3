"""Data-parallel ranks round with bits of their own, whoever tells them which they are: their errors average out."""

import numpy as np
import placing_checks as checks
import pytest
import ranks
import torch

import halfbyte as hb


def test_four_ranks():
    ranks.run(4, checks.four_ranks)


def test_errors_of_ranks_are_independent():
    """The variance of the mean over ranks is that of independent errors, unless all draw the same bits."""
    world = 4
    results = ranks.run(world, checks.weight_gradients)
    ratios = {}
    for key in results[0]:
        drawn = np.stack([result[key] for result in results]).astype(np.float64)  # [rank, draw, element]
        if_independent = drawn.var(axis=1, ddof=1).mean() / world
        ratios[key] = drawn.mean(axis=0).var(axis=0, ddof=1).mean() / if_independent
    for kind in checks.KINDS:
        assert 0.8 < ratios[kind, True] < 1.25, ratios
    assert 3.99 < ratios["equal", False] < 4.01 and ratios["one-signed", False] > 1.4, ratios


def test_one_process_is_rank_0_and_no_wrong_argument_passes():
    model = checks.build()
    before = [grad.clone() for grad in checks.gradients(model, checks.batch(0, 0))]
    assert hb.distributed.place_ranks_(model) == 0 and checks.is_on(checks.state_of(model), 3, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, checks.gradients(model, checks.batch(0, 0)), strict=True))
    assert hb.distributed.place_ranks_(hb.RunState(4)) == 0
    with pytest.raises(ValueError, match="^model=Linear: no layer has a RunState; call hb.quantize_"):
        hb.distributed.place_ranks_(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="^model=dict: give a torch.nn.Module or a RunState"):
        hb.distributed.place_ranks_({})
    with pytest.raises(TypeError, match="^timeout=5: give a datetime.timedelta"):
        hb.distributed.place_ranks_(model, timeout=5)
    with pytest.raises(TypeError, match="^ranks='cpu': give a process group"):
        hb.distributed.place_ranks_(model, "cpu")
