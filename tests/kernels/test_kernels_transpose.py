"""Packed transpose and scale swizzle: bytes move, none changes."""

import golden_vectors as golden
import kernel_checks as checks
import pytest
import torch

from halfbyte import reference
from halfbyte.kernels.unpack import swizzle, transpose

torch.manual_seed(0)

TRANSPOSED = [case for case in golden.cases("edge_nvfp4") if case.has("t_qdata")]
RAGGED = ((1, 1), (1, 40), (40, 1), (15, 17), (16, 16), (17, 15), (8, 24), (33, 300), (300, 33), (257, 260))
WORDS_OF_SCALES = ((64, 64), (49, 60), (250, 64), (256, 256), (512, 768), (2300, 128))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in TRANSPOSED[::6]])
def test_golden(case):
    checks.check_transpose(case)


@pytest.mark.parametrize("shape", RAGGED + WORDS_OF_SCALES)
def test_every_nibble_and_scale_moves(shape):
    rows, cols = shape
    blocks = -(-cols // 16)
    # Any bytes will do: every nibble has its place, and columns beyond the edge must not leak.
    qdata = torch.randint(0, 256, (rows, blocks * 8), dtype=torch.uint8)
    scale = torch.randint(0, 256, (-(-rows // 16), blocks), dtype=torch.uint8).repeat_interleave(16, 0)[:rows]
    ours, theirs = transpose.transpose(qdata, scale, *shape), reference.transpose(qdata, scale, *shape)
    checks.same(ours[0], theirs[0])
    checks.same(ours[1], theirs[1])
    for ways in (transpose, reference):  # memory that is given, every byte of it written
        given = torch.full_like(theirs[0], 0xA5), torch.full_like(theirs[1], 0xA5)
        returned = ways.transpose(qdata, scale, *shape, given)
        for made, own, expected in zip(returned, given, theirs, strict=True):
            assert made is own
            checks.same(own, expected)


def test_strided_input_and_float8_scales():
    blocks = reference.quantize(torch.randn(20, 48), checks.TILE)
    padded = torch.zeros(20, 40, dtype=torch.uint8)
    padded[:, :24] = blocks.qdata
    ours = transpose.transpose(padded[:, :24], blocks.block_scale.view(torch.float8_e4m3fn), 20, 48)
    theirs = reference.transpose(blocks.qdata, blocks.block_scale, 20, 48)
    checks.same(ours[0], theirs[0])
    assert ours[1].dtype == torch.float8_e4m3fn
    checks.same(ours[1].view(torch.uint8), theirs[1])


@pytest.mark.parametrize("shape", ((0, 20), (20, 0), (0, 0)))
def test_empty(shape, monkeypatch):
    monkeypatch.setattr(transpose, "transpose_kernel", None)
    blocks = reference.quantize(torch.randn(shape), checks.TILE)
    qdata, scale = transpose.transpose(blocks.qdata, blocks.block_scale, *shape)
    assert qdata.shape == (shape[1], -(-shape[0] // 16) * 8) and scale.shape == (shape[1], -(-shape[0] // 16))


@pytest.mark.parametrize("shape", ((1, 1), (3, 5), (127, 4), (128, 4), (129, 33), (260, 37)))
def test_swizzle_and_back(shape):
    checks.check_swizzle(torch.randint(0, 256, shape, dtype=torch.uint8))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in golden.cases("swizzle")])
def test_golden_swizzle(case):
    checks.same(swizzle.swizzle(case.tensor("block_scale")), case.tensor("swizzled"))


def test_swizzle_of_nothing_and_of_a_view():
    assert swizzle.swizzle(torch.empty(0, 4, dtype=torch.uint8)).numel() == 0
    assert swizzle.unswizzle(torch.empty(0, dtype=torch.uint8), 3, 0).shape == (3, 0)
    scale = torch.randint(0, 256, (9, 14), dtype=torch.uint8)
    checks.same(swizzle.swizzle(scale[:, 2:9]), swizzle.swizzle(scale[:, 2:9].clone()))
