"""Amaxes of tensors of which ranks hold parts: those of all tensors of a pass are one all-reduce.

An all-reduce of one number takes the host as long as a dozen launches, and the GPU as long as ten more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.group import all_max
from halfbyte.functional.operands import Place
from halfbyte.functional.places import at_stream
from halfbyte.functional.split import Part
from halfbyte.sides import share_tiles
from halfbyte.spec import Spec

Specs = tuple[Spec | None, Spec | None]


class Asked(NamedTuple):
    """A matrix that will be quantized, as `operands.both` is told it.

    part: which part of a matrix t is, None where it is all of it.
    amaxes: those that are known.
    """

    part: Part | None
    t: Tensor
    specs: Specs
    place: Place
    amaxes: ops.Amaxes


def whole_amaxes(asked: Sequence[Asked], own: Sequence[Tensor] = ()) -> tuple[list[ops.Amaxes], list[Tensor]]:
    """Return what ranks have to tell each other before they quantize; they meet once, or not where nothing is to tell.

    Args:
        asked: matrices of one group of ranks, the same on all of them.
        own: amaxes fp32 [] of parts that are here.

    Returns:
        The amaxes of each matrix, as far as they are known or others have a say in them; and those of all parts.
    """
    group = next((one.part.split.group for one in asked if one.part is not None), None)
    if group is None:
        assert not own, "parts of what no rank shares"
        return [one.amaxes for one in asked], list(own)
    pairs = [_own(one, _measured(one)) for one in asked]
    flat = [amax.reshape(-1) for pair in (*pairs, own) for amax in pair if amax is not None]
    if not flat:
        return [one.amaxes for one in asked], []
    found = all_max(flat[0] if len(flat) == 1 else torch.cat(flat), group)
    first = found.shape[0] - len(own)
    return _in_places(asked, pairs, found), [_from(found, first + i, one) for i, one in enumerate(own)]


def _in_places(
    asked: Sequence[Asked], own: Sequence[tuple[Tensor | None, Tensor | None]], found: Tensor
) -> list[ops.Amaxes]:
    made, start = [], 0
    for one, pair in zip(asked, own, strict=True):
        row, col = one.amaxes
        if pair[0] is not None:
            row, start = _from(found, start, pair[0]), start + pair[0].numel()
        if pair[1] is not None:
            col, start = _from(found, start, pair[1]), start + pair[1].numel()
        elif pair[0] is not None and col is None and share_tiles(*one.specs):
            col = row
        made.append(ops.Amaxes(row, col))
    return made


def _from(found: Tensor, start: int, like: Tensor) -> Tensor:
    return found.narrow(0, start, like.numel()).view(like.shape)


def _measured(one: Asked) -> Specs:
    """Return the specs of the orientations whose amax other parts have a say in and nobody knows yet."""
    part, given = one.part, one.specs
    if part is None or not all(part.is_local(side, spec) for side, spec in enumerate(given)):
        return None, None  # it is whole, or gathered whole before it is quantized
    row, col = (
        spec
        if spec is not None and amax is None and spec.format.has_amax and (spec.has_tensor_amax or part.is_summed(side))
        else None
        for side, (spec, amax) in enumerate(zip(given, one.amaxes, strict=True))
    )
    return row, None if share_tiles(row, col) else col


def _own(one: Asked, specs: Specs) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes of the part that is here, with the signs that `operands.both` would rotate it by."""
    row, col = specs
    if row is None and col is None:
        return None, None
    signs = [at_stream(one.place.signs, stream) for stream in one.place.sign_streams]
    if row and col and row.needs_sign_rng and col.needs_sign_rng:
        return ops.row_col_amax(one.t, row, None, signs[0])[0], ops.row_col_amax(one.t, None, col, signs[1])[1]
    sign = signs[1] if col and col.needs_sign_rng else signs[0]
    found = ops.row_col_amax(one.t, row, col, sign)
    return None if row is None else found[0], None if col is None else found[1]
