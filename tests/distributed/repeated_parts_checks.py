"""Passes of layers that ranks share, repeated from a record, beside the same calls run anew; kernels interpreted."""

from __future__ import annotations

import importlib
import warnings
from contextlib import contextmanager

import fast_interpreter
import ranks
import torch
from repeating import anew
from tensor_parallel_checks import Case, inputs
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import halfbyte as hb
from halfbyte.functional.linear import Layers
from halfbyte.functional.sharded import outputs_of_parts
from halfbyte.functional.split import LayerSplit
from halfbyte.kernels import launch, prepared

PLACES = {
    "colwise": (Replicate(), Shard(0), Shard(0)),
    "rowwise": (Shard(1), Shard(1), Replicate()),
    "tokens": (Shard(0), Replicate(), Replicate()),
    "x in codes": (Shard(0), Shard(0), Shard(0)),
    "dy in codes": (Shard(1), Shard(1), Replicate()),
}


@contextmanager
def kernels():
    """Let ops run kernels on the CPU's tensors."""
    fast_interpreter.install()
    for name in ("define", "quantization", "gemm", "grouped", "backends", "repeat"):
        module = importlib.import_module(f"halfbyte.ops.{name}")
        module.choose = lambda device, backend: backend or "triton"
    prepared._RECORDS.clear()
    yield


def step(case: Case, mesh, scale: float) -> list[torch.Tensor]:
    """Return what a forward and a backward give of this rank's part, of values that are `scale` times the case's."""
    x, w, bias, dy = (t * scale for t in inputs(case))
    leaves = [
        distribute_tensor(t, mesh, [place], src_data_rank=None).requires_grad_()
        for t, place in zip((x, w, bias), PLACES[case.style], strict=True)
    ]
    layers = Layers([leaves[1]], [leaves[2]], [None], [None], [None], [hb.Philox(5, 1 << 40)])
    recipe = hb.recipes.get(case.recipe)
    if case.style == "dy in codes":
        (y,) = outputs_of_parts(leaves[0], layers, recipe, None, 0)
    else:
        (y,) = outputs_of_parts(leaves[0], layers, recipe, None)
    y.backward(distribute_tensor(dy, mesh, y.placements if not y.placements[0].is_partial() else [Replicate()]))
    return [t.to_local().detach() for t in (y, *(leaf.grad for leaf in leaves))]


def layers(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Return which calls were not repeated, and what differs between those that were and the same run anew."""
    warnings.simplefilter("ignore", UserWarning)
    mesh, problems = ranks.mesh(world), []
    with kernels():
        for case in cases:
            prepared._RECORDS.clear()
            step(case, mesh, 1.0)
            known = dict(prepared._RECORDS)
            problems += [f"{case}: {why}" for why in known.values() if isinstance(why, str)]
            with anew():
                wanted = step(case, mesh, 0.75)
            found = step(case, mesh, 0.75)
            if not known or list(known) != list(prepared._RECORDS):
                problems.append(f"{case}: {len(known)} records, then {len(prepared._RECORDS)}")
            problems += [
                f"{case}: result {i}"
                for i, pair in enumerate(zip(found, wanted, strict=True))
                if not torch.equal(*pair)
            ]
    return [problem for one in ranks.gathered(problems) for problem in one]


def experts(rank: int, world: int, recipe: str) -> list[str]:
    """Return likewise of experts whose features lie in parts."""
    warnings.simplefilter("ignore", UserWarning)
    group, problems = torch.distributed.group.WORLD.group_name, []
    sizes = {"N": 32, "K": 48}
    with kernels():
        for dim, size in sizes.items():
            prepared._RECORDS.clear()
            borders = (*(size * i // world // 16 * 16 for i in range(world)), size)
            split = LayerSplit.of(dim, borders, rank, group, hb.recipes.get(recipe))

            def run(seed: int, split=split, dim=dim) -> list[torch.Tensor]:
                generator = torch.Generator().manual_seed(seed)
                x, w, dy = (torch.randn(*s, generator=generator) for s in ((40, 48), (3, 32, 48), (40, 32)))
                start, stop = split.borders[rank : rank + 2]
                cut = {"N": (x, w[:, start:stop], dy[:, start:stop]), "K": (x[:, start:stop], w[..., start:stop], dy)}
                x, w, dy = (t.contiguous() for t in cut[dim])
                offsets = torch.tensor([16, 16, 39], dtype=torch.int32)
                leaves = [t.requires_grad_() for t in (x, w)]
                y = hb.grouped_linear(*leaves[:2], offsets, recipe, rng=hb.Philox(5, 1 << 40), split=split)
                y.backward(dy)
                return [y.detach(), *[t.grad for t in leaves]]

            run(0)
            known = dict(prepared._RECORDS)
            problems += [f"{dim}: {why}" for why in known.values() if isinstance(why, str)]
            with anew():
                wanted = run(1)
            found = run(1)
            if not known or list(known) != list(prepared._RECORDS):
                problems.append(f"{dim}: {len(known)} records, then {len(prepared._RECORDS)}")
            problems += [
                f"{dim}: result {i}" for i, pair in enumerate(zip(found, wanted, strict=True)) if not torch.equal(*pair)
            ]
    return [problem for one in ranks.gathered(problems) for problem in one]


def pruned(rank: int, world: int) -> list[str]:
    """Return what is wrong with a record on whose rank nobody reads what a collective returned."""

    def function(static, tensors, numbers):
        (t,) = tensors
        found = torch.ops._c10d_functional
        most = found.wait_tensor(found.all_reduce(t, "max", static[0]))
        return (most + 1 if rank else t + 1,), None

    name = torch.distributed.group.WORLD.group_name
    for times in (1, 2, 3):
        t = torch.full((3,), float(times * (rank + 1)))
        (found,), _ = prepared.call(function, (name,), (t,))
        wanted = times * world + 1 if rank else times * (rank + 1) + 1
        if found.tolist() != [wanted] * 3:
            return [f"rank {rank}, call {times}: {found.tolist()}"]
    (record,) = prepared._RECORDS.values()
    assert launch.watcher() is None
    return [] if isinstance(record, prepared.Record) else [str(record)]
