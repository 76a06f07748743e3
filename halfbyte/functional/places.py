"""Where the operands of linear layers draw random bits: the streams of one layer, and its places as ops take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.rng import AnyPhilox, Draw
from halfbyte.spec import Recipe

# Streams of one linear: an operand takes two (row, then col); the two operands of a GEMM share its signs.
X, W, DY, FPROP_SIGNS, DGRAD_SIGNS, WGRAD_SIGNS = 0, 2, 4, 6, 7, 8
STREAMS_PER_LINEAR = 16


def places_of(rng: AnyPhilox | Sequence[AnyPhilox] | None, n: int, recipe: Recipe) -> list[AnyPhilox] | None:
    """Return one place per weight, or None if the recipe draws nothing."""
    if not recipe.needs_rng:
        return None
    if rng is None:
        raise ValueError(
            "rng=None: the recipe draws random bits; pass rng=hb.Philox(seed, offset) or a RunState's place"
        )
    if isinstance(rng, AnyPhilox):
        return [rng.at(i * STREAMS_PER_LINEAR) for i in range(n)]
    if not isinstance(rng, Sequence) or [place for place in rng if not isinstance(place, AnyPhilox)]:
        raise TypeError(f"rng={rng!r}: give hb.Philox(seed, offset), or a list of one per weight")
    if len(rng) != n:
        raise ValueError(f"rng has {len(rng)} places for {n} weights: give one place, or one per weight")
    return list(rng)


def at_stream(draw: Draw | None, stream: int) -> Draw | None:
    """Return the draw `stream` streams further; of None, None."""
    # No _replace: compiled by torch 2.11, what it makes cannot leave the graph.
    return None if draw is None else Draw(draw.base, draw.stream + stream, draw.first_block, draw.blocks_per_row)


def sign_place(draw: Draw | None) -> Draw | None:
    """Return where a layer whose signs draw at `draw` draws those of its wgrad."""
    return at_stream(draw, WGRAD_SIGNS)


def snapshot(base: Tensor | None) -> Tensor | None:
    """Return the position as it is now: a RunState may advance before the backward, as pipelines do."""
    return base.clone() if base is not None and torch.is_grad_enabled() else base


def bases_of_experts(draw: Draw, signs: Draw | None, is_copied: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the bases of rounding bits and of signs; each once, since torch.compile refuses repeated inputs.

    Args:
        draw, signs: the places.
        is_copied: whether the forward copies them for the backward, so that nothing has to be copied here.
    """
    bases = draw.base, None if signs is None or signs.base is draw.base else signs.base
    return bases if is_copied else (snapshot(bases[0]), snapshot(bases[1]))


def distinct(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """Return the tensors with None for every repetition, and for each where it is first."""
    if len(tensors) == 1:
        return list(tensors), (0,)
    if len(tensors) == 2:  # the place and the signs of one layer: spelled out, it is met in every call
        one, other = tensors
        return ([one, None], (0, 0)) if other is one else ([one, other], (0, 1))
    if torch.compiler.is_compiling():  # which knows no ids
        first = tuple(next(j for j, other in enumerate(tensors) if other is tensor) for tensor in tensors)
    else:
        ids = list(map(id, tensors))
        first = tuple(map(ids.index, ids))
    return [tensor if first[i] == i else None for i, tensor in enumerate(tensors)], first
