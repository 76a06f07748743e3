"""Layers that are handed plain parts beside one process: operands of every GEMM, results, and what travels."""

from __future__ import annotations

import ranks
import torch
import torch.distributed as dist
from tensor_parallel_checks import ALL, Case, Made, differing, differing_operands, inputs, recorded, whole
from tensor_parallel_models import Traffic
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.distributed.plain_parts import PlainParts

STYLES = ("colwise", "rowwise")


def part(t: Tensor, dim: int) -> Tensor:
    """Return this rank's part, as torch.chunk cuts them; it may be empty."""
    chunks = t.chunk(dist.get_world_size(), dim)
    rank = dist.get_rank()
    return (chunks[rank] if rank < len(chunks) else t.narrow(dim, 0, 0)).clone()


def told(w: Tensor, bias: Tensor | None, dim: int, recipe: str, mesh) -> hb.nn.Linear:
    """Return a layer that holds a plain part of a whole weight, and knows."""
    (n, k), settings = w.shape, {"device": w.device, "dtype": w.dtype}
    layer = hb.nn.Linear(k, n, bias is not None, recipe=ALL[recipe], state=hb.RunState(3, rank=0), **settings)
    layer.weight = nn.Parameter(part(w, dim))
    if bias is not None:
        layer.bias = nn.Parameter(part(bias, 0))
    layer.as_part = PlainParts(mesh, n, k, dim)
    layer.place = lambda call=0, device=None: hb.Philox(5, 1 << 40)
    return layer


def put_together(t: Tensor, dim: int) -> Tensor:
    return torch.cat([one.to(t.device) for one in ranks.gathered(t)], dim)


def added(t: Tensor) -> Tensor:
    return torch.stack([one.to(t.device) for one in ranks.gathered(t)]).sum(0)


def in_plain_parts(case: Case, mesh) -> Made:
    """Run a layer: the operands are those of this rank, the results whole; nobody but a layer sums."""
    x, w, bias, dy = inputs(case)
    is_rowwise = case.style == "rowwise"
    layer = told(w, None if is_rowwise else bias, int(is_rowwise), case.recipe, mesh)
    x = (part(x, -1) if is_rowwise else x).requires_grad_()
    with recorded() as found:
        y = layer.as_part.output(layer.forward, x)
        assert type(y) is Tensor
        y.backward(dy if is_rowwise else part(dy, -1))
    assert all(type(t.grad) is Tensor for t in (x, layer.weight))
    if is_rowwise:  # the bias is not the layer's: what is compared has it behind the sum
        db = dy.flatten(0, -2).sum(0)
        return Made(found, [added(y.detach()) + bias, put_together(x.grad, -1), put_together(layer.weight.grad, 1), db])
    dw, db = put_together(layer.weight.grad, 0), put_together(layer.bias.grad, 0)
    return Made(found, [put_together(y.detach(), -1), added(x.grad), dw, db])


def operands(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Return what differs in all cases, on rank 0."""
    mesh = ranks.mesh(world)
    every = ranks.gathered([in_plain_parts(case, mesh) for case in cases])
    return ranks.looked_at(cases, lambda i, case: differing(case, ranks.on_cpu(whole(case)), [one[i] for one in every]))


def siblings(rank: int, world: int, recipe: str) -> tuple[list[str], dict]:
    """Return what of q, k and v, which share an amax, differs from one process, and what arrived from other ranks."""
    generator, mesh = torch.Generator().manual_seed(4), ranks.mesh(world)
    weights = [torch.randn(n, 64, generator=generator) * scale for n, scale in ((64, 1), (32, 7), (32, 3))]
    x, every = torch.randn(32, 64, generator=generator), []
    for is_shared in (False, True):
        layers = [
            told(w, None, 0, recipe, mesh) if is_shared else hb.nn.Linear(64, len(w), False, recipe=ALL[recipe])
            for w in weights
        ]
        for layer, w in zip(layers, weights, strict=True):
            layer.amax_group = tuple(layers)
            layer.place = lambda call=0, device=None: hb.Philox(5, 1 << 40)
            if not is_shared:
                layer.weight = nn.Parameter(w.clone())
        with recorded() as found, Traffic(world) as counted:
            for layer in layers:
                layer.as_part.output(layer.forward, x) if is_shared else layer(x)
        every.append(found)
    parts = ranks.gathered(every[1])
    return differing_operands(ranks.on_cpu(every[0]), parts), counted.bytes


def passes_on(rank: int, world: int) -> list[str]:
    """Return what is wrong about caches, about parameters that are no plain tensors, and layers in high precision."""
    mesh, x = ranks.mesh(world), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    w = torch.randn(48, 32, generator=torch.Generator().manual_seed(2))
    wrong = []
    for dim in (0, 1):
        layer = told(w, None, dim, "nvfp4", mesh)
        try:
            hb.cache_weights(nn.Sequential(layer))
            wrong.append(f"dim {dim}: a part was cached as if it were whole")
        except ValueError as refused:
            wrong += [] if "ranks share its layers, and hold parts of weights" in str(refused) else [str(refused)]
        whole_of = layer.as_part("weight", layer.weight)
        if layer.as_part("weight", whole_of) is not whole_of:
            wrong.append(f"dim {dim}: a DTensor was wrapped")
        layer.recipe = hb.Recipe()
        own = (part(x, -1) if dim else x.clone()).requires_grad_()
        y = layer.as_part.output(layer.forward, own)
        y.backward(torch.ones_like(y))
        expected = x @ w.T
        got = added(y.detach()) if dim else put_together(y.detach(), -1)
        dx = put_together(own.grad, -1) if dim else added(own.grad)
        if not (torch.allclose(got, expected, atol=1e-4) and torch.allclose(dx, w.sum(0).expand(8, 32), atol=1e-4)):
            wrong.append(f"dim {dim}: high precision")
        with torch.no_grad():
            if type(layer.as_part.output(layer.forward, own)) is not Tensor:
                wrong.append(f"dim {dim}: evaluation returns a DTensor")
    return wrong
