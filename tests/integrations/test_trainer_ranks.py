"""transformers' Trainer on two processes: HalfbyteCallback gives each its own random bits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks

import halfbyte as hb

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")


def train(rank, world, folder, placed):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29999", LOCAL_WORLD_SIZE=str(world))  # as torchrun does; the group is there already
    sys.path.insert(0, str(Path(__file__).parent))
    import test_trainer as single

    model, state = single.build()
    if placed == "another":
        model.beside = hb.nn.Linear(16, 16, recipe="nvfp4", state=hb.RunState(3, rank=7)).requires_grad_(False)
    elif placed is not None:
        state.set_rank(placed)
    made = single.trainer(model, Path(folder, str(rank)), ddp_backend="gloo", max_steps=2, save_strategy="no")
    assert made.args.world_size == world
    made.train()
    return state.rank, state.is_placed, state.position, [p.tolist() for p in model.parameters()][-1]


def test_each_process_draws_with_its_rank(tmp_path):
    (zero, one) = ranks.run(2, train, str(tmp_path), None)
    assert zero[:3] == (0, True, 4) and one[:3] == (1, True, 4)
    assert zero[3] == one[3], "DDP keeps the parameters equal"


def test_a_run_state_beside_one_that_has_a_rank_gets_its_own(tmp_path):
    assert [result[:2] for result in ranks.run(2, train, str(tmp_path), "another")] == [(0, True), (1, True)]


def test_ranks_that_were_given_stay(tmp_path):
    assert [result[0] for result in ranks.run(2, train, str(tmp_path), 7)] == [7, 7]


def save(rank, world, folder):
    """Train two steps with amaxes of earlier ones; return what the checkpoint has of them, and what this rank has."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29998", LOCAL_WORLD_SIZE=str(world))
    sys.path.insert(0, str(Path(__file__).parent))
    import test_trainer as single

    model, state = single.build(hb.recipes.delayed_amax(every=1))
    single.trainer(model, folder, ddp_backend="gloo", max_steps=2).train()
    saved = json.loads(Path(folder, "checkpoint-2", "trainer_state.json").read_text())["stateful_callbacks"]
    return saved["HalfbyteCallback"]["attributes"]["saved"]["states"][0]["amaxes"], state.state_dict()["amaxes"]


def test_what_ranks_have_seen_is_in_the_checkpoint_that_one_writes(tmp_path):
    """The first rank saves alone: what it asked the others for then, nobody would answer."""
    saved, own = zip(*ranks.run(2, save, str(tmp_path), seconds=60), strict=True)
    assert saved[0] == saved[1] == own[0] == own[1] and saved[0]
