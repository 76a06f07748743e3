"""Operands of the three GEMMs of a linear layer: quantized for one call, handed from its forward to its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.places import at_stream
from halfbyte.functional.weights import takes_amax
from halfbyte.layout import Blocks
from halfbyte.rng import Draw
from halfbyte.sides import Side, both_sides
from halfbyte.spec import GemmSpec, Recipe, Spec

BF16_GEMM = GemmSpec()


def gradient_specs(recipe: Recipe, need_dx: bool, need_dw: bool) -> tuple[Spec | None, Spec | None]:
    """Return how row(dy) and col(dy) are quantized, for the GEMMs that will run."""
    dgrad, wgrad = (gemm or BF16_GEMM for gemm in (recipe.dgrad, recipe.wgrad))
    return dgrad.a if need_dx else None, wgrad.a if need_dw else None


class Place(NamedTuple):
    """Where a tensor draws (its linear's stream, the first linear's signs, offsets within them) and what is kept.

    transient: whether row and col serve one GEMM at once, so that a backend may hand over decoded values.
    """

    own: Draw | None
    signs: Draw | None
    stream: int
    sign_streams: tuple[int, int]
    transient: tuple[bool, bool]


def _quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
    """Quantize a matrix as it is asked for."""
    return ops.quantize_row_col(t, row, col)


def both(
    t: Tensor,
    row_spec: Spec | None,
    col_spec: Spec | None,
    place: Place,
    amaxes: ops.Amaxes,
    quantize: Callable[[Tensor, Side | None, Side | None], tuple[Blocks | None, Blocks | None]] = _quantize,
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    """Return t and t.mT as GEMM operands, `quantize`d where their spec is not None."""
    row_sign, col_sign = (at_stream(place.signs, stream) for stream in place.sign_streams)
    row_amax, col_amax = (amax if spec else None for amax, spec in zip(amaxes, (row_spec, col_spec), strict=True))
    options = {"draw": at_stream(place.own, place.stream), "transient": place.transient}
    row = col = None
    if row_spec and col_spec and row_spec.needs_sign_rng and col_spec.needs_sign_rng:
        # Two GEMMs with signs of their own: two quantizations, at the offsets that one call would use.
        row, _ = quantize(t, *both_sides(row_spec, None, sign_draw=row_sign, row_amax=row_amax, **options))
        _, col = quantize(t, *both_sides(None, col_spec, sign_draw=col_sign, col_amax=col_amax, **options))
    elif row_spec or col_spec:
        sign = col_sign if col_spec and col_spec.needs_sign_rng else row_sign
        sides = both_sides(row_spec, col_spec, sign_draw=sign, row_amax=row_amax, col_amax=col_amax, **options)
        row, col = quantize(t, *sides)
    return (
        t if row is None or row_spec is None else ops.Operand(row, row_spec, t.shape[-1]),
        t.detach().mT if col is None or col_spec is None else ops.Operand(col, col_spec, t.shape[-2]),
    )


def missing_specs(specs: tuple[Spec | None, Spec | None], cached: tuple) -> tuple[Spec | None, Spec | None]:
    """Return the specs of a weight's operands that were not quantized before."""
    row, col = (spec if operand is None else None for spec, operand in zip(specs, cached, strict=True))
    return row, col


def shared_amaxes(specs: tuple[Spec | None, Spec | None], amax: Tensor | None) -> ops.Amaxes:
    """Return an amax that sibling weights share where operands take it."""
    return ops.Amaxes(*(amax if takes_amax(spec) else None for spec in specs))


