"""The kernels that cast primary weights, in the interpreter."""

import primary_checks as checks
import pytest
import torch

import halfbyte as hb

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("name", checks.SPECS)
def test_parts_with_broken_values(name):
    chosen = checks.SPECS[name].scaling != hb.BlockMax()
    # A tile that no stage has chosen a scale for has none: here nobody supplies the tile rows that are cut.
    checks.check_stages("cpu", checks.SHAPES, checks.SPECS[name], FP32, checks.PARTS, broken=not chosen)
    if chosen:
        checks.check_stages("cpu", checks.SHAPES, checks.SPECS[name], FP32, checks.WHOLE, broken=True)


@pytest.mark.parametrize("dtype, rounded", ((BF16, BF16), (FP32, FP32), (FP32, FP16), (FP16, BF16)))
def test_dtypes_of_masters_and_weights(dtype, rounded):
    checks.check_stages("cpu", checks.SHAPES, checks.TILE, dtype, checks.PARTS, rounded=rounded, at_once=True)


@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_whole_blocks_take_the_aligned_path(dtype):
    shapes = [(16, 16), (40, 1040), (33, 64)]
    cuts = [(0.0, 1.0), (0.1, 0.8), (0.3, 0.7)]
    checks.check_stages("cpu", shapes, checks.TILE, dtype, cuts, blocks=True, broken=True)
    checks.check_stages("cpu", shapes, checks.SPECS["four_over_six"], dtype, cuts, blocks=True)


def test_padded_rows_swizzled_scales_and_shards():
    def to_blocks(cols):
        return -(-cols // 16) * 16

    checks.check_stages("cpu", checks.SHAPES, checks.TILE, FP32, checks.PARTS, pitch=to_blocks, blocks=True)
    checks.check_stages("cpu", checks.SHAPES, checks.TILE, FP32, checks.WHOLE, scale_layout="swizzled_32_4_4")
    checks.check_stages("cpu", checks.SHAPES, checks.TILE, FP32, checks.PARTS, shards=True)
