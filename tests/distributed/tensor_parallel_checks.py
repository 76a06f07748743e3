"""Linear layers that ranks share: the operands of every GEMM, put together again, beside those of one process."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import NamedTuple

import ranks
import torch
from linear_cases import RECIPES, VARIANTS
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import halfbyte as hb
from halfbyte import ops
from halfbyte.functional.linear import Layers
from halfbyte.functional.sharded import outputs_of_parts
from halfbyte.ops import quantization, repeat

EVERY = {**RECIPES, **VARIANTS, "rl_tiles": hb.recipes.rl(weight_block=(16, 16))}
ALL = {name: recipe for name, recipe in EVERY.items() if recipe.channels is None}
STYLES = ("colwise", "rowwise", "tokens")
TRAVELLING = ("x in codes", "dy in codes")


class Case(NamedTuple):
    """One layer: M tokens, N out_features, K in_features."""

    recipe: str
    style: str
    sizes: tuple[int, int, int]
    dtype: torch.dtype = torch.float32
    sequences: int = 1


class Made(NamedTuple):
    """What a forward and a backward multiplied, and what they returned."""

    operands: list
    results: list


def stored(operand) -> list:
    """Return the tensors of an operand, None for a plain one's scales and amax."""
    if isinstance(operand, ops.Operand):
        return [t.detach().clone() for t in operand.blocks]
    return [operand.detach().clone(), None, None]


@contextmanager
def as_codes():
    """Let every operand be codes, also where kernels would hand over values, and every call run anew."""
    kept = quantization.outputs_are_kept, ops.emulates, repeat._prepared
    quantization.outputs_are_kept, ops.emulates, repeat._prepared = lambda: True, lambda device: False, lambda: None
    try:
        yield
    finally:
        quantization.outputs_are_kept, ops.emulates, repeat._prepared = kept


@contextmanager
def recorded(label=str):
    """Note label() and the operands of every GEMM, as codes, in the order in which they run."""
    found, kept = [], (ops.gemm_nt, ops.gemm_nt_add, ops.amax_with_product)

    def noting(run):
        def noted(a, b, *args, **options):
            found.append((stored(a), stored(b), label()))
            return run(a, b, *args, **options)

        return noted

    def noted_row(w, a, *args):  # a GEMM of one row, where the weight's amax is found beside
        found.append((stored(a[None]), stored(w), label()))
        return kept[2](w, a, *args)

    ops.gemm_nt, ops.gemm_nt_add, ops.amax_with_product = noting(kept[0]), noting(kept[1]), noted_row
    try:
        with as_codes():
            yield found
    finally:
        ops.gemm_nt, ops.gemm_nt_add, ops.amax_with_product = kept


