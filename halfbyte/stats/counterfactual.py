"""Linear layers with some operands in high precision: what a step would be if one of the six were not quantized.

An operand that is rotated cannot stand unrotated beside the other one of its GEMM, and a recipe refuses that. Here such
an operand is rotated likewise and not quantized: in exact arithmetic the product is that of the unrotated operand with
what the other one's codes stand for, rotated back. The rotation ends in bf16, as in the quantized operand. Where both
operands of a GEMM stay in high precision, nothing is rotated.

With nothing in high precision the bits are those of the layers themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte import ops, reference
from halfbyte.functional.derivatives import LINEAR, first_order
from halfbyte.functional.foreign import PLAIN
from halfbyte.functional.linear import Layers, as_gradients, note, outputs_of, prepare, run_call
from halfbyte.functional.mean import bias_with_mean, without_mean
from halfbyte.functional.operands import (
    Place,
    add_dx,
    both,
    gradient_specs,
    weight_gradient,
)
from halfbyte.functional.places import DGRAD_SIGNS, DY, FPROP_SIGNS, WGRAD_SIGNS, W, X
from halfbyte.functional.weights import takes_amax
from halfbyte.layout import Blocks, from_rows, matrix_shape
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.linear import LinearLayer, gather
from halfbyte.rng import StreamPhilox
from halfbyte.sides import Side
from halfbyte.spec import Recipe, Spec
from halfbyte.stats.experts import Run, filled_groups, place_of_group, where_drawn
from halfbyte.stats.observe import Observed

Exact = frozenset[str]
"""Operands in high precision, as `figures.SIDES` calls them."""

Specs = tuple[Spec | None, Spec | None]


class Counterfactual:
    """What layers run in the place of their GEMMs, as their attribute `instead`.

    Args:
        exact: {id of a layer: its operands in high precision}; of the others none.

    Attributes:
        rows: {id of a layer: tokens that it multiplied}.
    """

    def __init__(self, exact: Mapping[int, Exact]) -> None:
        self.exact = dict(exact)
        self.rows: Counter[int] = Counter()

    def __call__(
        self, x: Tensor, modules: Sequence[LinearLayer], call: int, x_amaxes: ops.Amaxes | None
    ) -> tuple[Tensor, ...]:
        """Return the outputs of layers that share one input.

        Raises:
            ValueError: a weight exists as codes only.
        """
        layers, recipe = gather(x, modules, call), modules[0].recipe
        for module, weight in zip(modules, layers.weights, strict=True):
            if type(weight) not in PLAIN:
                raise ValueError(
                    f"{module.title}: its weight is a {type(weight).__name__}, whose values in high precision are "
                    "gone; ask for the layers that hold theirs"
                )
        made, tensors = prepare(x, layers, recipe, None, x_amaxes)
        if made is None:
            return outputs_of(x, layers, recipe, None, x_amaxes)
        self.rows.update({id(module): x.numel() // x.shape[-1] for module in modules})
        exact = tuple([self.exact.get(id(module), frozenset()) for module in modules])
        outputs = _CounterfactualLinear.apply((made, exact), *tensors)
        return outputs if x.dim() == 2 else tuple([from_rows(y, x.shape) for y in outputs])

    def of_experts(
        self,
        run: Run,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
        layer: GroupedRecipe,
        place: StreamPhilox | None,
    ) -> Tensor:
        """Return the outputs of experts, group by group; arguments as for `experts.observed_experts`."""
        x, w, offsets, bias = tensors
        exact = (self.exact.get(id(layer), frozenset()),)
        base, sign_base, stream = where_drawn(layer.recipe, place, x.device)
        parts, end = [], 0
        for index, rows in filled_groups(offsets, x.shape[0]):
            bases = place_of_group(base, index), place_of_group(sign_base, index)
            rng = None if bases[0] is None else [StreamPhilox(bases[0], stream, None, bases[1])]
            own = Layers([w[index]], [None if bias is None else bias[index]], [None], [None], [None], rng)
            made, given = prepare(x[rows], own, layer.recipe, None, None)
            parts.append(run_call(None, given, x[rows].shape, 1) if made is None else _run_group((made, exact), given))
            end = rows.stop
        self.rows.update({id(layer): end})
        if not parts:
            return run(x, w, offsets)
        y = torch.cat([y for (y,) in parts])
        return pad(y, (0, 0, 0, x.shape[0] - end))


def _run_group(how: tuple, tensors: tuple) -> tuple[Tensor, ...]:
    return _CounterfactualLinear.apply(how, *tensors)


class _CounterfactualLinear(torch.autograd.Function):
    """As the autograd function of linear layers, with every operand as `exact` says."""

    @staticmethod
    def forward(ctx: Any, how: tuple, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        call, exact = how
        n = call.request.count
        ctx.set_materialize_grads(False)
        note(ctx, call, x, tensors)
        needs = ctx.needs_input_grad[1 : 2 + n]
        biases, bases = tensors[n : 2 * n], tensors[4 * n : 5 * n + 1]
        kept = [x, *tensors[:n], *tensors[2 * n : 3 * n], *bases]
        ctx.save_for_backward(*kept)
        ctx.exact, ctx.needs = exact, needs
        seen = Observed(call.request, needs, kept, call.streams)
        outputs = []
        for i, bias in enumerate(biases):
            a, _, mean = _x_operands(seen, exact[i])
            b, _ = _w_operands(seen, i, exact[i])
            added = bias
            if mean is not None and seen.fprop.a is not None:
                added = bias_with_mean(bias, mean, seen.weights[i], x.dtype)
            outputs.append(ops.gemm_nt(*_meeting(a, b), out_dtype=call.request.out_dtype, bias=added))
        return tuple(outputs)

    @staticmethod
    @first_order(LINEAR)
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        seen = Observed(ctx.call.request, ctx.needs, ctx.saved_tensors, ctx.call.streams)
        n = seen.request.count
        x_dtype, w_dtypes, b_dtypes = ctx.dtypes
        used = [i for i, dy in enumerate(dys) if dy is not None]
        dx: Tensor | None = None
        dws: list[Tensor | None] = [None] * n
        dbs: list[Tensor | None] = [None] * n
        for i in used:
            dy = dys[i]
            assert dy is not None, "filtered above"
            outer: tuple[Tensor, Tensor] | None = None
            dy_MN, exact = dy.reshape(matrix_shape(dy.shape)), ctx.exact[i]
            place = seen.place(seen.draws[i], DY, (DGRAD_SIGNS, WGRAD_SIGNS))
            specs = gradient_specs(seen.recipe, seen.needs[0], seen.needs[1 + i])
            row, col = _picked(dy_MN, specs, place, ops.Amaxes(), _flags(exact, "dy"))
            if seen.needs[0]:
                _, right = _w_operands(seen, i, exact)
                dx = add_dx(dx, *_meeting(row, right), last=i == used[-1], dtype=x_dtype)
            if seen.needs[1 + i]:
                _, right, mean = _x_operands(seen, exact)
                if mean is not None and seen.wgrad.b is not None:
                    outer = ops.token_sum(dy_MN), mean
                dws[i] = weight_gradient(*_meeting(col, right), (x_dtype, w_dtypes[i]), None, outer)
            if ctx.needs_input_grad[2 + n + i]:
                s_N = dy_MN.sum(0, dtype=torch.float32) if outer is None else outer[0]
                dbs[i] = s_N.to(b_dtypes[i])
        return as_gradients(ctx, (dx, *dws, *dbs))


class Handling(NamedTuple):
    """Of one operand: whether it stays in high precision, and whether it is rotated then."""

    is_exact: bool
    rotates: bool


_BESIDE = {
    "x.row": "w.row",
    "w.row": "x.row",
    "dy.row": "w.col",
    "w.col": "dy.row",
    "dy.col": "x.col",
    "x.col": "dy.col",
}
"""The other operand of each GEMM."""


def _flags(exact: Exact, tensor: str) -> tuple[Handling, Handling]:
    """Return what becomes of both orientations; two operands in high precision meet as they are."""
    row, col = (Handling(side in exact, _BESIDE[side] not in exact) for side in (f"{tensor}.row", f"{tensor}.col"))
    return row, col


def _x_operands(seen: Observed, exact: Exact) -> tuple[Any, Any, Tensor | None]:
    """Return x as the operand of fprop and of wgrad, and the mean that was split off."""
    fprop, wgrad = seen.fprop, seen.wgrad
    specs = fprop.a, wgrad.b if any(seen.needs[1:]) else None
    place = seen.place(seen.draws[0], X, (FPROP_SIGNS, WGRAD_SIGNS))
    if not seen.recipe.splits_mean:
        return *_chosen(seen.x, specs, (place, ops.Amaxes()), _flags(exact, "x"), seen.recipe), None
    mean = ops.token_mean(seen.x)
    row, col = _chosen(without_mean(seen.x, mean), specs, (place, ops.Amaxes()), _flags(exact, "x"), seen.recipe)
    return row if specs[0] else seen.x, col if specs[1] else seen.x.T, mean


def _w_operands(seen: Observed, i: int, exact: Exact) -> tuple[Any, Any]:
    """Return a weight as the operand of fprop and of dgrad."""
    specs = seen.fprop.b, seen.dgrad.b if seen.needs[0] else None
    amax = seen.amaxes[seen.request.amax_of[i]]
    amaxes = ops.Amaxes(*(amax if takes_amax(spec) else None for spec in specs))
    place = seen.place(seen.draws[i], W, (FPROP_SIGNS, DGRAD_SIGNS))
    return _chosen(seen.weights[i], specs, (place, amaxes), _flags(exact, "w"), seen.recipe)


def _chosen(
    t: Tensor, specs: Specs, how: tuple[Place, ops.Amaxes], exact: tuple[Handling, Handling], recipe: Recipe
) -> tuple[Any, Any]:
    """Return both orientations of x or a weight; a dequantized backward reads what fprop multiplied."""
    place, amaxes = how
    if recipe.backward == "original":
        return _picked(t, specs, place, amaxes, exact)
    row, _ = _picked(t, (specs[0], None), place, amaxes, exact)
    values = ops.dequantize(row, t.dtype) if isinstance(row, ops.Operand) else t
    return row, _picked(values, (None, specs[1]), place, ops.Amaxes(), exact)[1]


def _picked(
    t: Tensor, specs: Specs, place: Place, amaxes: ops.Amaxes, exact: tuple[Handling, Handling]
) -> tuple[Any, Any]:
    """Return t and t.T as operands, quantized as a layer does or in high precision."""
    sides: list[Side | None] = [None, None]

    def quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
        sides[:] = [side or known for side, known in zip((row, col), sides, strict=True)]
        return ops.quantize_row_col(t, row, col)

    operands = list(both(t, *specs, place, amaxes, quantize))
    for i, (side, treatment, turned) in enumerate(zip(sides, exact, (t, t.T), strict=True)):
        if side is not None and treatment.is_exact:
            operands[i] = _in_high_precision(turned, side) if treatment.rotates else turned
    return operands[0], operands[1]


def _in_high_precision(t: Tensor, side: Side) -> Tensor:
    """Return an operand that is not quantized; rotated as the other one of its GEMM is."""
    rotation = side.spec.rotation
    return t if rotation is None else reference.rotate(t, rotation, side.sign_draw).to(t.dtype)


def _meeting(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the operands of one GEMM: beside a rotated one in high precision, which is padded, codes count theirs."""
    if isinstance(a, Tensor) and isinstance(b, ops.Operand) and a.shape[1] > b.cols:
        return a, b._replace(cols=a.shape[1])
    if isinstance(b, Tensor) and isinstance(a, ops.Operand) and b.shape[1] > a.cols:
        return a._replace(cols=b.shape[1]), b
    return a, b
