"""A layer in a sampled step: its GEMMs as always, and an op in its backward that adds to its ledger.

Forward and backward are those of `halfbyte.functional.linear`, called with the same arguments; beside them x and the
weights are kept until the backward, where x, w and dy are there together. What is measured there is computed a second
time, at the same place in the random stream, so that nothing of the step itself depends on it. x is kept as a copy that
an op made: code that changes x in place may do so, and a compiler that decides what to save cannot use the copy for
anything else.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional import whole
from halfbyte.functional.channels import outlier_index
from halfbyte.functional.derivatives import LINEAR, first_order
from halfbyte.functional.earlier import in_pairs
from halfbyte.functional.foreign import PLAIN
from halfbyte.functional.linear import outputs_of, prepare, run_backward, run_forward
from halfbyte.functional.mean import without_mean
from halfbyte.functional.operands import BF16_GEMM, Place, both, gradient_specs
from halfbyte.functional.places import DGRAD_SIGNS, DY, FPROP_SIGNS, WGRAD_SIGNS, W, X
from halfbyte.functional.products import gradients_of, multiply
from halfbyte.functional.request import Call, Request, draws_of
from halfbyte.functional.weights import takes_amax
from halfbyte.layout import Blocks, from_rows, matrix_shape
from halfbyte.nn.linear import LinearLayer, gather
from halfbyte.rng import Draw
from halfbyte.sides import Side
from halfbyte.spec import Spec
from halfbyte.stats.figures import PRODUCTS, SIDES, TENSORS, Entries, entries
from halfbyte.stats.measure import Run, anew, product_sums, side_sums, tensor_sums


def observed_outputs(
    x: Tensor, modules: Sequence[LinearLayer], call: int, x_amaxes: ops.Amaxes | None
) -> tuple[Tensor, ...]:
    """Return the outputs of layers that share one input; their backward adds to their ledgers.

    Args:
        x, call, x_amaxes: as for `halfbyte.nn.linear.run_shared`.
        modules: of one recipe; those without a ledger are not measured.
    """
    layers, recipe = gather(x, modules, call), modules[0].recipe
    is_plain = all(type(weight) in PLAIN for weight in layers.weights)
    if not is_plain or not recipe.specs or not torch.is_grad_enabled():
        return outputs_of(x, layers, recipe, None, x_amaxes)
    made, tensors = prepare(x, layers, recipe, None, x_amaxes)
    if made is None:
        return outputs_of(x, layers, recipe, None, x_amaxes)
    ledgers = [module.ledger for module in modules]
    outputs = _ObservedLinear.apply(made, *tensors, *ledgers)
    return outputs if x.dim() == 2 else tuple([from_rows(y, x.shape) for y in outputs])


class _ObservedLinear(torch.autograd.Function):
    """As the autograd function of linear layers; behind its tensors come the ledgers, None for layers without one."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        n = call.request.count
        outputs, kept = run_forward(ctx, call, x, tensors[:-n])
        ctx.kept_count = len(kept)
        amaxes, x_amaxes = tensors[2 * n : 3 * n], tensors[5 * n + 1 : 5 * n + 3]
        ctx.save_for_backward(*kept, torch.ops.halfbyte.hold(x), *tensors[:n], *amaxes, *x_amaxes, *tensors[-n:])
        return outputs

    @staticmethod
    @first_order(LINEAR)
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        request, streams = ctx.call.request, ctx.call.streams
        n = request.count
        saved = ctx.saved_tensors  # once: checkpointing refuses to be asked again
        kept, (x, *given) = saved[: ctx.kept_count], saved[ctx.kept_count :]
        weights, amaxes, x_amaxes, ledgers = given[:n], given[n : 2 * n], given[2 * n : 2 * n + 2], given[2 * n + 2 :]
        dy_amaxes = [t for i in range(n) for t in ctx.earlier[4 * i : 4 * i + 2]] if ctx.earlier else [None] * 2 * n
        gradients = run_backward(ctx, kept, dys)
        needs = ctx.needs_input_grad[1 : 2 + n]
        flags = ",".join(
            [str(int(ledger is not None and dy is not None)) for ledger, dy in zip(ledgers, dys, strict=True)]
        )
        bases = kept[ctx.kept_count - n - 1 :]
        text = whole.request_text(request, needs, flags, with_codes=False)
        wanted = [ledger for ledger, dy in zip(ledgers, dys, strict=True) if ledger is not None and dy is not None]
        tensors = [x, *weights, *amaxes, *bases, *dys, *x_amaxes, *dy_amaxes]
        torch.ops.halfbyte.observe_linear(wanted, text, tensors, list(streams))
        return gradients