def weight_operands(
    w: Tensor,
    specs: tuple[Spec | None, Spec | None],
    cached: tuple,
    place: Place,
    amaxes: ops.Amaxes,
    make: Callable[..., tuple[Any, Any]] = both,
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    """Return w and w.T as GEMM operands: those that were quantized before, and the others that `make` makes now."""
    missing = missing_specs(specs, cached)
    now = (
        make(w, missing[0], missing[1], place, amaxes)
        if missing != (None, None) or make is not both
        else (w, w.detach().T)
    )
    row, col = (operand if kept is None else kept for kept, operand in zip(cached, now, strict=True))
    return row, col


def right_operand(
    operand: ops.Operand | Tensor,
    recipe: Recipe,
    spec: Spec | None,
    place: Place,
    dtype: torch.dtype,
    make: Callable[..., tuple[Any, Any]] = both,
) -> ops.Operand | Tensor:
    """Return the right operand of a backward GEMM.

    Args:
        operand: what was saved: the operand itself, or for a dequantized backward that of fprop.
        recipe: of the call.
        spec: how a dequantized backward quantizes the values again, transposed; None for not at all.
        place: where that draws.
        dtype: of the values.
        make: makes operands of a tensor with the parts of fprop's.
    """
    if recipe.backward == "original":
        return operand
    if isinstance(operand, ops.Operand):
        operand = ops.dequantize(operand, dtype)
    return make(operand, None, spec, place, ops.Amaxes())[1]


def for_all(x_col: Any, wanted: int) -> Any:
    """Return the right operand of `wanted` weight gradients: decoded once if several read it.

    Code that is traced op by op leaves that to each product: which backend decodes is no question for a tracer.
    """
    is_code = isinstance(x_col, ops.Operand) and not x_col.blocks.qdata.is_floating_point()
    return ops.decode(x_col) if wanted > 1 and is_code and not torch.compiler.is_compiling() else x_col


def add_dx(dx: Tensor | None, row: Any, right: Any, *, last: bool, dtype: torch.dtype) -> Tensor:
    """Add one weight's dgrad to dx, which stays fp32 until the last one."""
    if dx is None:
        return ops.gemm_nt(row, right, out_dtype=dtype if last else torch.float32)
    if last and dtype != torch.float32:
        return ops.gemm_nt_add(row, right, dx, out_dtype=dtype)
    return ops.gemm_nt(row, right, out=dx, accumulate=True)


def weight_gradient(
    col: Any,
    right: Any,
    dtypes: tuple[torch.dtype, torch.dtype],
    main_grad: Tensor | None,
    outer: tuple[Tensor, Tensor] | None,
) -> Tensor | None:
    """Return the gradient in the dtype of the GEMMs, then in that of the weight: they differ under autocast.

    Args:
        main_grad: fp32, to which it is added instead; None is returned.
        outer: vectors whose outer product is a part of the gradient, or None.
    """
    if outer is not None:
        dw = ops.gemm_nt_outer(col, right, outer, out_dtype=dtypes[0], out=main_grad)
        return None if main_grad is not None else dw.to(dtypes[1])
    if main_grad is not None:
        ops.gemm_nt(col, right, out=main_grad, accumulate=True)
        return None
    return ops.gemm_nt(col, right, out_dtype=dtypes[0]).to(dtypes[1])


class Beside(list):
    """The last arguments of an autograd function, which nobody differentiates: each that it sees costs the host."""


Saved = tuple
"""How to rebuild operands from saved tensors: (spec, cols, layout) of each, True for a plain one, or None."""


def flatten_operands(operands: Sequence[Any]) -> tuple[list[Tensor], Saved]:
    """Return the plain tensors of operands, which hooks on saved tensors see, and how to rebuild them."""
    tensors, layout = [], []
    for operand in operands:
        if isinstance(operand, ops.Operand):
            layout.append(operand[1:])
            tensors.extend(operand.blocks)
        else:
            layout.append(None if operand is None else True)
            tensors.extend([] if operand is None else [operand])
    return tensors, tuple(layout)


def with_late(late: Sequence[Any], layout: Saved, saved: Sequence[Any], needs_dx: bool) -> tuple[Saved, list[Any]]:
    """Return layout and tensors of what a forward kept, and of the weights that are made now.

    Args:
        late: of the call.
        layout: of x, of each weight and of what else was kept.
        saved: the tensors.
        needs_dx: whether anybody reads weights.
    """
    entries, tensors, left = [layout[0]], [], list(saved)
    tensors += [left.pop(0) for _ in range(_count(layout[0]))]
    for entry, one in zip(layout[1:], late, strict=False):
        if one is None or not needs_dx:
            tensors += [left.pop(0) for _ in range(_count(entry))]
        else:
            one.before_backward()
            is_plain = isinstance(one.col, Tensor)
            tensors += [one.col] if is_plain else one.col.blocks
            entry = True if is_plain else one.col[1:]
        entries.append(entry)
    return (*entries, *layout[1 + len(late) :]), tensors + left


def _count(entry: tuple | bool | None) -> int:
    """Return how many tensors an operand has."""
    return 0 if entry is None else 1 if entry is True else 3


def unflatten_operands(layout: Saved, saved: Sequence[Any]) -> tuple[list, list]:
    """Return the operands, and the tensors behind theirs."""
    operands, tensors = [], list(saved)
    for entry in layout:
        if entry is None or entry is True:
            operands.append(tensors.pop(0) if entry else None)
        else:
            operands.append(ops.Operand(Blocks(*(tensors.pop(0) for _ in range(3))), *entry))
    return operands, tensors
