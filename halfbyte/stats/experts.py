"""Experts in a sampled step: each group of tokens with its expert's weight is measured as a linear layer of its own.

That is what it is by definition (docs/numerics.md, section 8): a place in the random stream, an amax and blocks of its
own. So the sums of all groups go into one ledger, and those of each into a short one of its expert behind it. The layer
itself runs as always; behind it an op of its backward measures what it computes a second time. Tokens behind the last
group and experts without tokens add nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.derivatives import EXPERTS, first_order
from halfbyte.functional.earlier import ExpertAmaxes
from halfbyte.functional.foreign import PLAIN
from halfbyte.functional.places import snapshot
from halfbyte.functional.request import Request
from halfbyte.functional.weights import Layout
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.reference.grouped import group_bounds
from halfbyte.rng import Draw, StreamPhilox
from halfbyte.spec import Recipe, parse_recipe
from halfbyte.stats.each_expert import add_group, ledger_of_experts
from halfbyte.stats.observe import Observed, observe

Run = partial[Tensor]
"""What the layer does with tokens, weight and offsets: `grouped_linear` with its options."""


def observed_experts(
    run: Run, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], layer: GroupedRecipe, place: StreamPhilox | None
) -> Tensor:
    """Return what a layer of experts returns; its backward adds to the layer's ledger.

    Args:
        run: the layer's own work.
        tensors: x [M, K], the weight [E, N, K], offsets [E], a bias [E, N] or None.
        layer: whose recipe and ledger count.
        place: where it draws.
    """
    x, w, offsets, _ = tensors
    y = run(x, w, offsets)
    is_plain = type(x) in PLAIN and type(w) in PLAIN
    if layer.ledger is None or not layer.recipe.specs or not is_plain or not y.requires_grad:
        return y
    dtype = autocast_dtype(x.device) or x.dtype
    base, sign_base, stream = where_drawn(layer.recipe, place, x.device)
    earlier: ExpertAmaxes = run.keywords["earlier"]
    flags = x.requires_grad, w.requires_grad, *earlier.lacks
    text = " ".join([layer.recipe.key, *[str(int(flag)) for flag in flags]])
    amaxes = *earlier.x, earlier.dy.row, earlier.dy.col
    given = x.detach().to(dtype), w.detach().to(dtype), offsets, base, sign_base, *amaxes, layer.ledger
    return _Watched.apply(text, stream, y, *given)


def where_drawn(
    recipe: Recipe, place: StreamPhilox | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None, int]:
    """Return the position now of rounding bits and of signs, two tensors, and the layer's stream."""
    if place is None or not recipe.needs_rng:
        return None, None, 0
    draw = place.on(device)
    signs = place.signs_on(device) if recipe.needs_sign_rng else draw
    return snapshot(draw.base), snapshot(signs.base), draw.stream


class _Watched(torch.autograd.Function):
    """y as it is; its backward measures the layer that made it. A copy of y, so that changes in place may follow."""

    @staticmethod
    def forward(ctx: Any, text: str, stream: int, y: Tensor, x: Tensor, *rest: Any) -> Tensor:
        ctx.text, ctx.stream = text, stream
        ctx.save_for_backward(torch.ops.halfbyte.hold(x), *rest)
        return torch.ops.halfbyte.hold(y)

    @staticmethod
    @first_order(EXPERTS)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *given, ledger = ctx.saved_tensors
        torch.ops.halfbyte.observe_experts(ledger, ctx.text, [*given, dy], ctx.stream)
        return None, None, dy, *[None] * 10


def filled_groups(offsets: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of each group that has tokens; offsets are read."""
    for index, (start, end) in enumerate(group_bounds(offsets, tokens)):
        if end > start:
            yield index, slice(start, end)


def place_of_group(base: Tensor | None, index: int) -> Tensor | None:
    """Return where a group draws whose layer draws at `base`."""
    return None if base is None else Draw(base).group(index).base


def _amax_of(amaxes_E: Tensor | None, index: int, lacks: bool) -> Tensor | None:
    """Return the amax with which one expert's operand was quantized, None for its own."""
    return None if amaxes_E is None or (lacks and not amaxes_E[index]) else amaxes_E[index]


def _observe_experts(ledger: Tensor, text: str, tensors: Sequence[Tensor | None], stream: int) -> None:
    key, *flags = text.split(" ")
    need_dx, need_dw, *lacks = [flag == "1" for flag in flags]
    x, w, offsets, base, sign_base, *amaxes, dy = tensors
    assert x is not None and w is not None and offsets is not None and dy is not None, "only places may be missing"
    draws = (None, None) if base is None else ((0, None), (0, None))
    request = Request(parse_recipe(key), 1, (0, 1), (0,), draws, x.dtype, True, (Layout(None, None),))
    features, groups = (w.shape[2], w.shape[1]), len(offsets)
    ledger = ledger.data  # no new version: another call of the layer has saved its ledger too
    with torch.no_grad():
        for index, rows in filled_groups(offsets, x.shape[0]):
            own = ledger_of_experts(features, 0, ledger.device)
            bases = place_of_group(base, index), place_of_group(sign_base, index)
            held = [_amax_of(t, index, lack) for t, lack in zip(amaxes, (False, False, *lacks), strict=True)]
            given = [x[rows], w[index], None, *bases, dy[rows], *held]
            seen = Observed(request, (need_dx, need_dw), given, [stream, stream])
            observe(seen, {0: own})
            add_group(ledger, features, own, index, groups)


def _nothing(*arguments: Any) -> None:
    """The fake of an op that returns nothing."""


_LIBRARY = torch.library.Library("halfbyte", "FRAGMENT")
_LIBRARY.define("observe_experts(Tensor(a!) ledger, str text, Tensor?[] tensors, SymInt stream) -> ()")
_LIBRARY.impl("observe_experts", _observe_experts, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::observe_experts", _nothing, lib=_LIBRARY)
