"""`halfbyte train` with a GPU a rank, 50 steps: as near to one process as over gloo."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import mesh_checks
import test_expert_parallel_train as experts
import test_tensor_parallel_train as tensors
import train_checks
from jobs import Job, asks


def pair(runs, meshes: tuple[str, str], recipe: str, device: str = "cuda", draws: int = 1) -> list[list[float]]:
    """Return the losses of 50 steps on both meshes.

    Args:
        runs: the test file whose runs they are.
        meshes: its names.
        device: where the first rank is.
        draws: runs with other random bits each, of whose losses it returns the means.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        train_checks.write_corpus(Path(folder))
        for mesh in meshes:
            configs = [runs.run_on(folder, mesh, f"on {mesh} {bits}", steps=50) for bits in range(draws)]
            drawn = [losses(replace(config, bits=bits), recipe, device) for bits, config in enumerate(configs)]
            found.append([sum(step) / draws for step in zip(*drawn, strict=True)])
    return found


def losses(config, recipe: str, device: str) -> list[float]:
    """Return the losses of a run whose options are those of a CPU, but where it runs."""
    run, where = replace(config.run, graph="off"), device.partition(":")[0]
    return mesh_checks.losses(replace(config, run=run, fuse="off", compile="off", device=where), recipe)


def trains(runs, meshes: tuple[str, str], recipe: str, draws: int = 1) -> Job:
    return Job(4, partial(pair, runs, meshes, recipe, draws=draws), f"{meshes[1]}, {recipe}")


@asks(
    trains(experts, ("one", "ep x fsdp2"), "nvfp4@all", draws=4),
    trains(experts, ("one", "codes x fsdp2"), "nvfp4@all", draws=4),
)
def test_a_mixture_with_experts_on_other_ranks(found):
    """Means of four runs: two runs alone stray by more than the bounds, and no GPU repeats one that was within."""
    experts.near_one_process(*reversed(found))


@asks(trains(experts, ("fsdp4", "ep x fsdp2"), "bf16"), trains(tensors, ("one", "fsdp2"), "bf16"))
def test_in_high_precision_the_order_of_sums_is_all_that_differs(found):
    assert all(abs(a - b) < 1e-3 * b for a, b in zip(*reversed(found), strict=True))


@asks(trains(tensors, ("one", "fsdp2"), "nvfp4"))
def test_layers_that_ranks_share_over_fsdp2(found):
    """FSDP2 alone, whose ranks draw other bits, strays from one process by 12 % in a step behind the fortieth."""
    alone, shared = found
    tensors.near_one_process(shared[:8], alone[:8], first=2e-3, later=0.02)
    assert abs(sum(shared) - sum(alone)) < 0.03 * sum(alone)
