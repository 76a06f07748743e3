"""Dequantization and the packed transpose, compared whole with the reference on the same device."""

from __future__ import annotations

from functools import partial

import torch

from bench import plain
from bench.measure import bandwidth, matrices, over, places, require_equal
from bench.registry import Bar, Case, Outcome, Setting, Shape
from halfbyte import ops, reference
from halfbyte.layout import LINEAR, SCALE_LAYOUTS, Blocks
from halfbyte.sides import Side
from halfbyte.spec import MXFP8, NVFP4, Spec

SHAPES: tuple[Shape, ...] = ((8192, 8192), (16384, 8192))
SMALL = (256, 512)
SLICE = 512
BAR = Bar(least=0.88, aim=0.95)


def dequantize(setting: Setting, shape: Shape, *, spec: Spec, scale_layout: str) -> Outcome:
    """Check and time decoding to bf16."""
    cols = shape[1]
    stored = partial(ops.Operand, spec=spec, cols=cols, scale_layout=scale_layout)
    operands = [
        ops.quantize(x, Side(spec, scale_layout=scale_layout), backend="reference") for x in matrices(setting, shape)
    ]
    checked = []
    for device, where in places(setting):
        head = _head(operands[0], scale_layout) if where == "CPU" else operands[0]
        moved = Blocks(*(t.to(device) for t in head))
        for dtype in (torch.bfloat16, torch.float32):
            actual = ops.dequantize(stored(head), dtype, backend=setting.backend)
            expected = ops.dequantize(stored(moved), dtype, backend="reference")
            require_equal([actual], [expected], f"to {dtype}, {where}")
        checked.append(f"{len(head.qdata)} rows with the reference on the {where}")
    calls = over(operands, lambda q: ops.dequantize(stored(q), torch.bfloat16, backend=setting.backend))
    first = operands[0]
    torch_calls = partial(
        plain.compiled,
        lambda code: reference.dequantize(stored(first._replace(qdata=code)), torch.bfloat16),
        [q.qdata for q in operands],
    )
    moved = first.qdata.numel() + first.block_scale.numel() + 2 * shape[0] * cols
    return bandwidth(setting, calls, moved, checked, torch_calls)


def _head(blocks: Blocks, scale_layout: str) -> Blocks:
    """Return the first SLICE rows; of a swizzled buffer they are a prefix, since SLICE is a multiple of 128."""
    rows = min(SLICE, len(blocks.qdata))
    if scale_layout == LINEAR:
        scale = blocks.block_scale[:rows]
    else:
        scale = blocks.block_scale[: blocks.block_scale.numel() * rows // len(blocks.qdata)]
    return Blocks(blocks.qdata[:rows], scale, blocks.amax)


def transpose(setting: Setting, shape: Shape) -> Outcome:
    """Check and time the transpose of packed 16x16 tiles."""
    spec = NVFP4(block=(16, 16))
    operands = [ops.quantize(x, Side(spec), backend="reference")[:2] for x in matrices(setting, shape)]
    actual = ops.transpose(*operands[0], *shape, backend=setting.backend)
    expected = ops.transpose(*operands[0], *shape, backend="reference")
    require_equal(actual, expected, "whole")
    calls = over(operands, lambda q: ops.transpose(*q, *shape, backend=setting.backend))
    moved = sum(t.numel() for t in (*operands[0], *actual))
    return bandwidth(setting, calls, moved, ["all of it with the reference on the same device"])


CASES = (
    *(
        Case(
            name=f"dequantize/{layout.split('_')[0]}",
            about=f"NVFP4 to bf16, {layout} scales",
            shapes=dict.fromkeys(SHAPES, BAR),
            small=SMALL,
            run=partial(dequantize, spec=NVFP4(), scale_layout=layout),
        )
        for layout in SCALE_LAYOUTS
    ),
    Case(
        name="dequantize/mxfp8",
        about="MXFP8 to bf16",
        shapes=dict.fromkeys(SHAPES),
        small=SMALL,
        run=partial(dequantize, spec=MXFP8(), scale_layout=LINEAR),
    ),
    Case(
        name="transpose/16x16",
        about="packed codes and scales",
        shapes=dict.fromkeys(SHAPES, BAR),
        small=SMALL,
        run=transpose,
    ),
)
