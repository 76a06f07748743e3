"""Weights quantized before the forward that uses them: what `hb.cache_weights` keeps and linear layers accept.

Only operands without random bits can be kept. Stochastic rounding, Eden and fresh Hadamard signs draw anew in every
micro-batch (and a sign must be that of the other operand of the GEMM), so such an operand of a weight is quantized in
every forward, cache or no cache: the bits of a step do not depend on whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.layout import Blocks
from halfbyte.sides import both_sides
from halfbyte.spec import GemmSpec, Recipe, Spec

Specs = tuple[Spec | None, Spec | None]

_PLAIN_GEMM = GemmSpec()


class CachedWeight(NamedTuple):
    """A weight as the operands that no random bits enter.

    row, col: of fprop and of dgrad; None where the recipe leaves the weight in high precision, needs no such operand or
        draws bits for it. Values of w.T stand for col where they come late.
    dtype: that the weight was rounded to before; the forward must compute in it.
    is_frozen: whether row is all that there is of the weight, and the backward makes dgrad's operand of it.
    before_backward: fills col, which is empty until then; None: it is there.
    """

    row: ops.Operand | None
    col: ops.Operand | Tensor | None
    dtype: torch.dtype
    is_frozen: bool = False
    before_backward: Callable[[], None] | None = None

    @property
    def specs(self) -> Specs:
        row, col = (operand.spec if isinstance(operand, ops.Operand) else None for operand in self[:2])
        return row, col

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers that a forward reads, without those of operands that are None."""
        sides = self[:2] if self.before_backward is None else self[:1]
        return [t for operand in sides if isinstance(operand, ops.Operand) for t in operand.blocks]


def weight_specs(recipe: Recipe) -> Specs:
    """Return the specs of a weight in fprop (row) and dgrad (col); a dequantized backward quantizes none."""
    fprop, dgrad = (gemm or _PLAIN_GEMM for gemm in (recipe.fprop, recipe.dgrad))
    return fprop.b, dgrad.b if recipe.backward == "original" else None


def cacheable(recipe: Recipe) -> Specs:
    """Return those of `weight_specs` that draw no random bits."""
    row, col = weight_specs(recipe)
    return _still(row), _still(col)


def _still(spec: Spec | None) -> Spec | None:
    return None if spec is None or spec.needs_rng or spec.needs_sign_rng else spec


def covers(cached: CachedWeight | None, recipe: Recipe) -> bool:
    """Whether forward and backward read nothing of the weight but the cached operands."""
    if cached is None or cached.row is None:
        return False
    return cached.col is not None or cached.is_frozen or recipe.backward == "dequantized"


def quantize_weight(
    w: Tensor, specs: Specs, dtype: torch.dtype, amax: Tensor | None = None, decoded: bool = False
) -> CachedWeight:
    """Return the operands of a weight as a forward in `dtype` would quantize them.

    Args:
        w: [N, K], or [E, N, K] of experts.
        specs: what `cacheable` returns.
        dtype: that the weight is rounded to first.
        amax: fp32 [], of siblings that share one; used where `linear` uses `weight_amax`.
        decoded: hold values where the backend's GEMMs multiply those; not for a dequantized backward.
    """
    row_spec, col_spec = specs
    w = w.detach().to(dtype)
    if w.dim() == 3:
        row, col = ops.grouped_quantize_row_col(w, None, *both_sides(row_spec, col_spec, transient=(decoded, decoded)))
    else:
        row_amax, col_amax = (amax if takes_amax(spec) else None for spec in specs)
        options = {"row_amax": row_amax, "col_amax": col_amax, "transient": (decoded, decoded)}
        row, col = ops.quantize_row_col(w, *both_sides(row_spec, col_spec, **options))
    return CachedWeight(_operand(row, row_spec, w.shape[-1]), _operand(col, col_spec, w.shape[-2]), dtype)


def _operand(blocks: Blocks | None, spec: Spec | None, cols: int) -> ops.Operand | None:
    return None if blocks is None or spec is None else ops.Operand(blocks, spec, cols)


def takes_amax(spec: Spec | None) -> bool:
    """Whether an amax shared by sibling weights is that of `spec`'s operand."""
    return spec is not None and spec.rotation is None and spec.has_tensor_amax


class Layout(NamedTuple):
    """What of a CachedWeight is static: of row and col each what follows the blocks in an Operand, or None.

    is_late: whether col is made before the backward, whose forward keeps nothing of the weight.
    """

    row: tuple | None
    col: tuple | None
    is_frozen: bool = False
    is_late: bool = False


_NOTHING = Layout(None, None)


def flatten(cached: Sequence[CachedWeight | None]) -> tuple[tuple[Layout, ...], list[Tensor]]:
    """Return what is static about cached weights, and their tensors in one list."""
    layouts, tensors = [], []
    for one in cached:
        if one is None:
            layouts.append(_NOTHING)
            continue
        row, col = (side[1:] if isinstance(side, ops.Operand) else None for side in one[:2])
        is_late = one.before_backward is not None
        layouts.append(Layout(row, None if is_late else col, one.is_frozen, is_late))
        tensors += one.tensors
    return tuple(layouts), tensors


def unflatten(layouts: Sequence[Layout], tensors: Sequence[Tensor]) -> list[tuple]:
    """Return the (row, col) operands that were flattened."""
    left = list(tensors)
    pairs = []
    for layout in layouts:
        sides = [
            None if static is None else ops.Operand(Blocks(*(left.pop(0) for _ in range(3))), *static)
            for static in layout[:2]
        ]
        pairs.append(tuple(sides))
    assert not left, "cached tensors and their layouts disagree"
    return pairs


def check_cached(
    cached: CachedWeight | None, recipe: Recipe, dtype: torch.dtype, device: torch.device, *, primary: bool = False
) -> None:
    """Raise ValueError if a cached weight is not what a forward in `dtype` under `recipe` would quantize.

    Args:
        cached: or None, which fits always.
        recipe: of the forward.
        dtype, device: of its input, after autocast.
        primary: whether these are the operands of a PrimaryWeight.
    """
    if cached is None:
        return
    if cached.dtype != dtype and primary:
        raise ValueError(
            f"w is a primary weight, rounded to {cached.dtype} before it was quantized, and this forward computes in "
            f"{dtype}: compute in {cached.dtype} (under autocast, for instance), build its ZeroOptimizer with "
            f"ZeroConfig(weight_dtype={dtype}), or gather it by fsdp_gather_nvfp4_(model, dtype={dtype})"
        )
    if cached.dtype != dtype:
        raise ValueError(
            f"cached_weight holds a weight rounded to {cached.dtype} and this forward computes in {dtype}: use "
            f"hb.cache_weights(model, optimizer, dtype={dtype}), or release the cache first"
        )
    if not cached.is_frozen and cached.specs != cacheable(recipe):
        raise ValueError("cached_weight was quantized for another recipe: quantize it with the present one")
    for tensor in cached.tensors[:1]:
        if tensor.device != device:
            raise ValueError(f"cached_weight is on {tensor.device}, the input on {device}: move the model")
