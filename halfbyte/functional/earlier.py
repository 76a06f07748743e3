"""Amaxes of earlier steps in linear layers: what a step finds is noted, what is held used (numerics.md section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from halfbyte import ops
from halfbyte.delayed import waits
from halfbyte.functional.operands import gradient_specs
from halfbyte.functional.places import DGRAD_SIGNS, WGRAD_SIGNS, at_stream
from halfbyte.functional.request import Request, draws_of
from halfbyte.layout import matrix_shape
from halfbyte.rng import Draw
from halfbyte.spec import Recipe, Spec

Specs = tuple[Spec | None, Spec | None]


class GradientAmaxes(NamedTuple):
    """What one layer does with the amaxes of the gradient of its output, of its rows and of its columns.

    row, col: fp32 [], to quantize with; None for its own.
    row_seen, col_seen: fp32 [], to which its own are noted; None for not at all.
    """

    row: Tensor | None = None
    col: Tensor | None = None
    row_seen: Tensor | None = None
    col_seen: Tensor | None = None


def waiting(specs: Specs) -> Specs:
    """Return the specs whose operand may be quantized with an earlier amax, None in the place of others."""
    row, col = (spec if waits(spec) else None for spec in specs)
    return row, col


def own_amaxes(t: Tensor, specs: Specs, signs: tuple[Draw | None, Draw | None]) -> ops.Amaxes:
    """Return the amaxes with which a matrix would be quantized, of the orientations that have a spec.

    Args:
        t: the matrix.
        specs: of its rows and columns.
        signs: where the fresh signs of each are drawn.
    """
    row, col = specs
    if row and col and row.needs_sign_rng and col.needs_sign_rng and signs[0] != signs[1]:  # as `operands.both`
        return ops.Amaxes(
            ops.row_col_amax(t, row, None, signs[0])[0],
            ops.row_col_amax(t, None, col, signs[1])[1],
        )
    if row is None and col is None:
        return ops.Amaxes()
    sign = signs[1] if col and col.needs_sign_rng else signs[0]
    found = ops.row_col_amax(t, row, col, sign if any(spec and spec.needs_sign_rng for spec in specs) else None)
    return ops.Amaxes(*(amax if spec else None for amax, spec in zip(found, specs, strict=True)))


def of_gradients(
    request: Request, given: Sequence[Any], dys: Sequence[Tensor | None], needs: Sequence[bool], draws: tuple
) -> list[Tensor | None]:
    """Return the amaxes with which each dy is quantized, row and column in turn, and note those that it has.

    Args:
        request: of the call.
        given: the fields of each layer's GradientAmaxes, one after the other.
        dys: the gradient of each output, or None.
        needs: whether x and each weight need gradients.
        draws: bases and streams of the call.
    """
    *_, signs = draws_of(request, *draws)
    places = at_stream(signs, DGRAD_SIGNS), at_stream(signs, WGRAD_SIGNS)
    amaxes: list[Tensor | None] = []
    for i, dy in enumerate(dys):
        held, seen = given[4 * i : 4 * i + 2], given[4 * i + 2 : 4 * i + 4]
        row, col = waiting(gradient_specs(request.recipe, needs[0], needs[1 + i]))
        found = ops.Amaxes()
        if dy is not None:
            wanted = row if seen[0] is not None else None, col if seen[1] is not None else None
            found = own_amaxes(dy.reshape(matrix_shape(dy.shape)), wanted, places)
        for spec, earlier, into, own in zip((row, col), held, seen, found, strict=True):
            if into is not None and own is not None:
                into.clamp_(min=own)
            amaxes.append(None if spec is None else own if earlier is None else earlier)
    return amaxes


def in_pairs(amaxes: Sequence[Tensor | None], count: int) -> list[ops.Amaxes]:
    """Return the amaxes of each dy, of what `of_gradients` returned, or of nothing."""
    if not amaxes:
        return [ops.Amaxes()] * count
    return [ops.Amaxes(amaxes[2 * i], amaxes[2 * i + 1]) for i in range(count)]


def refuse_delayed(recipe: Recipe, who: str) -> None:
    """Raise ValueError if a recipe delays its amaxes.

    Args:
        recipe: of the layer.
        who: that cannot follow it.
    """
    if recipe.amax is not None:
        raise ValueError(
            f"recipe.amax={recipe.amax}: {who} quantize with amaxes of their own; use dataclasses.replace(recipe, "
            "amax=None) for them, in hb.quantize_ by rules"
        )
