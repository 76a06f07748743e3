"""The amax that siblings' weights share, such as q, k and v: found once for a group, wherever its weights are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.foreign import PLAIN, are_sharded, is_sharded, refuse_foreign
from halfbyte.functional.weights import CachedWeight, weight_specs
from halfbyte.nn.group_amax import GroupAmax
from halfbyte.tensor import QuantTensor

if TYPE_CHECKING:
    from halfbyte.nn.linear import LinearLayer


def are_whole_groups(layers: Sequence[LinearLayer]) -> bool:
    """Whether ranks hold parts of the weights of whole groups, so that a pass of all layers finds their amax."""
    if type(layers[0].look()) in PLAIN or not layers[0].amax_group or torch.compiler.is_compiling():
        return False
    for layer in layers:
        weight = layer.look()
        if not is_sharded(weight) or not weight.placements[0].is_shard():
            return False
        if not layer.amax_group or any(member not in layers for member in layer.amax_group):
            return False
    return True


def weight_amaxes(
    x: Tensor,
    modules: Sequence[LinearLayer],
    cached_weights: Sequence[CachedWeight | None],
    in_parts: bool,
) -> list[Tensor | None]:
    """Return each module's shared weight amax, computed once per group and where nothing is cached.

    Args:
        in_parts: ranks meet later, so what is wanted is the amax of the parts that are here.
    """
    if not [module for module in modules if module.amax_group]:
        return [None] * len(modules)
    dtype = autocast_dtype(x.device)
    known: list[tuple[LinearLayer, Tensor]] = []
    result: list[Tensor | None] = []
    for module, cached in zip(modules, cached_weights, strict=True):
        missing = weight_specs(module.recipe)
        if cached is not None:
            missing = tuple(None if kept else spec for kept, spec in zip(cached[:2], missing, strict=True))
        is_quantized = isinstance(module.weight, QuantTensor)
        if is_quantized or not module.amax_group or not any(spec and spec.format.has_amax for spec in missing):
            result.append(None)
            continue
        first = module.amax_group[0]
        amax = next((amax for other, amax in known if other is first), None)
        if amax is None:
            if type(module.look()) in PLAIN:
                _check_siblings(module)
                amax = shared_amax(module, dtype)
            else:
                amax = _amax_of_sharded(x, module, dtype, in_parts)
            known.append((first, amax))
        result.append(amax)
    return result


def _amax_of_sharded(x: Any, module: LinearLayer, dtype: torch.dtype | None, in_parts: bool) -> Tensor:
    """Return the amax of a module's group, of whose weights ranks hold parts, or of the parts that are here."""
    is_kept = not in_parts and are_sharded(x, *[member.look() for member in module.amax_group])
    if not is_kept or torch.compiler.is_compiling():
        _check_siblings(module)
        return shared_amax(module, dtype, is_part=in_parts)
    first = module.amax_group[0]
    amax = None if first.group_amax is None else first.group_amax.take(module, x, dtype)
    if amax is None:
        _check_siblings(module)
        amax = shared_amax(module, dtype)
        first.group_amax = GroupAmax(module, x, dtype, amax) if GroupAmax.is_told(module, x) else None
    return amax


def _check_siblings(module: LinearLayer) -> None:
    """Raise ValueError where the shared amax of `module` needs weights that are not there with its own."""
    weights = [member.look() for member in module.amax_group]
    where = module.weight.device
    if PLAIN.issuperset(map(type, weights)) and not [weight for weight in weights if weight.device != where]:
        return
    for member in module.amax_group:
        if not is_sharded(member.weight):
            refuse_foreign((("its weight", member.weight),), member)
    ours = module.look()
    absent = [member.title for member in module.amax_group if not _is_held_alike(member.look(), ours)]
    if absent:
        raise ValueError(
            f"{module.title} shares its weight amax with {', '.join(absent)}, of which this rank holds a part only: "
            "fully_shard wrapped the layers one by one. Apply it to the module that holds them all, such as their "
            "block, or convert with hb.quantize_(…, share_amax=())"
        )
    apart = [
        f"{member.title} on {member.weight.device}" for member in module.amax_group if member.weight.device != where
    ]
    if apart:
        raise ValueError(
            f"{module.title} shares its weight amax with {', '.join(apart)}, but is on {where}: what offloads or "
            "places layers (accelerate) has to hold their parent as one, or convert with hb.quantize_(…, "
            "share_amax=()); for a layer that was copied without its siblings, or of which one was replaced, say "
            "layer.amax_group = ()"
        )


def _is_held_alike(theirs: Any, ours: Any) -> bool:
    """Whether a rank that has all, or its tensor-parallel part, of one weight has as much of the other."""
    if not is_sharded(theirs):
        return True
    return is_sharded(ours) and theirs.device_mesh == ours.device_mesh


def shared_amax(module: LinearLayer, dtype: torch.dtype | None, *, is_part: bool = False) -> Tensor:
    """Return the greatest magnitude in the weights of `module.amax_group`, fp32 [].

    Args:
        module: one of the group.
        dtype: that the weights are rounded to, None for their own.
        is_part: of weights of which ranks hold parts, that of the parts which are here.
    """
    weights = [member.look() for member in module.amax_group]
    if PLAIN.issuperset(map(type, weights)):
        (amax,), _ = ops.run(_amax_of_all, (), weights, ())
    else:
        amaxes, in_parts = [_amax(w) for w in weights if not is_sharded(w)], [w for w in weights if is_sharded(w)]
        if in_parts:
            from halfbyte.functional.sharded import whole_amax

            amaxes.append(whole_amax(in_parts, is_part=is_part))
        amax = amaxes[0] if len(amaxes) == 1 else torch.stack(amaxes).amax()
    # Rounding is monotone: the rounded maximum is the maximum of the rounded weights.
    return amax if dtype is None else amax.to(dtype).float()


def _amax_of_all(static: tuple, weights: Sequence[Tensor], numbers: Sequence[int]) -> tuple[tuple[Tensor], None]:
    """Return the amax that weights have together, as `ops.run` wants it."""
    return (ops.amax_of_all([weight.detach() for weight in weights]),), None


def _amax(weight: Tensor) -> Tensor:
    """Return the greatest magnitude of a weight, fp32 []; of codes that which they are scaled by."""
    return weight.amax if isinstance(weight, QuantTensor) and weight.amax is not None else ops.amax(weight.detach())
