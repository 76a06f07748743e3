"""quantize and quantize_row_col: what they refuse, and that they agree with each other."""

import dataclasses

import pytest
import torch
from tensor_cases import MX, ROW, SPECS, TILE, assert_same, inner, make, raw, values

import halfbyte as hb
from halfbyte import ops
from halfbyte.layout import LINEAR, SWIZZLED_32_4_4
from halfbyte.sides import Side
from halfbyte.tensor.quant_tensor import describe


class TestQuantize:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.complex64, torch.bool])
    def test_dtype(self, dtype):
        for make_one in (lambda x: hb.quantize(x, ROW), lambda x: hb.quantize_row_col(x, ROW, ROW)):
            with pytest.raises(TypeError, match=rf"x.dtype={dtype}.*x.float\(\)"):
                make_one(torch.zeros(4, 16, dtype=dtype))

    def test_input(self):
        with pytest.raises(ValueError, match=r"0-D.*reshape"):
            hb.quantize(torch.tensor(1.0), ROW)
        with pytest.raises(TypeError, match="x=list"):
            hb.quantize([1.0], ROW)
        with pytest.raises(TypeError, match="quantized already"):
            hb.quantize(make(ROW), ROW)
        with pytest.raises(TypeError, match="spec=None"):
            hb.quantize(values(4, 16), None)
        with pytest.raises(TypeError, match="col_spec='nvfp4'"):
            hb.quantize_row_col(values(4, 16), ROW, "nvfp4")
        with pytest.raises(ValueError, match=r"scale_layout='swizzled'.*swizzled_32_4_4"):
            hb.quantize(values(4, 16), ROW, scale_layout="swizzled")
        with pytest.raises(ValueError, match="backend='cuda'"):
            hb.quantize(values(4, 16), ROW, backend="cuda")

    def test_random_bits(self):
        x = values(4, 16)
        for spec, name in ((SPECS["stochastic"], "rng"), (SPECS["fresh"], "sign_rng")):
            remedy = rf"^{name}=None.*{describe(spec).split()[1]}.*{name}=halfbyte.Philox"
            with pytest.raises(ValueError, match=remedy):
                hb.quantize(x, spec)
            with pytest.raises(ValueError, match=remedy):
                hb.quantize_row_col(x, ROW, spec)
            with pytest.raises(TypeError, match=rf"{name}=3.*Philox"):
                hb.quantize(x, spec, **{name: 3})

    def test_run_state_draws_like_a_value(self):
        state = hb.RunState(7)
        stream = state.philox(5)
        q = hb.quantize(values(40, 72), SPECS["stochastic"], rng=stream)
        assert_same(q, hb.quantize(values(40, 72), SPECS["stochastic"], rng=hb.Philox(7, 5)))

    def test_given_amax(self):
        x = values(40, 72)
        for spec, amax in ((ROW, torch.tensor(2.0)), (SPECS["row"], torch.linspace(1, 4, 40))):
            q = hb.quantize(x.view(4, 10, 72), spec, amax=amax)
            assert torch.equal(q.amax, amax)
            expected = ops.quantize(x, Side(spec, amax=amax))
            assert torch.equal(q.qdata, expected.qdata)
        for spec, amax in ((ROW, torch.ones(1)), (SPECS["row"], torch.tensor(1.0)), (SPECS["row"], torch.ones(41))):
            with pytest.raises(ValueError, match=rf"amax.shape=.*outer='{spec.outer}'"):
                hb.quantize(x, spec, amax=amax)
        for amax in (2.0, torch.tensor(2.0, dtype=torch.float64), torch.tensor(2)):
            with pytest.raises(TypeError, match="float32"):
                hb.quantize(x, ROW, amax=amax)
        with pytest.raises(ValueError, match="mxfp8 e4m3"):
            hb.quantize(x, MX, amax=torch.tensor(2.0))
        with pytest.raises(ValueError, match=r"amax.device=meta"):
            hb.quantize(x, ROW, amax=torch.ones((), device="meta"))

    @pytest.mark.parametrize("shape", [(40, 72), (4, 10, 72), (9,)], ids=str)
    def test_row_and_col(self, shape):
        x = values(*shape)
        matrix = x.reshape(-1, shape[-1])
        pairs = [(a, b) for a in SPECS.values() for b in (ROW, SPECS["stochastic"], SPECS["fresh"], MX)]
        for row_spec, col_spec in (*pairs, (TILE, TILE), (None, ROW), (ROW, None), (None, None)):
            rng, sign_rng = hb.Philox(3, 8), hb.Philox(4, 8)
            row, col = hb.quantize_row_col(x, row_spec, col_spec, rng=rng, sign_rng=sign_rng)
            assert (row is None) == (row_spec is None) and (col is None) == (col_spec is None)
            if row is not None:
                assert_same(row, hb.quantize(x, row_spec, rng=rng, sign_rng=sign_rng))
            if col is not None:
                next_rng = dataclasses.replace(rng, offset=9)
                assert_same(col, hb.quantize(matrix.T, col_spec, rng=next_rng, sign_rng=sign_rng))

    def test_equal_tiles_share_their_codes(self):
        spec = hb.NVFP4(block=(16, 16), rounding="stochastic")
        for scale_layout in (LINEAR, SWIZZLED_32_4_4):
            options = {"rng": hb.Philox(3), "scale_layout": scale_layout}
            row, col = hb.quantize_row_col(values(40, 72), spec, spec, **options)
            assert_same(row, hb.quantize(values(40, 72), spec, **options))
            assert_same(col, row.transpose())

    def test_what_is_written_to_one_reaches_no_other(self):
        """Not the other orientation, no tensor made with the same amax, and not the caller's amax."""
        for spec in (ROW, TILE, hb.NVFP4(outer="row")):
            amax = torch.full(() if spec.outer == "tensor" else (40,), 8.0)
            ends = torch.tensor([16, 40], dtype=torch.int32)
            made = [hb.quantize(values(40, 72), spec, amax=amax) for _ in range(2)]
            made += hb.quantize_row_col(values(40, 72), spec, spec)
            made += [made[2].transpose()] if spec.is_tile else []
            if spec.outer == "tensor":
                made += hb.grouped_quantize_row_col(values(2, 40, 72), None, spec, spec)
            made += hb.grouped_quantize_row_col(values(40, 72), ends, spec, spec)
            for i, q in enumerate(made):
                others = [made[j] for j in range(len(made)) if j != i]
                before = [{name: t.clone() for name, t in inner(other).items()} for other in others]
                if not q.header.borrowed:  # else torch's transpose, which refuses to be written to
                    q.copy_(torch.zeros(q.shape)) if q.group_offsets is None else q.zero_()
                for other, parts in zip(others, before, strict=True):
                    assert all(torch.equal(raw(inner(other)[name]), raw(t)) for name, t in parts.items()), (spec, i)
            assert (amax == 8.0).all() and ends.tolist() == [16, 40]

    def test_strides_and_dtypes(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = values(72, 40, dtype=dtype)
            q = hb.quantize(x.T, ROW)
            assert q.dtype == dtype and q.is_contiguous()
            assert_same(q, hb.quantize(x.T.contiguous(), ROW))

    def test_non_finite_blocks_are_nan(self):
        x = values(40, 72)
        x[3, 20], x[9, 0] = float("inf"), float("nan")
        q = hb.quantize(x, ROW)
        bad = torch.zeros(40, 72, dtype=torch.bool)
        bad[3, 16:32] = bad[9, :16] = True
        assert torch.equal(q.dequantize().isnan(), bad)
