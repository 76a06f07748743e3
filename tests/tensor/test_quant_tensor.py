"""What a QuantTensor holds, its transpose and how it is compiled."""

import copy

import pytest
import torch
from tensor_cases import (
    MX,
    ROW,
    SPECS,
    TILE,
    assert_same,
    every_layout,
    every_spec,
    inner,
    make,
    pickled,
    plain_spec,
    raw,
    shares,
    values,
)
from torch import Tensor

import halfbyte as hb
from halfbyte import layout, ops
from halfbyte.layout import SWIZZLED_32_4_4
from halfbyte.sides import Side
from halfbyte.tensor import DequantizeWarning, QuantTensor
from halfbyte.tensor.quant_tensor import describe


class TestWhatItHolds:
    @every_spec
    @every_layout
    @pytest.mark.parametrize("shape", [(40, 72), (3, 5, 33), (7,), (0, 16), (4, 0)], ids=str)
    def test_inner_tensors_are_the_ops_bytes(self, spec, scale_layout, shape):
        x = values(*shape)
        draw, sign_draw = hb.Philox(0, 1).on(x.device), hb.Philox(0, 2).on(x.device)
        blocks = ops.quantize(x, Side(spec, draw=draw, sign_draw=sign_draw, scale_layout=scale_layout))
        q = make(spec, *shape, scale_layout=scale_layout)
        assert q.shape == x.shape and q.dtype == x.dtype and q.spec == spec and q.scale_layout == scale_layout
        assert q.group_offsets is None and not q.requires_grad
        for ours, theirs in zip(q.blocks, blocks, strict=True):
            assert torch.equal(ours, theirs)
        fmt = spec.format
        scale = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}[fmt.scale.name]
        element = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.element.name]
        assert q.block_scale.dtype == scale and q.qdata.dtype == element
        assert (q.amax is not None) == fmt.has_amax

    @every_spec
    def test_equations_of_the_docstring(self, spec):
        q = make(spec)
        rows, cols = 40, layout.round_up(72, spec.alignment)
        scale = q.linear_scale().float().repeat_interleave(spec.block_length, 1)
        if spec.format.element.name == "e2m1":
            column = torch.arange(cols)
            codes = (q.qdata[:, column // 2] >> (4 * (column % 2))) & 15
            values_of = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            elements = values_of[codes.long()]
        else:
            elements = q.qdata.float()
        decoded = elements.double() * scale.double()
        if spec.format.has_amax:
            outer = q.amax[:, None] if spec.outer == "row" else q.amax
            decoded = decoded * outer.double() / (spec.e4m3_max * spec.fp4_max)
        if spec.is_tile:
            assert torch.equal(q.linear_scale().float(), q.linear_scale().float()[torch.arange(rows) // 16 * 16])
        torch.testing.assert_close(q.dequantize(torch.float32).double(), decoded.double()[:, :72], rtol=1e-6, atol=0)
        if spec.rotation is None:
            assert decoded[:, 72:].eq(0).all()

    @plain_spec
    def test_dequantize_is_near_the_input(self, spec):
        x = values(40, 72)
        error = make(spec).dequantize(torch.float32) - x.float()
        assert error.square().mean() / x.float().square().mean() < 0.02

    @every_spec
    @every_layout
    def test_dequantize_dtypes(self, spec, scale_layout):
        q = make(spec, 2, 20, 72, scale_layout=scale_layout)
        exact = q.dequantize(torch.float32)
        assert exact.shape == (2, 20, 72)
        assert torch.equal(exact, make(spec, 2, 20, 72).dequantize(torch.float32))
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(q.dequantize(dtype), exact.to(dtype))
        assert torch.equal(q.dequantize(), exact.bfloat16())
        with pytest.raises(TypeError, match=r"dtype=torch.float64.*float32"):
            q.dequantize(torch.float64)

    def test_scales_in_both_layouts(self):
        for spec in SPECS.values():
            linear, swizzled = make(spec, 150, 100), make(spec, 150, 100, scale_layout=SWIZZLED_32_4_4)
            assert torch.equal(raw(linear.swizzled_scale()), raw(swizzled.block_scale))
            assert torch.equal(raw(swizzled.linear_scale()), raw(linear.block_scale))
            assert swizzled.swizzled_scale() is swizzled.block_scale and linear.linear_scale() is linear.block_scale

    def test_repr_says_what_it_is(self):
        q = make(hb.NVFP4(outer="row", scaling=hb.FourOverSix(), e4m3_max=256.0), 32, 64)
        assert repr(q) == (
            "QuantTensor(shape=[32, 64], nvfp4 1x16 nearest outer=row 4over6 e4m3_max=256, linear, "
            "dtype=torch.bfloat16, device=cpu, 0.625 bytes/element)"
        )
        assert q.nbytes == 32 * 32 + 32 * 4 + 32 * 4
        assert "mxfp8 e5m2" in repr(make(hb.MXFP8(element="e5m2"))) and "empty" in f"{make(ROW, 0, 16)}"
        assert "rotation=fixed32" in str(make(SPECS["rotated"])) and "stochastic" in str(make(SPECS["stochastic"]))

    def test_descriptions_differ(self):
        assert len({describe(spec) for spec in SPECS.values()}) == len(SPECS)

    def test_constructor_refuses_what_does_not_fit(self):
        q = make(ROW)
        good, options = q.blocks, {"shape": (40, 72), "dtype": torch.bfloat16}
        assert_same(QuantTensor(good, ROW, **options), q)
        with pytest.raises(ValueError, match=r"qdata.shape=\(40, 40\).*\(40, 48\)"):
            QuantTensor(good, ROW, shape=(40, 90), dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"block_scale.shape=\(40, 5\).*\(1024,\)"):
            QuantTensor(good, ROW, scale_layout=SWIZZLED_32_4_4, **options)
        with pytest.raises(ValueError, match=r"amax.shape=\(\).*outer=row.*\(40,\)"):
            QuantTensor(good, hb.NVFP4(outer="row"), **options)
        with pytest.raises(ValueError, match="amax=None"):
            QuantTensor(good._replace(amax=None), ROW, **options)
        with pytest.raises(TypeError, match=r"amax.dtype"):
            QuantTensor(good._replace(amax=good.amax.double()), ROW, **options)
        with pytest.raises(TypeError, match=r"block_scale.dtype=torch.float8_e8m0fnu"):
            QuantTensor(good._replace(block_scale=good.block_scale.view(torch.float8_e8m0fnu)), ROW, **options)
        with pytest.raises(TypeError, match=r"dtype=torch.int32"):
            QuantTensor(good, ROW, shape=(40, 72), dtype=torch.int32)
        assert_same(QuantTensor(good, ROW.key, **options), q)
        with pytest.raises(ValueError, match="key='nvfp4'"):
            QuantTensor(good, "nvfp4", **options)
        with pytest.raises(TypeError, match="spec=None"):
            QuantTensor(good, None, **options)

    def test_group_offsets_are_carried(self):
        q = make(ROW, 32, 32)
        offsets = torch.tensor([16, 32])
        blocks = q.blocks._replace(amax=torch.tensor([3.0, 4.0]))
        grouped = QuantTensor(blocks, ROW, shape=(32, 32), dtype=torch.bfloat16, group_offsets=offsets)
        for other in (grouped.clone(), grouped.view(4, 8, 32), copy.deepcopy(grouped), pickled(grouped)):
            assert other.group_offsets.tolist() == [16, 32] and other.amax.tolist() == [3.0, 4.0]
        for rows, amax in ((slice(0, 16), 3.0), (slice(16, 32), 4.0)):
            alone = QuantTensor(q[rows].blocks._replace(amax=torch.tensor(amax)), ROW, shape=(16, 32), dtype=q.dtype)
            assert torch.equal(grouped.dequantize()[rows], alone.dequantize(torch.bfloat16))
        with pytest.raises(ValueError, match="grouped"):
            grouped.copy_(values(32, 32))
        with pytest.raises(ValueError, match="grouped"):
            grouped.clone().copy_(q)


class TestTranspose:
    @every_layout
    @pytest.mark.parametrize("shape", [(32, 48), (40, 72), (5, 1), (0, 16)], ids=str)
    def test_exact(self, scale_layout, shape):
        x = values(*shape)
        q = make(TILE, *shape, scale_layout=scale_layout)
        for t in (q.transpose(), q.t(), q.T, q.mT, q.transpose(0, 1), q.transpose(-1, 0), q.permute(1, 0)):
            assert_same(t, hb.quantize(x.T, TILE, scale_layout=scale_layout))
            assert_same(t.transpose(), q)
        assert torch.equal(q.t().dequantize(), q.dequantize().t())

    def test_refused_or_dequantized(self):
        q = make(ROW)
        with pytest.raises(ValueError, match=r"spec=nvfp4 1x16 nearest.*block=\(16, 16\)"):
            q.transpose()
        with pytest.raises(ValueError, match=r"shape=\(2, 16, 16\).*view"):
            make(TILE, 2, 16, 16).transpose()
        with pytest.warns(DequantizeWarning, match=r"aten.t .*copy"):
            t = q.t()
        assert type(t) is Tensor and torch.equal(t, q.dequantize().t())

    def test_result_is_not_written_through(self):
        q = make(TILE)
        for change in (lambda t: t.zero_(), lambda t: t.copy_(values(72, 40))):
            with pytest.raises(ValueError, match="clone"):
                change(q.t())
        t = q.t().clone()
        t.zero_()
        assert_same(q, make(TILE)) is None and t.dequantize().eq(0).all()


class TestCompile:
    @pytest.mark.parametrize("spec", (ROW, TILE, MX), ids=describe)
    def test_flatten_and_unflatten(self, spec):
        q = make(spec)
        names, header = q.__tensor_flatten__()
        assert names == (["qdata", "block_scale", "amax"] if spec is not MX else ["qdata", "block_scale"])
        again = QuantTensor.__tensor_unflatten__(inner(q), header, q.shape, q.stride())
        assert_same(again, q)
        assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(q)
        assert hash(header) == hash(make(spec, seed=1).header)

    @pytest.mark.parametrize("spec", (ROW, TILE, MX), ids=describe)
    def test_graph_input_and_output(self, spec):
        q = make(spec)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(q):
            return q.dequantize() * 2, q.view(4, 10, 72), q.clone(), q[16:32].dequantize()

        double, view, clone, rows = function(q)
        assert torch.equal(double, q.dequantize() * 2) and torch.equal(rows, q.dequantize()[16:32])
        assert_same(view, q.view(4, 10, 72))
        assert_same(clone, q)
        assert len(shares(view, q)) == len(inner(q)) and not shares(clone, q)

    @pytest.mark.parametrize("spec", (SPECS["stochastic"], TILE, MX), ids=describe)
    def test_quantize_inside_a_graph_of_any_size(self, spec):
        state = hb.RunState(3)

        @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
        def function(x, base):
            q = hb.quantize(x, spec, rng=hb.rng.StreamPhilox(base, 4))
            return q, q.view(2, -1, x.shape[1]).dequantize()

        for rows, cols in ((32, 64), (48, 40)):
            x = values(rows, cols)
            q, decoded = function(x, state.base)
            expected = hb.quantize(x, spec, rng=state.philox(4))
            assert_same(q, expected)
            assert torch.equal(decoded, expected.dequantize().view(2, -1, cols))

    def test_in_place_inside_a_graph(self):
        q, source = make(TILE), make(TILE, seed=1)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(q, source):
            q.copy_(source)
            return q.t().dequantize()

        assert torch.equal(function(q, source), source.dequantize().t())
        assert_same(q, source)
