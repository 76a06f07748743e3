"""Block formats as facts, and what specs and storage derive from them."""

import math

import pytest
import torch

import halfbyte as hb
from halfbyte import formats, layout, reference
from halfbyte.rng import GROUP_SEED_STEP
from halfbyte.sides import Side, both_sides, of_group, share_tiles

SPECS = {
    "nvfp4": (hb.NVFP4(), ("e2m1", "e4m3", 16, 2, 8, True)),
    "row-scaled, rotated": (
        hb.NVFP4(outer="row", rotation=hb.Hadamard(size=64)),
        ("e2m1", "e4m3", 16, 2, 8, True),
    ),
    "tiles": (hb.NVFP4(block=(16, 16)), ("e2m1", "e4m3", 16, 2, 8, True)),
    "mxfp8": (hb.MXFP8(), ("e4m3", "e8m0", 32, 1, 32, False)),
    "mxfp8 e5m2": (hb.MXFP8(element="e5m2"), ("e5m2", "e8m0", 32, 1, 32, False)),
}


@pytest.mark.parametrize("name", SPECS)
def test_spec_points_to_its_format(name):
    spec, facts = SPECS[name]
    fmt = spec.format
    found = (fmt.element.name, fmt.scale.name, fmt.length, fmt.codes_per_byte, fmt.block_bytes, fmt.has_amax)
    assert found == facts and spec.block_length == fmt.length


def test_e8m0_is_a_power_of_two():
    decoded = [formats.E8M0.decode(code) for code in range(255)]
    assert decoded == [math.ldexp(1.0, code - 127) for code in range(255)] and formats.E8M0.bits == 8
    assert math.isnan(formats.E8M0.decode(255))


@pytest.mark.parametrize("scale_layout", layout.SCALE_LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(3, 40), (130, 16), (1, 1)])
def test_storage_has_the_shapes_that_are_promised(name, shape, scale_layout):
    spec, _ = SPECS[name]
    blocks = reference.quantize(torch.ones(shape), spec, scale_layout=scale_layout)
    assert tuple(tuple(t.shape) for t in blocks) == tuple(layout.stored_shapes(*shape, spec, scale_layout))
    assert (
        layout.blocks_per_row(blocks.qdata, spec)
        == -(-shape[1] // spec.alignment) * spec.alignment // spec.block_length
    )


def test_what_specs_say_of_their_amax():
    said = {name: (spec.has_tensor_amax, spec.has_row_amax, spec.divisor) for name, (spec, _) in SPECS.items()}
    assert said["nvfp4"] == said["tiles"] == (True, False, 6.0 * formats.E4M3.max)
    assert said["row-scaled, rotated"] == (False, True, 6.0 * formats.E4M3.max)
    assert said["mxfp8"] == said["mxfp8 e5m2"] == (False, False, 1.0)
    assert hb.NVFP4(fp4_max=5.0, e4m3_max=256).divisor == 1280.0
    assert hb.NVFP4(scaling=hb.FourOverSix()).tries_candidates and not hb.NVFP4().tries_candidates


class TestSides:
    draw, sign_draw = hb.Philox(5, 8).on("cpu"), hb.Philox(6, 9).on("cpu")
    row, col = hb.NVFP4(rounding="stochastic"), hb.NVFP4(rotation=hb.Hadamard(signs="fresh"))

    def test_columns_draw_one_offset_further(self):
        amax = torch.ones(())
        row, col = both_sides(
            self.row,
            self.col,
            draw=self.draw,
            sign_draw=self.sign_draw,
            col_amax=amax,
            scale_layout=layout.SWIZZLED_32_4_4,
            transient=(True, False),
        )
        assert row == Side(self.row, self.draw, self.sign_draw, None, layout.SWIZZLED_32_4_4, True)
        assert col.draw.base is self.draw.base and (row.draw.stream, col.draw.stream) == (0, 1)
        assert col.sign_draw is self.sign_draw and col.amax is amax and not col.transient
        assert both_sides(None, self.row)[0] is None and both_sides(self.row, None)[1] is None

    def test_groups_draw_with_their_own_seed(self):
        row, col = of_group(both_sides(self.row, self.col, draw=self.draw, sign_draw=self.sign_draw), 3)
        seed = (5 + 3 * GROUP_SEED_STEP) % 2**64
        assert [value % 2**64 for value in row.draw.base.tolist()] == [seed, 8]
        assert row.draw.base is col.draw.base and (row.draw.stream, col.draw.stream) == (0, 1)
        assert row.sign_draw.base[0].item() % 2**64 == (seed + 1) % 2**64

    def test_equal_tiles_are_shared(self):
        tile = hb.NVFP4(block=(16, 16))
        assert share_tiles(tile, hb.NVFP4(block=(16, 16)))
        assert not share_tiles(tile, hb.NVFP4(block=(16, 16), fp4_max=5.0))
        assert not share_tiles(hb.NVFP4(), hb.NVFP4()) and not share_tiles(tile, None) and not share_tiles(None, tile)
