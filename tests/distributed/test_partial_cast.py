"""The partial cast gives the bytes of quantizing the whole weight, on every rank and for every split."""

import cast_checks as checks
import pytest
import ranks
import torch


@pytest.mark.parametrize("spec", (checks.TILE, checks.FOUR_OVER_SIX), ids=("standard", "four_over_six"))
def test_every_start_offset(spec):
    ranks.run(2, checks.every_start, spec, [(16, 20), (9, 33), (40, 16)], torch.float32)


@pytest.mark.parametrize("world", (1, 3, 8))
def test_random_splits(world):
    ranks.run(world, checks.random_splits, 20)
