"""Layers whose x and dy are quantized with the amaxes of an earlier step, and which note those that they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.amaxes import DY, X
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.derivatives import EXPERTS, LINEAR, refuse_transforms
from halfbyte.functional.earlier import (
    ExpertAmaxes,
    GradientAmaxes,
    Specs,
    combined,
    own_amaxes,
    own_of_experts,
    waiting,
)
from halfbyte.functional.foreign import is_sharded
from halfbyte.functional.grouped_checks import check_tokens
from halfbyte.functional.operands import gradient_specs
from halfbyte.functional.places import FPROP_SIGNS, WGRAD_SIGNS, at_stream
from halfbyte.layout import matrix_shape
from halfbyte.rng import Draw, StreamPhilox
from halfbyte.spec import GemmSpec, Recipe

_PLAIN_GEMM = GemmSpec()


class ExpertsHere(NamedTuple):
    """Which of a layer's experts run here, None for all, and whether their tokens came as codes, which fprop reads."""

    experts: slice | None = None
    arrived_as_codes: bool = False


_ALL = ExpertsHere()


def _is_delayed(layer: Any) -> bool:
    return layer.recipe.amax is not None and layer.amaxes is not None and layer.training


class Found(NamedTuple):
    """An amax of x, and where it is noted once the call has gone through: one that is refused is none of the step."""

    into: Tensor
    own: Tensor


def note_found(found: Sequence[Found]) -> None:
    """Note amaxes of x of a call that went through."""
    for into, own in found:
        into.clamp_(min=own)


def amaxes_of_x(
    x: Tensor, layers: Sequence[Any], call: int, given: ops.Amaxes | None
) -> tuple[ops.Amaxes | None, Sequence[Found]]:
    """Return the amaxes with which layers that share one input quantize it, and what is to be noted.

    They are the first layer's, as random bits are.

    Args:
        x: [..., K].
        layers: of one recipe.
        call: as for `hb.nn.Linear.forward`.
        given: those of x, as far as the norm that made it knows them.
    """
    first = layers[0]
    if not _is_delayed(first) or x.is_meta or is_sharded(x):  # see `amaxes_of_shared_x`
        return given, ()
    refuse_transforms((x,), LINEAR)  # before anything is measured
    first.run_state.watch_steps()
    records = torch.is_grad_enabled()
    specs = waiting(_input_specs(first.recipe, records and any(layer.weight.requires_grad for layer in layers)))
    amaxes, known = first.amaxes.to(x.device), given or ops.Amaxes()
    if amaxes.measures and records:
        missing = [None if amax is not None else spec for spec, amax in zip(specs, known, strict=True)]
        found = _found(x, (missing[0], missing[1]), _signs(first, call, x.device))
        known = ops.Amaxes(*(own if amax is None else amax for own, amax in zip(found, known, strict=True)))
    used: list[Tensor | None] = []
    notes: list[Found] = []
    for i, (spec, own) in enumerate(zip(specs, known, strict=True)):
        held = None if spec is None else amaxes.known(X + i)
        if amaxes.measures and records and spec is not None and own is not None:
            notes.append(Found(amaxes.seen_by(X + i), own))
        used.append(own if held is None else held)
    return ops.Amaxes(*used), notes


def amaxes_of_shared_x(x: Tensor, layers: Sequence[Any]) -> GradientAmaxes | None:
    """Return what layers that ranks share do with the amaxes of their input, None for nothing, as of plain tensors."""
    first = layers[0]
    if not is_sharded(x) or not _is_delayed(first) or x.is_meta:
        return None
    first.run_state.watch_steps()
    records, amaxes = torch.is_grad_enabled(), first.amaxes.to(x.device)
    specs = waiting(_input_specs(first.recipe, records and any(layer.weight.requires_grad for layer in layers)))
    held = [None if spec is None else amaxes.known(X + i) for i, spec in enumerate(specs)]
    seen = [amaxes.seen[X + i] if spec and amaxes.measures and records else None for i, spec in enumerate(specs)]
    return GradientAmaxes(*held, *seen)


def _input_specs(recipe: Recipe, need_dw: bool) -> Specs:
    """Return how x is quantized for fprop, and for wgrad in the forward."""
    fprop, wgrad = (gemm or _PLAIN_GEMM for gemm in (recipe.fprop, recipe.wgrad))
    return fprop.a, wgrad.b if need_dw and recipe.backward == "original" else None