def inputs(case: Case) -> tuple[Tensor, ...]:
    """Return x, w, bias and dy: some outliers, some zeros."""
    m, n, k = case.sizes
    generator = torch.Generator().manual_seed(m * 10007 + n * 101 + k)
    made = [torch.randn(*shape, generator=generator) for shape in ((m, k), (n, k), (n,), (m, n))]
    for t in made:
        t.view(-1)[:: max(7, t.numel() // 3)] *= 50
    if case.sequences > 1:
        made[0], made[3] = (t.unflatten(0, (case.sequences, -1)) for t in (made[0], made[3]))
    return tuple(t.to(ranks.device(), case.dtype) for t in made)


def whole(case: Case) -> Made:
    """Run a layer in one process."""
    x, w, bias, dy = inputs(case)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    with recorded() as found:
        y = hb.linear(*leaves, ALL[case.recipe], rng=hb.Philox(5, 1 << 40))
        y.backward(dy)
    return Made(found, [y.detach(), *[t.grad for t in leaves]])


def in_parts(case: Case, mesh) -> Made:
    """Run it on the ranks of a mesh: the operands are those of this rank, the results whole."""
    x, w, bias, dy = inputs(case)
    of_x, of_w, of_bias = {
        "colwise": (Replicate(), Shard(0), Shard(0)),
        "rowwise": (Shard(1), Shard(1), Replicate()),
        "tokens": (Shard(0), Replicate(), Replicate()),
        "x in codes": (Shard(1 if case.sequences > 1 else 0), Shard(0), Shard(0)),
        "dy in codes": (Shard(2 if case.sequences > 1 else 1), Shard(1), Replicate()),
    }[case.style]
    leaves = [
        distribute_tensor(t, mesh, [place], src_data_rank=None).requires_grad_()
        for t, place in ((x, of_x), (w, of_w), (bias, of_bias))
    ]
    rng = hb.Philox(5, 1 << 40)
    with recorded() as found:
        if case.style == "dy in codes":
            layers = Layers([leaves[1]], [leaves[2]], [None], [None], [None], rng)
            (y,) = outputs_of_parts(leaves[0], layers, ALL[case.recipe], None, dy.dim() - 2)
            assert y.placements == (Shard(dy.dim() - 2),)
        else:
            y = hb.linear(*leaves, ALL[case.recipe], rng=rng)
        y.backward(distribute_tensor(dy, mesh, [Replicate() if y.placements[0].is_partial() else y.placements[0]]))
    for leaf, grad in zip(leaves, (t.grad for t in leaves), strict=True):
        assert isinstance(grad, DTensor) and grad.shape == leaf.shape
    return Made(found, [y.full_tensor(), *[t.grad.full_tensor() for t in leaves]])


def joined(parts: list, like):
    """Return tensors of all ranks put together as rows or columns, or one of them where each is as large as `like`."""
    if like is None or any(part is None for part in parts):
        return like if all(part is None for part in parts) and like is None else "present on some ranks only"
    if all(part.shape == like.shape for part in parts):
        return parts[0] if all(torch.equal(part, parts[0]) for part in parts) else "ranks differ"
    for axis in range(like.dim()):
        shapes = [(*part.shape[:axis], *part.shape[axis + 1 :]) for part in (*parts, like)]
        if len(set(shapes)) == 1 and sum(part.shape[axis] for part in parts) == like.shape[axis]:
            return torch.cat(parts, axis)
    return f"{[tuple(part.shape) for part in parts]} do not make {tuple(like.shape)}"


def same(a, b) -> bool:
    if a is None or b is None or isinstance(a, str):
        return a is b
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def differing_operands(alone: list, every: list[list], splits_mean: bool = False) -> list[str]:
    """Return in what the operands of all ranks, put together, are not those of one process."""
    if {len(made) for made in every} != {len(alone)}:
        return [f"{[len(made) for made in every]} GEMMs, {len(alone)} in one process"]
    found = []
    for i, expected in enumerate(alone):
        for side in range(2):
            for what, like, *parts in zip(
                ("codes", "scales", "amax"), expected[side], *(made[i][side] for made in every), strict=True
            ):
                got = joined(parts, like)
                # The gradient that goes with a mean of x: in what order its tokens are added up is open.
                is_sum = like is not None and like.shape[1:] == (1,) and splits_mean
                if not (torch.allclose(got, like, rtol=1e-5, atol=1e-4) if is_sum else same(got, like)):
                    found.append(f"GEMM {i}, {'ab'[side]}: {what} {got if isinstance(got, str) else 'differ'}")
    return found


def differing(case: Case, alone: Made, every: list[Made]) -> list[str]:
    """Return what of the parts of all ranks is not what one process has."""
    splits = ALL[case.recipe].splits_mean
    found = differing_operands(alone.operands, [made.operands for made in every], splits)
    found = [f"{case}: {line}" for line in found]
    tolerance = 1e-5 if every[0].results[0].dtype == torch.float32 else 2e-2
    for name, ours, theirs in zip(("y", "dx", "dw", "db"), every[0].results, alone.results, strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-30)
        if not error <= tolerance:
            found.append(f"{case}: {name} is off by {float(error):.2g}")
    return found


def operands(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Return what differs in all cases, on rank 0."""
    warnings.simplefilter("ignore", UserWarning)  # of borders that cut blocks
    mesh = ranks.mesh(world)
    every = ranks.gathered([in_parts(case, mesh) for case in cases])
    return ranks.looked_at(cases, lambda i, case: differing(case, ranks.on_cpu(whole(case)), [one[i] for one in every]))


def operands_under_autocast(rank: int, world: int, cases: list[Case]) -> list[str]:
    with torch.autocast(ranks.device().type, torch.bfloat16):
        return operands(rank, world, cases)
