"""Experts that ranks share by features: the operands of every GEMM, put together again, beside those of one process."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import ranks
import torch
from expert_parallel_checks import (
    Case,
    Made,
    all_tokens,
    by_expert,
    layer_of,
    operands_of,
    recorded,
    same,
    tokens_of,
    travelled,
)
from tensor_parallel_checks import joined
from torch import Tensor
from torch.distributed.tensor import DTensor

import halfbyte as hb
from halfbyte.functional.split import chunks

STYLES = {"colwise": hb.distributed.GroupedColwise, "rowwise": hb.distributed.GroupedRowwise}
BIASED = ("nvfp4", "bf16")
"""Recipes whose cases have a bias."""


class Part(NamedTuple):
    """A layer whose experts ranks share by features; `case.sizes` are those of the tokens of each rank of "ep"."""

    case: Case
    style: str


def part(recipe: str, style: str, shape: tuple[int, int], sizes: tuple = ((17, 0, 3),), **more) -> Part:
    return Part(Case(recipe, sizes, shape, padding=2, **more), style)


def _layer(case: Case) -> hb.nn.GroupedLinear:
    layer = layer_of(case, 0)
    return layer.add_bias_() if case.recipe in BIASED else layer


def _run(layer, call, x: Tensor, dy: Tensor, offsets: Tensor, first: int = 0) -> Made:
    x = x.detach().clone().requires_grad_()
    with recorded() as found:
        y = call(x, offsets)
        y.backward(dy)
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in layer.parameters()]
    return Made(operands_of(found, first, len(found[0][2])), [y.detach(), x.grad, *grads])


def alone_of(one: Part) -> Made:
    """Run the layer in one process with the tokens of all ranks; for tokens in codes, by that rule."""
    tokens, layer = all_tokens(one.case), _layer(one.case)
    made = _run(layer, layer, tokens.x, tokens.dy, tokens.offsets)
    return travelled(one.case, made) if one.case.dispatch == "nvfp4" else made


def in_parts(one: Part, mesh) -> Made:
    """Run it on the ranks of mesh["ep", "tp"]: operands, y and dx are this rank's, gradients of w and b whole."""
    n, k = one.case.shape
    ep, rank, world = mesh.get_local_rank("ep"), mesh.get_local_rank("tp"), mesh.size(1)
    tokens, layer = tokens_of(one.case, ep), _layer(one.case)
    shapes = {name: p.shape for name, p in layer.state_dict().items()}
    STYLES[one.style]()._apply(layer, mesh["tp"])
    x, dy = tokens[:2]
    if one.style == "rowwise":
        x = x[:, slice(*chunks(k, world)[rank : rank + 2])]
    else:
        dy = dy[:, slice(*chunks(n, world)[rank : rank + 2])]
    if mesh.size(0) == 1:
        made = _run(layer, layer, x, dy, tokens.offsets)
    else:
        module = torch.nn.ModuleDict({"up": layer})
        exchange = hb.distributed.shard_experts_(module, mesh, "up", dispatch=one.case.dispatch)

        def send(x: Tensor, offsets: Tensor) -> Tensor:
            arrived = exchange.send(x, offsets)
            return exchange.back(layer(arrived.x, arrived.offsets), arrived)

        made = _run(layer, send, x, dy, tokens.offsets, exchange.ranks.first)
    assert {name: p.shape for name, p in layer.state_dict().items()} == shapes
    return made


def differing(one: Part, every: list[list[Made]]) -> list[str]:
    """Return what of the parts of all ranks, [ep][tp], is not what one process has."""
    alone, found = ranks.on_cpu(alone_of(one)), []
    for of_ep in every:
        for g, gemms in of_ep[0].operands.items():
            for i in range(len(gemms)):
                for side in range(2):
                    parts = [made.operands[g][i][side] for made in of_ep]
                    want = alone.operands[g][i][side]
                    for what, like, *got in zip(("codes", "scales", "amax"), want, *parts, strict=False):
                        whole = joined(got, like)
                        if isinstance(whole, str) or not same(whole, like):
                            text = whole if isinstance(whole, str) else "differ"
                            found.append(f"{one}: expert {g}, GEMM {i}, {'ab'[side]}: {what} {text}")
    if one.case.dispatch != "plain":
        return found
    tolerance = 1e-5 if one.case.dtype == torch.float32 else 2e-2
    for i, (name, like) in enumerate(zip(("y", "dx", "dw", "db"), alone.results, strict=False)):
        got = _result(one, [[made.results[i] for made in of_ep] for of_ep in every], like, of_tokens=i < 2)
        error = torch.inf if isinstance(got, str) else (got.float() - like.float()).norm()
        if not error <= tolerance * like.float().norm():
            found.append(f"{one}: {name} is off: {got if isinstance(got, str) else float(error)}")
    return found


def _result(one: Part, parts: list[list[Tensor]], like: Tensor, of_tokens: bool) -> Tensor | str:
    """Return a result of all ranks as one process has it, of every expert's tokens those of lower ranks first."""
    if not of_tokens:
        return parts[0][0]
    of_ranks = [joined(of_ep, like.new_empty(len(of_ep[0]), like.shape[1])) for of_ep in parts]
    texts = [t for t in of_ranks if isinstance(t, str)]
    return texts[0] if texts else by_expert(one.case, of_ranks)


def operands(rank: int, world: int, cases: list[Part]) -> list[str]:
    """Return what differs in all cases, on rank 0."""
    warnings.simplefilter("ignore", UserWarning)  # of borders that cut blocks
    sizes = {len(case.case.sizes) for case in cases}
    meshes = {ep: ranks.mesh(ep, world // ep, names=("ep", "tp")) for ep in sorted(sizes)}
    every = ranks.gathered([in_parts(case, meshes[len(case.case.sizes)]) for case in cases])

    def look(i: int, case: Part) -> list[str]:
        of_ranks, each = [one[i] for one in every], world // len(case.case.sizes)
        return differing(case, [of_ranks[at : at + each] for at in range(0, world, each)])

    return ranks.looked_at(cases, look)
