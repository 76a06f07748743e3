"""Amaxes of earlier steps in linear layers: what a step finds is noted, what is held used (numerics.md section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.delayed import waits
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.group import all_max, gathered, waited
from halfbyte.functional.operands import gradient_specs
from halfbyte.functional.places import DGRAD_SIGNS, FPROP_SIGNS, WGRAD_SIGNS, at_stream
from halfbyte.functional.request import Request, draws_of
from halfbyte.functional.split import Part
from halfbyte.layout import matrix_shape
from halfbyte.rng import AnyPhilox, Draw
from halfbyte.spec import Recipe, Spec

Specs = tuple[Spec | None, Spec | None]


Measure = Callable[[Tensor, Spec | None, Spec | None, Draw | None], tuple[Tensor, Tensor]]
"""How the amaxes of a matrix are found: `ops.row_col_amax` or what has its head."""


class GradientAmaxes(NamedTuple):
    """What one layer does with the amaxes of the gradient of its output, of its rows and of its columns; or of its x.

    row, col: fp32 [], to quantize with; None for its own.
    row_seen, col_seen: fp32 [], to which its own are noted; None for not at all.
    """

    row: Tensor | None = None
    col: Tensor | None = None
    row_seen: Tensor | None = None
    col_seen: Tensor | None = None


class ExpertAmaxes(NamedTuple):
    """What the experts of one layer do with their amaxes, of which each tensor has one for each expert.

    x: with which x is quantized, None for its own.
    dy: as for one layer.
    lacks: whether some experts have none yet for the rows of dy, or its columns: 0 there, which stands for their own.
    """

    x: ops.Amaxes = ops.Amaxes()
    dy: GradientAmaxes = GradientAmaxes()
    lacks: tuple[bool, bool] = (False, False)


def waiting(specs: Specs) -> Specs:
    """Return the specs whose operand may be quantized with an earlier amax, None in the place of others."""
    row, col = (spec if waits(spec) else None for spec in specs)
    return row, col


def own_amaxes(
    t: Tensor, specs: Specs, signs: tuple[Draw | None, Draw | None], measure: Measure | None = None
) -> ops.Amaxes:
    """Return the amaxes with which a matrix would be quantized, of the orientations that have a spec.

    Args:
        t: the matrix.
        specs: of its rows and columns.
        signs: where the fresh signs of each are drawn.
        measure: how, None for `ops.row_col_amax`.
    """
    measure, (row, col) = measure or ops.row_col_amax, specs
    if row and col and row.needs_sign_rng and col.needs_sign_rng and signs[0] != signs[1]:  # as `operands.both`
        return ops.Amaxes(
            measure(t, row, None, signs[0])[0],
            measure(t, None, col, signs[1])[1],
        )
    if row is None and col is None:
        return ops.Amaxes()
    sign = signs[1] if col and col.needs_sign_rng else signs[0]
    found = measure(t, row, col, sign if any(spec and spec.needs_sign_rng for spec in specs) else None)
    return ops.Amaxes(*(amax if spec else None for amax, spec in zip(found, specs, strict=True)))


def own_of_parts(part: Part | None, t: Tensor, specs: Specs, signs: tuple[Draw | None, Draw | None]) -> ops.Amaxes:
    """Return the amaxes of a matrix of which ranks hold parts; all of them call it together.

    Args:
        part: which of them t is, None for all of it.
        t, specs, signs: as for `own_amaxes`.
    """
    if part is None or specs == (None, None):
        return own_amaxes(t, specs, signs)
    if not all(spec is None or part.is_local(side, spec) for side, spec in enumerate(specs)):
        return own_amaxes(gathered(t, part.axis, part.held, part.split.group), specs, signs)
    own = own_amaxes(t, specs, signs)
    found = list(all_max(torch.stack([amax for amax in own if amax is not None]), part.split.group).unbind())
    return ops.Amaxes(*(None if amax is None else found.pop(0) for amax in own))


def of_shared_x(
    part: Part | None, x: Tensor, how: tuple[Recipe, AnyPhilox | None], given: GradientAmaxes | None
) -> ops.Amaxes | None:
    """Return the amaxes with which an x of which ranks hold parts is quantized, and note those that it has.

    Args:
        part: which of them is here, None for all of it.
        x: it.
        how: the recipe, and where the layer draws.
        given: what the layer does with them, None for nothing.
    """
    if given is None:
        return None
    recipe, rng = how
    row = recipe.fprop.a if recipe.fprop is not None and given.row_seen is not None else None
    col = recipe.wgrad.b if recipe.wgrad is not None and given.col_seen is not None else None
    signs = rng.signs_on(x.device) if rng is not None and recipe.needs_sign_rng else None
    dtype = autocast_dtype(x.device)
    x_MK = waited(x.detach()).reshape(matrix_shape(x.shape))
    places = at_stream(signs, FPROP_SIGNS), at_stream(signs, WGRAD_SIGNS)
    found = own_of_parts(part, x_MK if dtype is None else x_MK.to(dtype), (row, col), places)
    for into, own in ((given.row_seen, found.row), (given.col_seen, found.col)):
        if into is not None and own is not None:
            into.clamp_(min=own)
    return ops.Amaxes(found.row if given.row is None else given.row, found.col if given.col is None else given.col)


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
            found = own_of_parts(request.part(i, "MN"), waited(dy).reshape(matrix_shape(dy.shape)), wanted, places)
        for spec, earlier, into, own in zip((row, col), held, seen, found, strict=True):
            if into is not None and own is not None:
                into.clamp_(min=own)
            amaxes.append(None if spec is None else own if earlier is None else earlier)
    return amaxes


def own_of_experts(t: Tensor, offsets: Tensor, specs: Specs, signs: tuple[Draw | None, Draw | None]) -> ops.Amaxes:
    """Return the amaxes with which the group of each expert would be quantized, [E] of the orientations with a spec."""

    def measure(t: Tensor, row: Spec | None, col: Spec | None, sign: Draw | None) -> tuple[Tensor, Tensor]:
        return ops.grouped_row_col_amax(t, offsets, row, col, sign)

    return own_amaxes(t, specs, signs, measure)


def combined(held: Tensor | None, own: Tensor | None, lacks: bool) -> Tensor | None:
    """Return with which amaxes experts are quantized: held ones, and where some lack one, 0 there, their own."""
    if not lacks or held is None:
        return held
    assert own is not None, "what some experts lack is measured"
    return torch.where(held > 0, held, own)


def of_expert_gradients(
    how: tuple[Recipe, tuple[bool, bool], tuple[bool, bool]],
    given: GradientAmaxes,
    dy: Tensor,
    offsets: Tensor,
    signs: Draw | None,
) -> ops.Amaxes:
    """Return the amaxes with which dy is quantized expert by expert, and note those that it has.

    Args:
        how: the recipe, whether x and w need gradients, and the `lacks` of ExpertAmaxes.
        given: what the layer does with them.
        dy: [M, N].
        offsets: of the groups.
        signs: where the signs of the layer draw.
    """
    recipe, (need_dx, need_dw), lacks = how
    specs = waiting(gradient_specs(recipe, need_dx, need_dw))
    seen = given.row_seen, given.col_seen
    row, col = (spec if into is not None or lack else None for spec, into, lack in zip(specs, seen, lacks, strict=True))
    places = at_stream(signs, DGRAD_SIGNS), at_stream(signs, WGRAD_SIGNS)
    found = own_of_experts(dy, offsets, (row, col), places)
    for into, own in zip(seen, found, strict=True):
        if into is not None and own is not None:
            into.clamp_(min=own)
    return ops.Amaxes(combined(given.row, found.row, lacks[0]), combined(given.col, found.col, lacks[1]))


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
