"""Experts that ranks share: the operands of every GEMM, expert by expert, beside those of one process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import grouped_cases
import ranks
import torch
from linear_cases import RECIPES, VARIANTS, WGRAD_SIGNS, X
from tensor_parallel_checks import as_codes
from torch import Tensor
from torch.distributed.tensor import DTensor

import halfbyte as hb
from halfbyte import ops
from halfbyte.functional.dispatch import dispatch_problem
from halfbyte.reference.grouped import expert_blocks, group_blocks, group_bounds

EVERY = {**grouped_cases.RECIPES, **RECIPES, **VARIANTS}
ALL = {name: recipe for name, recipe in EVERY.items() if not recipe.splits_mean and recipe.channels is None}
TRAVELLING = tuple(name for name, recipe in ALL.items() if dispatch_problem(recipe) is None)
SEED, POSITION = 7, 3


class Case(NamedTuple):
    """A layer of experts.

    sizes: of the groups, of every rank.
    padding: tokens of every rank behind its last group.
    shape: N, K.
    first: the data-parallel rank of the first of the ranks.
    """

    recipe: str
    sizes: tuple[tuple[int, ...], ...]
    shape: tuple[int, int] = (24, 40)
    padding: int = 0
    dtype: torch.dtype = torch.float32
    dispatch: str = "plain"
    capacity: int | None = None
    first: int = 0


class Tokens(NamedTuple):
    """Tokens of one rank, or of all of them sorted by expert."""

    x: Tensor
    dy: Tensor
    offsets: Tensor


class Made(NamedTuple):
    """What each expert multiplied, [expert][GEMM][side] -> tensors; and y, dx and dw."""

    operands: dict[int, list]
    results: list


def tokens_of(case: Case, rank: int) -> Tokens:
    """Return the tokens of a rank: some outliers; whatever is in the padding must not matter."""
    n, k = case.shape
    generator, sizes = torch.Generator().manual_seed(100 * rank + 1), case.sizes[rank]
    x, dy = (torch.randn(sum(sizes) + case.padding, width, generator=generator) for width in (k, n))
    for t in (x, dy):
        t.view(-1)[:: max(7, t.numel() // 3)] *= 50
    if case.padding:
        x[-case.padding :], dy[-case.padding :] = torch.nan, torch.inf
    device = ranks.device()
    return Tokens(x.to(device, case.dtype), dy.to(device, case.dtype), grouped_cases.ends(sizes).to(device))


def by_expert(case: Case, tensors: list[Tensor]) -> Tensor:
    """Return rows of all ranks sorted by expert, those of lower ranks first."""
    parts = [t[rows] for sizes, t in zip(case.sizes, tensors, strict=True) for rows in grouped_cases.slices(sizes)]
    experts = len(case.sizes[0])
    return torch.cat([parts[rank * experts + g] for g in range(experts) for rank in range(len(tensors))])


def all_tokens(case: Case) -> Tokens:
    every = [tokens_of(case, rank) for rank in range(len(case.sizes))]
    sizes = tuple(sum(of_ranks) for of_ranks in zip(*case.sizes, strict=True))
    x, dy = (by_expert(case, [getattr(one, name) for one in every]) for name in ("x", "dy"))
    return Tokens(x, dy, grouped_cases.ends(sizes).to(ranks.device()))


def layer_of(case: Case, rank: int) -> hb.nn.GroupedLinear:
    torch.manual_seed(5)
    state = hb.RunState(SEED, rank=rank)
    hb.nn.GroupedLinear(1, 1, 1, state=state)  # the layer's streams do not begin at 0
    options = {"dtype": case.dtype, "recipe": ALL[case.recipe], "state": state}
    layer = hb.nn.GroupedLinear(len(case.sizes[0]), case.shape[1], case.shape[0], **options).to(ranks.device())
    for _ in range(POSITION):
        state.advance()
    return layer


@contextmanager
def recorded():
    """Note the operands of every grouped GEMM and its offsets, in the order in which they run."""
    found, kept = [], (ops.grouped_gemm_nt, ops.grouped_gemm_nt_batch_invariant)

    def noting(run):
        def noted(a, b, offsets, **options):
            found.append((a, b, offsets.clone()))
            return run(a, b, offsets, **options)

        return noted

    ops.grouped_gemm_nt, ops.grouped_gemm_nt_batch_invariant = map(noting, kept)
    try:
        with as_codes():
            yield found
    finally:
        ops.grouped_gemm_nt, ops.grouped_gemm_nt_batch_invariant = kept


def of_expert(operand, offsets: Tensor, g: int, contraction: bool, cols: int) -> list[Tensor]:
    """Return the tensors of one expert's operand."""
    quantized = isinstance(operand, ops.Operand)
    stored = operand.blocks.qdata if quantized else operand
    if stored.dim() == 3:
        return list(expert_blocks(operand.blocks, operand.spec, g)) if quantized else [operand[g]]
    bounds = group_bounds(offsets, cols if contraction else stored.shape[0])
    if quantized:
        return list(group_blocks(operand.blocks, operand.spec, bounds, g, contraction=contraction))
    start, stop = bounds[g]
    return [operand[:, start:stop] if contraction else operand[start:stop]]


def operands_of(found: list, first: int, count: int) -> dict[int, list]:
    """Return, for each expert that is here, the operands of every GEMM."""
    made: dict[int, list] = {}
    for g in range(count):
        made[first + g] = []
        for a, b, offsets in found:
            is_experts = (b.blocks.qdata if isinstance(b, ops.Operand) else b).dim() == 3
            sides = [of_expert(side, offsets, g, not is_experts, int(offsets[-1])) for side in (a, b)]
            made[first + g].append([[t.detach().clone() for t in side] for side in sides])
    return made


