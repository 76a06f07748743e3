"""transformers' Trainer on two processes: HalfbyteCallback gives each its own random bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")


def train(rank, world, folder, placed):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29999", LOCAL_WORLD_SIZE=str(world))  # as torchrun does; the group is there already
    sys.path.insert(0, str(Path(__file__).parent))
    import test_trainer as single

    model, state = single.build()
    if placed is not None:
        state.set_rank(placed)
    made = single.trainer(model, Path(folder, str(rank)), ddp_backend="gloo", max_steps=2, save_strategy="no")
    assert made.args.world_size == world
    made.train()
    return state.rank, state.is_placed, state.position, [p.tolist() for p in model.parameters()][-1]


def test_each_process_draws_with_its_rank(tmp_path):
    (zero, one) = ranks.run(2, train, str(tmp_path), None)
    assert zero[:3] == (0, True, 4) and one[:3] == (1, True, 4)
    assert zero[3] == one[3], "DDP keeps the parameters equal"


def test_ranks_that_were_given_stay(tmp_path):
    assert [result[0] for result in ranks.run(2, train, str(tmp_path), 7)] == [7, 7]
