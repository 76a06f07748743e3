"""What both orientations of an op are asked for: sides that `both_sides` made, and others."""

from __future__ import annotations

import pytest
import torch
from repeating import kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import halfbyte as hb
from halfbyte import ops, reference
from halfbyte.layout import SWIZZLED_32_4_4
from halfbyte.rng import Draw
from halfbyte.sides import Side, both_sides, shared_draws

__all__ = ["kernels"]
SPECS = hb.NVFP4(rounding="stochastic"), hb.NVFP4(rotation=hb.Hadamard(signs="fresh"))
DRAW = Draw(torch.tensor([3, 5]), 7)
SIGNS = Draw(torch.tensor([4, 6]), 9)


@pytest.mark.parametrize("asked", [(0, 1), (0, None), (None, 1), (None, None)])
def test_sides_say_of_which_draws_they_were_made(asked):
    specs = [None if i is None else SPECS[i] for i in asked]
    draws = (DRAW, SIGNS) if any(specs) else (None, None)
    assert shared_draws(both_sides(*specs, draw=DRAW, sign_draw=SIGNS)) == draws


@pytest.mark.parametrize(
    "change, message",
    [
        ({"draw": Draw(DRAW.base.clone(), 8)}, "draw: row and col draw at different places"),
        ({"draw": None}, "draw: row and col draw at different places"),
        ({"draw": DRAW}, "draw.stream=7 of col: it follows that of row, 7"),
        ({"sign_draw": Draw(SIGNS.base.clone(), 9)}, "sign_draw: row and col draw at different places"),
        ({"scale_layout": SWIZZLED_32_4_4}, "scale_layout='swizzled_32_4_4' of col"),
    ],
)
def test_orientations_of_other_draws_are_refused(change, message):
    row, col = both_sides(*SPECS, draw=DRAW, sign_draw=SIGNS)
    with pytest.raises(ValueError, match=message):
        ops.quantize_row_col(torch.zeros(16, 32), row, col._replace(**change))
    with pytest.raises(ValueError, match=message):
        ops.grouped_quantize_row_col(torch.zeros(2, 16, 32), None, row, col._replace(**change))


def test_missing_draws_are_named():
    with pytest.raises(ValueError, match="rng=None"):
        ops.quantize(torch.zeros(4, 16), Side(SPECS[0]))
    with pytest.raises(ValueError, match="sign_rng=None"):
        ops.quantize_row_col(torch.zeros(16, 16), *both_sides(None, SPECS[1]))


def test_a_shard_has_no_two_orientations():
    """Of which blocks of x.T would lie elsewhere, also where it begins with the first block of wider rows."""
    for place in ({"first_block": 2}, {"blocks_per_row": 4}):
        sides = both_sides(*SPECS, draw=DRAW._replace(**place), sign_draw=SIGNS)
        with pytest.raises(ValueError, match="a shard starts elsewhere in x.T"):
            ops.quantize_row_col(torch.zeros(16, 32), *sides)
        ops.quantize_row_col(torch.zeros(16, 32), sides[0], None)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("specs", [(hb.NVFP4(), hb.NVFP4()), (hb.NVFP4(block=(16, 16)),) * 2, (hb.NVFP4(), SPECS[1])])
def test_outputs_of_the_op_share_no_memory(specs, backend, kernels):
    """As torch.library demands of what a compiler may reorder: also an amax that both orientations have."""
    keys = [spec.key for spec in specs]
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    places = None, 0, 0, None, SIGNS.base, 0
    for _ in range(2):  # the second time from a record
        out = torch.ops.halfbyte.quantize_row_col(x, *keys, *places, None, None, "linear", False, False, backend)
        addresses = [tensor.data_ptr() for tensor in (x, *out) if tensor.numel()]
        assert len(set(addresses)) == len(addresses) >= 6


def test_groups_of_the_reference_are_codes_of_transient_sides_too():
    x, ends = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)), torch.tensor([16, 32])
    kept, transient = (
        reference.grouped_quantize_row_col(x, ends, *both_sides(*[hb.NVFP4()] * 2, transient=(is_so, is_so)))
        for is_so in (False, True)
    )
    assert all(map(torch.equal, (*kept[0], *kept[1]), (*transient[0], *transient[1])))


@pytest.mark.parametrize("shape", [(48, 160), (40, 72), (40, 70), (3, 16, 24), (0, 64), (32, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", [(0, 1), (2, 2), (0, 3), (3, 0)], ids=str)
def test_a_compiler_is_told_where_values_lie(kernels, shape, dtype, pair):
    specs = (*SPECS, hb.NVFP4(block=(16, 16)), hb.NVFP4(rotation=hb.Hadamard(size=64)))
    sides = both_sides(*(specs[i] for i in pair), draw=DRAW, sign_draw=SIGNS, transient=(True, True))
    x = torch.randn(shape).to(dtype)
    found = [blocks.qdata for blocks in ops.quantize_row_col(x, *sides)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        told = [blocks.qdata for blocks in ops.quantize_row_col(mode.from_tensor(x), *sides)]
    assert [(t.shape, t.stride(), t.dtype) for t in told] == [(t.shape, t.stride(), t.dtype) for t in found]


def test_a_compiler_need_not_know_how_many_rows_there_are(kernels):
    """Tokens that a mask chooses: nobody can say before they are counted whether there is one."""
    sides = both_sides(hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard()), transient=(True, True))
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        x = torch.empty(environment.create_unbacked_symint(), 64, dtype=torch.bfloat16)
        told = ops.quantize_row_col(x, *sides)[1].qdata
    assert told.shape[0] == 64 and told.stride() == (1, 64)