def whole(case: Case) -> Made:
    """Run the layer in one process with the tokens of all ranks."""
    tokens, layer = all_tokens(case), layer_of(case, case.first)
    x = tokens.x.requires_grad_()
    with recorded() as found:
        y = layer(x, tokens.offsets)
        y.backward(tokens.dy)
    return Made(operands_of(found, 0, layer.experts), [y.detach(), x.grad, layer.weight.grad])


def shared(case: Case, mesh) -> Made:
    """Run it on the ranks of a mesh; the results are those of this rank's tokens, and the whole gradient of w."""
    rank = mesh.get_local_rank()
    tokens, layer = tokens_of(case, rank), layer_of(case, case.first + rank)
    module = torch.nn.ModuleDict({"up": layer})
    exchange = hb.distributed.shard_experts_(module, mesh, "up", dispatch=case.dispatch, capacity=case.capacity)
    x = tokens.x.requires_grad_()
    with recorded() as found:
        arrived = exchange.send(x, tokens.offsets)
        y = exchange.back(layer(arrived.x, arrived.offsets), arrived)
        y.backward(tokens.dy)
    grad = layer.weight.grad
    assert isinstance(grad, DTensor) and grad.shape == layer.weight.shape
    if case.padding:
        assert not y[-case.padding :].any() and not x.grad[-case.padding :].any()
    holders = exchange.ranks
    return Made(operands_of(found, holders.first, holders.here), [y.detach(), x.grad, grad.full_tensor()])


def travelled(case: Case, alone: Made) -> Made:
    """Return what one process has that applies the rule of tokens in codes; its results are not looked at."""
    assert case.first == 0, "the seed below is that of rank 0"
    tokens, recipe, layer = all_tokens(case), ALL[case.recipe], layer_of(case, 0)
    rng = hb.Philox(SEED, (POSITION << 32) + layer.stream)
    spec, made = replace(recipe.fprop.a, outer="row"), {}
    sizes = tuple(sum(of_ranks) for of_ranks in zip(*case.sizes, strict=True))
    for g, rows in enumerate(grouped_cases.slices(sizes)):
        (_, w_row), (dy_row, w_col), (dy_col, _) = alone.operands[g]
        row = hb.quantize(tokens.x[rows], spec)
        col, wgrad = row.dequantize(case.dtype).T, recipe.wgrad or hb.GemmSpec()
        if wgrad.b is None:
            x_col = [col]
        else:
            own = {"rng": rng.at(X + 1).group(g), "sign_rng": rng.at(WGRAD_SIGNS).group(g)}
            x_col = list(hb.quantize(col.contiguous(), wgrad.b, **own).blocks)
        made[g] = [[list(row.blocks), w_row], [dy_row, w_col], [dy_col, x_col]]
    return Made(made, alone.results)


def same(a: Tensor, b: Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def alike(a: Tensor, b: Tensor) -> bool:
    """Return whether results are the same: bit for bit, but for the order of sums where kernels run."""
    if ranks.device().type == "cpu":
        return same(a, b)
    # Tiles begin elsewhere among an expert's tokens; bf16 rounds once, to eight bits.
    limit = 1e-5 if b.dtype == torch.float32 else 2**-8
    return a.shape == b.shape and bool((a.float() - b.float()).norm() <= limit * b.float().norm())


def differing(case: Case, every: list[Made]) -> list[str]:
    """Return in what the experts of all ranks are not those of one process."""
    alone = whole(case)
    expected = ranks.on_cpu(travelled(case, alone) if case.dispatch == "nvfp4" else alone)
    found, seen = [], {}
    for made in every:
        seen |= made.operands
    if sorted(seen) != sorted(expected.operands):
        return [f"{case}: experts {sorted(seen)}"]
    for g, gemms in expected.operands.items():
        for i, sides in enumerate(gemms):
            for side, tensors in enumerate(sides):
                for what, want, got in zip(("codes", "scales", "amax"), tensors, seen[g][i][side], strict=False):
                    if not same(got, want):
                        found.append(f"{case}: expert {g}, GEMM {i}, {'ab'[side]}: {what} differ")
    if case.dispatch == "plain":
        y, dx = (by_expert(case, [made.results[i] for made in every]) for i in range(2))
        for name, got, want in zip(("y", "dx", "dw"), (y, dx, every[0].results[2]), expected.results, strict=True):
            if not alike(got, want):
                found.append(f"{case}: {name} differs")
    return found


def operands(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Return what differs in all cases, on rank 0."""
    mesh = ranks.mesh(world, names=("ep",))
    every = ranks.gathered([shared(case, mesh) for case in cases])
    return ranks.looked_at(cases, lambda i, case: differing(case, [one[i] for one in every]))


def operands_of_two_groups(rank: int, world: int, recipe: str) -> list[str]:
    """Return what differs in either of two groups of ranks that see other data, as `place_ranks_` has them draw."""
    mesh = ranks.mesh(2, world // 2, names=("dp", "ep"))
    state = hb.RunState(SEED)
    assert hb.distributed.place_ranks_(state, mesh) == rank
    first = rank // (world // 2) * (world // 2)
    case = Case(recipe, ((3, 17, 0, 5), (40, 0, 1, 2)), first=first)
    every = ranks.gathered(shared(case, mesh["ep"]))
    return differing(case, every[first : first + world // 2])
