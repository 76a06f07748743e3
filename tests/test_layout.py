"""Packing and scale layouts: inverses of each other, and the offsets of the formula that cuBLAS documents.

The golden swizzles, ragged and grouped ones too, run in test_golden.py.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.layout import (
    SWIZZLED_32_4_4,
    check_scale_layout,
    matrix_shape,
    pack,
    round_up,
    swizzle,
    swizzled_numel,
    unpack,
    unswizzle,
)

ONE_BYTE = [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def random_bytes(*shape: int, high: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def offset(i: int, j: int, cols: int) -> int:
    """The formula of numerics.md section 8, written out for one scale."""
    padded = round_up(cols, 4)
    return ((i // 128 * (padded // 4) + j // 4) * 32 + i % 32) * 16 + (i % 128 // 32) * 4 + j % 4


class TestPack:
    """Two codes in a byte, the even column low."""

    def test_even_column_is_the_low_nibble(self):
        assert pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]

    @given(rows=st.integers(0, 5), pairs=st.integers(0, 40), seed=st.integers(0, 99))
    def test_round_trip(self, rows, pairs, seed):
        codes = random_bytes(rows, 2 * pairs, high=16, seed=seed)
        assert torch.equal(unpack(pack(codes)), codes)
        qdata = random_bytes(rows, pairs, seed=seed)
        assert torch.equal(pack(unpack(qdata)), qdata)

    @pytest.mark.parametrize("shape", [(6,), (2, 3, 4), (0, 8), (1, 0)])
    def test_any_number_of_dimensions(self, shape):
        codes = random_bytes(*shape, high=16)
        assert pack(codes).shape == (*shape[:-1], shape[-1] // 2)
        assert torch.equal(unpack(pack(codes)), codes)

    def test_non_contiguous_codes(self):
        codes = random_bytes(8, 6, high=16).T
        assert torch.equal(pack(codes), pack(codes.contiguous()))

    def test_refusals(self):
        with pytest.raises(TypeError, match="codes.dtype=torch.int32"):
            pack(torch.zeros(2, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"codes.shape=\(3,\).*even"):
            pack(torch.zeros(3, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"codes.shape=\(\)"):
            pack(torch.zeros((), dtype=torch.uint8))
        with pytest.raises(TypeError, match="qdata.dtype=torch.float32"):
            unpack(torch.zeros(2))
        with pytest.raises(ValueError, match=r"qdata.shape=\(\)"):
            unpack(torch.zeros((), dtype=torch.uint8))


class TestSwizzle:
    """LINEAR to SWIZZLED_32_4_4 and back."""

    @pytest.mark.parametrize("rows, cols", [(1, 1), (128, 4), (129, 5), (200, 7), (37, 12), (256, 3)])
    def test_every_scale_lies_where_the_formula_says(self, rows, cols):
        linear = random_bytes(rows, cols, seed=rows)
        expected = torch.zeros(swizzled_numel(rows, cols), dtype=torch.uint8)
        for i in range(rows):
            for j in range(cols):
                expected[offset(i, j, cols)] = linear[i, j]
        assert torch.equal(swizzle(linear), expected)

    @given(rows=st.integers(0, 300), cols=st.integers(0, 20), seed=st.integers(0, 99))
    def test_inverse_and_padding(self, rows, cols, seed):
        linear = random_bytes(rows, cols, seed=seed)
        swizzled = swizzle(linear)
        assert swizzled.shape == (swizzled_numel(rows, cols),)
        assert torch.equal(unswizzle(swizzled, rows, cols), linear)
        assert swizzled.count_nonzero() == linear.count_nonzero()  # the padding is zero

    @pytest.mark.parametrize("dtype", ONE_BYTE)
    def test_dtype_is_kept(self, dtype):
        linear = random_bytes(5, 3).view(dtype)
        assert swizzle(linear).dtype == dtype
        again = unswizzle(swizzle(linear), 5, 3)
        assert again.dtype == dtype and torch.equal(again.view(torch.uint8), linear.view(torch.uint8))

    def test_non_contiguous_scales(self):
        linear = random_bytes(9, 140).T
        assert torch.equal(swizzle(linear), swizzle(linear.contiguous()))

    def test_refusals(self):
        with pytest.raises(TypeError, match="block_scale.dtype=torch.float32"):
            swizzle(torch.zeros(2, 2))
        with pytest.raises(ValueError, match=r"block_scale.shape=\(4,\)"):
            swizzle(torch.zeros(4, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"has 512 scales, a swizzled \[129, 4\] has 1024"):
            unswizzle(torch.zeros(512, dtype=torch.uint8), 129, 4)
        with pytest.raises(ValueError, match="scale_layout='column'.*'linear', 'swizzled_32_4_4'"):
            check_scale_layout("column")
        check_scale_layout(SWIZZLED_32_4_4)


@pytest.mark.parametrize("shape, matrix", [((5,), (1, 5)), ((2, 3, 4), (6, 4)), ((0, 3, 4), (0, 4)), ((7, 0), (7, 0))])
def test_leading_dimensions_are_rows(shape, matrix):
    assert matrix_shape(shape) == matrix


def test_a_scalar_has_no_blocks():
    with pytest.raises(ValueError, match=r"x.shape=\(\).*reshape\(1\)"):
        matrix_shape(())