class Observed:
    """One call of linear layers as its backward knows it: request, tensors, and where it draws.

    Args:
        request, needs, streams: of the call.
        tensors: x, n each of weights and their amaxes, n + 1 bases; where the gradients are there too, n of them, then
            two amaxes of x and two of each gradient, None for its own: those with which the call quantized.
        run: `ops.run` where other calls will have the same shapes.
    """

    def __init__(
        self,
        request: Request,
        needs: Sequence[bool],
        tensors: Sequence[Any],
        streams: Sequence[int],
        run: Run = anew,
    ) -> None:
        n, self.run = request.count, run
        x, *rest = tensors
        self.request, self.needs, self.streams = request, tuple(needs), streams
        self.x = x.reshape(matrix_shape(x.shape))
        self.weights = [w.detach().to(x.dtype) for w in rest[:n]]
        self.amaxes, self.bases, self.dys = rest[n : 2 * n], rest[2 * n : 3 * n + 1], rest[3 * n + 1 : 4 * n + 1]
        of_x, of_dys = rest[4 * n + 1 : 4 * n + 3], rest[4 * n + 3 :]
        self.x_amaxes, self.dy_amaxes = ops.Amaxes(*of_x), in_pairs(of_dys, n)
        *self.draws, self.signs = draws_of(request, self.bases, streams)
        self.recipe = request.recipe
        gemms = self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad
        self.fprop, self.dgrad, self.wgrad = (gemm or BF16_GEMM for gemm in gemms)

    def place(self, draw: Draw | None, stream: int, signs: tuple[int, int]) -> Place:
        """Return where an operand draws; its codes are kept."""
        return Place(draw, self.signs, stream, signs, (False, False))

    def measured(
        self,
        names: tuple[str, str],
        t: Tensor,
        specs: tuple[Spec | None, Spec | None],
        place: Place,
        amaxes: ops.Amaxes,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Quantize t and t.T as a layer does and return {name: sums and largest magnitude} of what is quantized."""
        found: dict[str, tuple[Tensor, Tensor]] = {}

        def quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
            made = ops.quantize_row_col(t, row, col)
            for name, side, blocks, turned in zip(names, (row, col), made, (t, t.T), strict=True):
                if side is not None and blocks is not None:
                    found[name] = side_sums(turned, side, blocks, self.run)
            return made

        both(t, *specs, place, amaxes, quantize)
        return found


def observe(seen: Observed, ledgers: dict[int, Tensor]) -> None:
    """Add what was seen to the ledgers of the layers with these numbers."""
    recipe = seen.recipe
    x_parts, x_tensor, forward = _sides_of_x(seen), tensor_sums(seen.x, seen.run), _forward(seen, ledgers)
    for i, ledger in ledgers.items():
        w, dy = seen.weights[i], seen.dys[i].reshape(matrix_shape(seen.dys[i].shape))
        parts = entries(ledger, w.shape[1], w.shape[0])
        need_dx, need_dw = seen.needs[0], seen.needs[1 + i]
        specs = gradient_specs(recipe, need_dx, need_dw)
        place = seen.place(seen.draws[i], DY, (DGRAD_SIGNS, WGRAD_SIGNS))
        sides = x_parts | _sides_of_w(w, seen, i)
        sides |= seen.measured(("dy.row", "dy.col"), dy, specs, place, seen.dy_amaxes[i])
        tensors = x_tensor, tensor_sums(w, seen.run), tensor_sums(dy, seen.run)
        products = _products_lost(_products(seen, forward, i, dy), (seen.x, w, dy), seen.run)
        _add(parts, sides, tensors, products)


def _sides_of_w(w: Tensor, seen: Observed, i: int) -> dict:
    """Measure a weight as fprop and dgrad multiply by it."""
    recipe, names = seen.recipe, ("w.row", "w.col")
    specs = seen.fprop.b, seen.dgrad.b if seen.needs[0] else None
    amax = seen.amaxes[seen.request.amax_of[i]]
    amaxes = ops.Amaxes(*(amax if takes_amax(spec) else None for spec in specs))
    place = seen.place(seen.draws[i], W, (FPROP_SIGNS, DGRAD_SIGNS))
    if recipe.backward == "original":
        return seen.measured(names, w, specs, place, amaxes)
    row = seen.measured(names, w, (specs[0], None), place, amaxes)
    again = _dequantized(w, specs[0], place, amaxes)
    return row | seen.measured(names, again, (None, specs[1]), place, ops.Amaxes())


def _sides_of_x(seen: Observed) -> dict:
    recipe = seen.recipe
    names, specs = ("x.row", "x.col"), (seen.fprop.a, seen.wgrad.b if any(seen.needs[1:]) else None)
    place = seen.place(seen.draws[0], X, (FPROP_SIGNS, WGRAD_SIGNS))
    x, amaxes = seen.x, seen.x_amaxes
    if recipe.splits_mean:
        x, amaxes = without_mean(x, ops.token_mean(x)), ops.Amaxes()
    if recipe.channels is not None and recipe.channels.kind == "mxfp8":
        x, amaxes = x.index_fill(1, outlier_index(x, recipe.channels), 0), ops.Amaxes()
    if recipe.backward == "original":
        return seen.measured(names, x, specs, place, amaxes)
    row = seen.measured(names, x, (specs[0], None), place, amaxes)
    return row | seen.measured(names, _dequantized(x, specs[0], place, amaxes), (None, specs[1]), place, ops.Amaxes())


def _dequantized(t: Tensor, spec: Spec | None, place: Place, amaxes: ops.Amaxes) -> Tensor:
    """Return the values of fprop's operand, which a dequantized backward quantizes again."""
    row, _ = both(t, spec, None, place, amaxes)
    return ops.dequantize(row, t.dtype) if isinstance(row, ops.Operand) else row


def _operands_of(seen: Observed) -> list[Tensor | None]:
    """Return what `multiply` takes: no bias, and nothing cached."""
    nothing = [None] * seen.request.count
    return [seen.x, *seen.weights, *nothing, *seen.amaxes, *nothing, *seen.bases, *seen.x_amaxes]


def _forward(seen: Observed, measured: Container[int]) -> tuple[list[Tensor], list]:
    """Return the outputs of all layers, and what the backward needs of those that are measured."""
    needs = [need and i in measured for i, need in enumerate(seen.needs[1:])]
    return multiply(seen.request, [seen.needs[0], *needs], _operands_of(seen), seen.streams)


def _products(seen: Observed, forward: tuple[list[Tensor], list], i: int, dy: Tensor) -> dict[str, Tensor]:
    """Return what one layer's three GEMMs return, as far as they run."""
    (outputs, kept), n = forward, seen.request.count
    own = [j == i for j in range(n)]
    needs = seen.needs[0], *[need and mine for need, mine in zip(seen.needs[1:], own, strict=True)]
    nothing = [None] * n
    made = {"y": outputs[i]}
    dys = [dy if mine else None for mine in own]
    dtypes = seen.x.dtype, [seen.x.dtype] * n, nothing
    state = kept, [*seen.draws, seen.signs], nothing
    dx, *dws = gradients_of(seen.request, state, dys, seen.dy_amaxes, ((*needs, *[False] * n), dtypes))
    return made | {name: t for name, t in (("dx", dx), ("dw", dws[i])) if t is not None}


def _products_lost(products: dict[str, Tensor], operands: tuple[Tensor, Tensor, Tensor], run: Run) -> dict[str, Tensor]:
    """Return {name: sums} of what the GEMMs returned."""
    x, w, dy = operands
    pairs = {"y": (x, w), "dx": (dy, w.T), "dw": (dy.T, x.T)}
    return {name: product_sums(got, *pairs[name], run) for name, got in products.items()}


def _add(
    parts: Entries,
    sides: dict[str, tuple[Tensor, Tensor]],
    tensors: Sequence[tuple[Tensor, Tensor, Tensor]],
    products: dict[str, Tensor],
) -> None:
    """Add sums to a ledger, and raise its maxima: one launch each, whatever there is."""
    added = [(parts.sides[SIDES.index(name)], sums) for name, (sums, _) in sides.items()]
    raised = [(parts.amaxes[SIDES.index(name)], largest) for name, (_, largest) in sides.items()]
    for i, (sums, columns, largest) in enumerate(tensors):
        added += [(parts.tensors[i], sums), (parts.channels[i], columns)]
        raised.append((parts.amaxes[len(SIDES) + i], largest))
    added += [(parts.products[PRODUCTS.index(name)], sums) for name, sums in products.items()]
    torch._foreach_add_(*map(list, zip(*added, strict=True)))
    torch._foreach_maximum_(*map(list, zip(*raised, strict=True)))


def _observe_linear(
    ledgers: Sequence[Tensor], text: str, tensors: Sequence[Tensor | None], streams: Sequence[int]
) -> None:
    request, needs, (flags,) = whole.parse_request(text)
    which = [i for i, flag in enumerate(flags.split(",")) if flag == "1"]
    ledgers = [ledger.data for ledger in ledgers]  # no new version: another call of the layer has saved its ledger too
    with torch.no_grad():
        seen = Observed(replace(request, save=True), needs, tensors, list(streams), ops.run)
        observe(seen, dict(zip(which, ledgers, strict=True)))


def _nothing(*arguments: Any) -> None:
    """The fake of an op that returns nothing."""


_LIBRARY = torch.library.Library("halfbyte", "FRAGMENT")
_LIBRARY.define("hold(Tensor x) -> Tensor")
_LIBRARY.impl("hold", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::hold", torch.empty_like, lib=_LIBRARY)
_LIBRARY.define("observe_linear(Tensor(a!)[] ledgers, str text, Tensor?[] tensors, SymInt[] streams) -> ()")
_LIBRARY.impl("observe_linear", _observe_linear, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::observe_linear", _nothing, lib=_LIBRARY)

assert TENSORS == ("x", "w", "dy"), "the order in which observe measures them"