def _found(x: Tensor, specs: Specs, signs: tuple[Draw | None, Draw | None]) -> ops.Amaxes:
    if specs == (None, None):
        return ops.Amaxes()
    dtype = autocast_dtype(x.device)
    x_MK = x.detach().reshape(matrix_shape(x.shape))
    return own_amaxes(x_MK if dtype is None else x_MK.to(dtype), specs, signs)


def _signs(layer: Any, call: int, device: torch.device) -> tuple[Draw | None, Draw | None]:
    """Return where the fresh signs of x are drawn in fprop and in wgrad."""
    place = layer.peek(call, device) if layer.recipe.needs_sign_rng else None
    signs = None if place is None else place.signs_on(device)
    return at_stream(signs, FPROP_SIGNS), at_stream(signs, WGRAD_SIGNS)


def gradient_amaxes(x: Tensor, layer: Any) -> GradientAmaxes | None:
    """Return what a layer does with the amaxes of the gradient of its output, None for nothing.

    Args:
        x: that the layer reads.
        layer: with or without a recipe that delays amaxes.
    """
    if not _is_delayed(layer) or not torch.is_grad_enabled() or x.is_meta:
        return None
    row, col = waiting(gradient_specs(layer.recipe, x.requires_grad, layer.weight.requires_grad))
    amaxes = layer.amaxes.to(x.device)
    held = [None if spec is None else amaxes.known(DY + i) for i, spec in enumerate((row, col))]
    seen = [amaxes.seen[DY + i] if spec and amaxes.measures else None for i, spec in enumerate((row, col))]
    return GradientAmaxes(*held, *seen)


def amaxes_of_experts(
    layer: Any, tensors: tuple[Tensor, Tensor, Tensor], place: StreamPhilox | None, here: ExpertsHere = _ALL
) -> ExpertAmaxes:
    """Return what experts do with amaxes of earlier steps; note those of x.

    Args:
        layer: with or without a recipe that delays amaxes.
        tensors: x [M, K], w_ENK and the ends of the groups.
        place: where the experts draw.
        here: where they are not all of the layer's.
    """
    x, w, offsets = tensors
    if not _is_delayed(layer) or x.is_meta:
        return ExpertAmaxes()
    refuse_transforms((x,), EXPERTS)  # before anything is noted
    check_tokens(x, w, offsets)
    layer.run_state.watch_steps()
    records, amaxes = torch.is_grad_enabled(), layer.amaxes.to(x.device)
    measures = amaxes.measures and records
    row, col = waiting(_input_specs(layer.recipe, records and w.requires_grad))
    specs = None if here.arrived_as_codes else row, col
    row, col = (spec if measures or amaxes.lacks(X + i) else None for i, spec in enumerate(specs))
    signs = place.signs_on(x.device) if place is not None and layer.recipe.needs_sign_rng else None
    places = at_stream(signs, FPROP_SIGNS), at_stream(signs, WGRAD_SIGNS)
    dtype = autocast_dtype(x.device)
    found = own_of_experts(x.detach() if dtype is None else x.detach().to(dtype), offsets, (row, col), places)
    used: list[Tensor | None] = []
    for i, (spec, own) in enumerate(zip(specs, found, strict=True)):
        if measures and own is not None:
            amaxes.seen_by(X + i, here.experts).clamp_(min=own)
        held = None if spec is None else amaxes.known(X + i, here.experts)
        used.append(combined(held, own, amaxes.lacks(X + i)))
    if not records:
        return ExpertAmaxes(ops.Amaxes(*used))
    specs = waiting(gradient_specs(layer.recipe, x.requires_grad, w.requires_grad))
    held = [None if spec is None else amaxes.known(DY + i, here.experts) for i, spec in enumerate(specs)]
    seen = [amaxes.seen_by(DY + i, here.experts) if spec and measures else None for i, spec in enumerate(specs)]
    lacks = amaxes.lacks(DY), amaxes.lacks(DY + 1)
    return ExpertAmaxes(ops.Amaxes(*used), GradientAmaxes(*held, *seen), lacks)
