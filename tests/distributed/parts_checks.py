"""Linear layers on DTensors: how gradients lie, whatever lies how the gradient of the output does, and second ones."""

from __future__ import annotations

import ranks
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import halfbyte as hb

RECIPE = hb.recipes.nvfp4(stochastic_rounding=False, hadamard=None)
WAYS = {  # x, w and bias, then the gradient of x
    "colwise": ((Replicate(), Shard(0), Shard(0)), Partial()),
    "rowwise": ((Shard(2), Shard(1), Replicate()), Shard(2)),
}


def leaves(mesh, places) -> list[DTensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(*shape, generator=generator) for shape in ((2, 16, 32), (64, 32), (64,))]
    return [
        distribute_tensor(t.to(ranks.device()), mesh, [place], src_data_rank=None).requires_grad_()
        for t, place in zip(made, places, strict=True)
    ]


def gradients_lie(rank: int, world: int) -> list[str]:
    """Return which gradients have another class, shape, stride, dtype or placement than their tensor's."""
    mesh, problems = ranks.mesh(world), []
    for way, (places, of_dx) in WAYS.items():
        given = leaves(mesh, places)
        hb.linear(*given, RECIPE).redistribute(placements=[Replicate()]).sum().backward()
        for t, place in zip(given, (of_dx, *places[1:]), strict=True):
            found = t.grad
            if type(found) is not DTensor or found.placements != (place,):
                problems.append(f"{way}: {type(found).__name__} {found.placements}, not {place}")
            if (found.shape, found.stride(), found.dtype) != (t.shape, t.stride(), t.dtype):
                problems.append(f"{way}: {found.shape} {found.stride()} {found.dtype}")
            if found._spec is t._spec:
                problems.append(f"{way}: a spec that two tensors have")
    return [problem for one in ranks.gathered(problems) for problem in one]


def any_dy(rank: int, world: int) -> list[str]:
    """Return which gradients depend on how the gradient of the output lies."""
    mesh, problems = ranks.mesh(world), []
    for way, (places, _) in WAYS.items():
        found = []
        for of_dy in (Replicate(), Shard(1), Shard(2)):
            given = leaves(mesh, places)
            y = hb.linear(*given, RECIPE)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(ranks.device())
            y.backward(distribute_tensor(dy, mesh, [of_dy], src_data_rank=None))
            found.append([t.grad.full_tensor() for t in given])
        problems += [way for other in found[1:] for a, b in zip(found[0], other, strict=True) if not torch.equal(a, b)]
    return [problem for one in ranks.gathered(problems) for problem in one]


def twice(rank: int, world: int) -> list[str]:
    """Return what a second derivative says."""
    mesh, said = ranks.mesh(world), []
    for places, _ in WAYS.values():
        x, w, bias = leaves(mesh, places)
        y = hb.linear(x, w, bias, RECIPE).redistribute(placements=[Replicate()])
        (dx,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        try:
            dx.to_local().square().sum().backward()
        except RuntimeError as error:
            said.append(str(error))
    return said
