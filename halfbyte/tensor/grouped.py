"""grouped_quantize_row_col: tokens in groups and the weights of experts as QuantTensors."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.layout import LINEAR, Blocks
from halfbyte.rng import AnyPhilox
from halfbyte.spec import Spec
from halfbyte.tensor.create import sides_of, with_amaxes_apart
from halfbyte.tensor.quant_tensor import QuantTensor


def grouped_quantize_row_col(
    x: Tensor,
    offsets: Tensor | None,
    row_spec: Spec | None,
    col_spec: Spec | None,
    *,
    rng: AnyPhilox | None = None,
    sign_rng: AnyPhilox | None = None,
    scale_layout: str = LINEAR,
    backend: str | None = None,
) -> tuple[QuantTensor | None, QuantTensor | None]:
    """Quantize every group and its transpose for themselves (docs/numerics.md section 8).

    Group g equals `quantize_row_col` of that group alone with seed + g * 0x9E3779B97F4A7C15 in rng and sign_rng.

    Args:
        x: bfloat16, float16 or float32: tokens [M, C] with offsets, or expert weights [E, N, K] without.
        offsets: int32 [E] on x's device, cumulative ends of the groups of tokens; what lies behind is left out.
        row_spec, col_spec: NVFP4, MXFP8, or None to leave that orientation out.
        rng, sign_rng, scale_layout, backend: as for `quantize`; a swizzled group has its own padded region.

    Returns:
        (row, col): of tokens, [M, C] in groups along the rows and [C, M] in groups along the columns; of experts,
        [E, N, K] and [E, K, N]. None where the spec is None.

    Raises:
        TypeError, ValueError: as for `quantize`, or x and offsets do not fit.
    """
    sides = sides_of(x, (row_spec, col_spec), rng, sign_rng, scale_layout)
    row, col = with_amaxes_apart(*ops.grouped_quantize_row_col(x.detach(), offsets, *sides, backend=backend))
    return (
        None if row is None or row_spec is None else _wrap(row, row_spec, x, offsets, scale_layout, False),
        None if col is None or col_spec is None else _wrap(col, col_spec, x, offsets, scale_layout, True),
    )


def _wrap(blocks: Blocks, spec: Spec, x: Tensor, offsets: Tensor | None, scale_layout: str, is_col: bool):
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2]) if is_col else tuple(x.shape)
    options = {"dtype": x.dtype, "scale_layout": scale_layout}
    if offsets is not None:
        groups = {"group_offsets": offsets.detach().clone(), "splits_columns": is_col}
        return QuantTensor(blocks, spec.key, shape=shape, **options, **groups)
    # Experts are groups of equally many rows of the flattened matrix.
    ends = torch.arange(1, shape[0] + 1, dtype=torch.int32, device=x.device) * shape[1]
    amax = blocks.amax.flatten() if spec.format.has_amax else blocks.amax
    flat = Blocks(blocks.qdata.flatten(0, 1), blocks.block_scale.flatten(0, 1), amax)
    return QuantTensor(flat, spec.key, shape=shape, **options, group_offsets=ends)
