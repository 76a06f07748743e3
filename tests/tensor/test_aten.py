"""What torch functions do with a QuantTensor: exact, refused, or dequantized with a warning."""

import copy
import operator
import warnings

import pytest
import torch
from tensor_cases import (
    MX,
    PLAIN_SPECS,
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
from halfbyte.layout import SWIZZLED_32_4_4
from halfbyte.tensor import DequantizeWarning, QuantTensor
from halfbyte.tensor.aten import _warn_once
from halfbyte.tensor.quant_tensor import describe

IN_INFERENCE_MODE = (
    lambda t: t.T,
    lambda t: t.mT,
    lambda t: t.t(),
    lambda t: t.reshape(2, 16, 64),
    lambda t: t.view(2, 16, 64).flatten(0, 1),
    lambda t: t.unflatten(0, (2, 16)),
    lambda t: t.chunk(2)[1],
    lambda t: t.split(16)[1],
    lambda t: t.narrow(0, 16, 16),
    lambda t: t[:16],
    lambda t: t[None],
    lambda t: t.detach(),
    lambda t: t.to("cpu"),
    lambda t: t.to(torch.float32),
    lambda t: t.float(),
    lambda t: t.clone(),
)


@pytest.mark.parametrize("made_inside", (False, True))
def test_inference_mode_changes_nothing(made_inside):
    """Without autograd torch hands over whole functions, and refuses views that were made as inference tensors."""
    q = make(TILE, 32, 64)
    expected = [function(q) for function in IN_INFERENCE_MODE]
    _warn_once.cache_clear()
    with torch.inference_mode(), warnings.catch_warnings(action="error"):
        q = make(TILE, 32, 64) if made_inside else q
        for function, other in zip(IN_INFERENCE_MODE, expected, strict=True):
            assert_same(function(q), other)
        with pytest.raises(DequantizeWarning, match="aten.slice"):
            q[:, 3:]
    with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
        values = q.dequantize()
        assert torch.equal(q[:, 3:], values[:, 3:]) and torch.equal(q @ q.T, values @ values.T)


class TestViews:
    @every_spec
    @every_layout
    def test_leading_dimensions_regroup(self, spec, scale_layout):
        q = make(spec, 6, 4, 72, scale_layout=scale_layout)
        exact = q.dequantize()
        for view in (
            lambda t: t.view(24, 72),
            lambda t: t.reshape(-1, 72),
            lambda t: t.flatten(0, 1),
            lambda t: t.view(2, 3, 2, 2, 72),
            lambda t: t.unsqueeze(1),
            lambda t: t.unsqueeze(0).squeeze(0),
            lambda t: t[None],
            lambda t: t.detach(),
            lambda t: t.contiguous(),
        ):
            out = view(q)
            assert type(out) is QuantTensor and out.shape == view(exact).shape and out.stride() == view(exact).stride()
            assert torch.equal(out.dequantize(), view(exact)) and len(shares(out, q)) == len(inner(q))

    def test_write_through_a_view(self):
        for spec in PLAIN_SPECS.values():
            q = make(spec, 6, 4, 72)
            q.view(24, 72).copy_(make(spec, 24, 72, seed=1))
            assert_same(q, make(spec, 24, 72, seed=1).view(6, 4, 72))

    @pytest.mark.parametrize("shape", [(72, 40), (-1,), (20, 2, 36, 2)], ids=str)
    def test_split_rows_fall_back(self, shape):
        q = make(ROW)
        with pytest.warns(DequantizeWarning, match=r"aten.view"):
            out = q.view(*shape)
        assert type(out) is Tensor and torch.equal(out, q.dequantize().view(*shape))

    def test_empty_regroups_only_with_equal_rows(self):
        with pytest.warns(DequantizeWarning):
            assert type(make(ROW, 4, 0).view(7, 0)) is Tensor

    @plain_spec
    def test_rows(self, spec):
        q = make(spec, 48, 72)
        exact = q.dequantize()
        step = 16 if spec.is_tile else 10
        for cut in (
            lambda t: t[:step],
            lambda t: t[2 * step :],
            lambda t: t[-16:],
            lambda t: t.narrow(0, step, 9),
            lambda t: t[step:step],
            lambda t: t.split(step)[1],
            lambda t: t.split([16, 32])[1],
            lambda t: t.chunk(3)[2],
            lambda t: t.view(3, 16, 72)[1],
            lambda t: t.view(3, 16, 72)[1:],
            lambda t: t[0],
            lambda t: t.view(3, 16, 72).select(0, -1),
            lambda t: t.view(3, 16, 72).select(-3, -3),
        ):
            out = cut(q)
            assert type(out) is QuantTensor and torch.equal(out.dequantize(), cut(exact))
            assert len(shares(out, q)) == len(inner(q))
            assert_same(out.clone(), pickled(out))

    def test_rows_that_cut_a_tile_or_a_swizzled_buffer_fall_back(self):
        for q, cut in (
            (make(TILE), lambda t: t[8:24]),
            (make(TILE), lambda t: t[1]),
            (make(ROW, scale_layout=SWIZZLED_32_4_4), lambda t: t[:8]),
            (make(ROW), lambda t: t[::2]),
            (make(ROW), lambda t: t[:, :16]),
            (make(ROW), lambda t: t.split(16, 1)[1]),
        ):
            _warn_once.cache_clear()
            with pytest.warns(DequantizeWarning):
                out = cut(q)
            assert type(out) is Tensor and torch.equal(out, cut(q.dequantize()))

    def test_a_slice_does_not_change_the_amax_of_the_whole(self):
        q = make(ROW)
        for part in (q[:8], q[:8].view(2, 4, 72), pickled([q, q[:8]])[1]):
            with pytest.raises(ValueError, match="clone"):
                part.zero_()
            with pytest.raises(ValueError, match="clone"):
                part.copy_(part.clone())
        part = q[:8].clone()
        part.zero_()
        assert_same(q, make(ROW))
        for spec in (SPECS["row"], MX):  # these slices have scales of their own
            q = make(spec)
            q[8:16].copy_(make(spec, 8, 72, seed=5))
            assert torch.equal(q.dequantize()[8:16], make(spec, 8, 72, seed=5).dequantize())
            q[:8].zero_()
            assert q.dequantize()[:8].eq(0).all() and torch.equal(q.dequantize()[16:], make(spec).dequantize()[16:])


class TestCopies:
    @every_spec
    @every_layout
    def test_clone_shares_nothing(self, spec, scale_layout):
        q = make(spec, scale_layout=scale_layout)
        for other in (q.clone(), copy.deepcopy(q), q.to("cpu", copy=True)):
            assert_same(other, q)
            assert not shares(other, q)
            other.zero_()
            assert_same(q, make(spec, scale_layout=scale_layout))

    def test_shallow_copy_shares(self):
        q = make(ROW)
        assert len(shares(copy.copy(q), q)) == 3

    def test_to(self):
        q = make(ROW)
        assert q.to("cpu") is q and q.to(torch.bfloat16) is q
        for other in (q.to(torch.float32), q.float(), q.to("cpu", torch.float32)):
            assert other.dtype == torch.float32 and other.dequantize().dtype == torch.float32
            assert torch.equal(raw(other.qdata), raw(q.qdata)) and not shares(other, q)
            assert torch.equal(other.dequantize(), q.dequantize(torch.float32))
        meta = q.to("meta")
        assert meta.device.type == "meta" and all(t.device.type == "meta" for t in inner(meta).values())
        for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
            with pytest.raises(TypeError, match=r"dtype=torch.*dequantize"):
                q.to(dtype)

    @every_spec
    def test_like(self, spec):
        q = make(spec)
        zeros = torch.zeros_like(q)
        assert type(zeros) is QuantTensor and zeros.spec == spec and zeros.dequantize().eq(0).all()
        empty = torch.empty_like(q, dtype=torch.float32, device="meta")
        assert empty.dtype == torch.float32 and empty.device.type == "meta" and empty.spec == spec

    @pytest.mark.parametrize("splits_columns", (False, True))
    def test_like_a_grouped_one_has_its_groups(self, splits_columns):
        ends = torch.tensor([10, 10, 40], dtype=torch.int32)
        q = hb.grouped_quantize_row_col(values(40, 72), ends, ROW, ROW)[splits_columns]
        for made in (torch.zeros_like(q), torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)):
            assert torch.equal(made.group_offsets, ends) and not shares(made, q)
            assert made.splits_columns == splits_columns
        made.copy_(q)
        assert torch.equal(raw(made.qdata), raw(q.qdata)) and torch.equal(made.group_offsets, ends)
        assert torch.empty_like(q, device="meta").group_offsets.device.type == "meta"

    @every_spec
    @every_layout
    def test_zero_is_in_place_and_what_quantizing_zeros_gives(self, spec, scale_layout):
        q = make(spec, scale_layout=scale_layout)
        alias, before = q.detach(), {n: t.data_ptr() for n, t in inner(q).items()}
        assert q.zero_() is q
        assert {n: t.data_ptr() for n, t in inner(q).items()} == before
        zeros = torch.zeros(40, 72, dtype=torch.bfloat16)
        expected = hb.quantize(zeros, spec, rng=hb.Philox(0), sign_rng=hb.Philox(0), scale_layout=scale_layout)
        assert_same(q, expected)
        assert_same(alias, expected)


class TestCopyInPlace:
    @every_spec
    @every_layout
    def test_from_an_equal_one_copies_everything(self, spec, scale_layout):
        q, source = make(spec, scale_layout=scale_layout), make(spec, seed=1)
        before = {n: t.data_ptr() for n, t in inner(q).items()}
        assert q.copy_(source) is q
        assert_same(q, make(spec, seed=1, scale_layout=scale_layout))
        assert {n: t.data_ptr() for n, t in inner(q).items()} == before and not shares(q, source)

    @plain_spec
    @every_layout
    def test_from_plain_values_quantizes(self, spec, scale_layout):
        x = 100 * values(40, 72, seed=3)  # another amax: stale metadata would show
        q = make(spec, scale_layout=scale_layout)
        q.copy_(x)
        assert_same(q, hb.quantize(x, spec, scale_layout=scale_layout))
        q.copy_(torch.tensor(2.0))
        assert_same(q, hb.quantize(torch.full((40, 72), 2.0).bfloat16(), spec, scale_layout=scale_layout))

    @pytest.mark.parametrize("name", ["stochastic", "fresh"])
    def test_from_plain_values_without_bits_is_refused(self, name):
        q = make(SPECS[name])
        with pytest.raises(ValueError, match=r"draws random bits.*rng="):
            q.copy_(values(40, 72))
        assert_same(q, make(SPECS[name]))

    @pytest.mark.parametrize("index", [0, 1])
    def test_groups_are_copied_with_their_bytes(self, index):
        specs = hb.NVFP4(), hb.NVFP4()
        one, other = (
            hb.grouped_quantize_row_col(values(24, 40, seed=end), torch.tensor([end, 24], dtype=torch.int32), *specs)
            for end in (5, 20)
        )
        one[index].copy_(other[index])
        assert_same(one[index], other[index])
        assert one[index].group_offsets.tolist() == [20, 24] and not shares(one[index], other[index])

    def test_refusals_leave_the_tensor_alone(self):
        q = make(ROW)
        with pytest.raises(ValueError, match="spec"):
            q.copy_(make(TILE))
        with pytest.raises(ValueError, match="shape"):
            q.copy_(make(ROW, 1, 72))
        with pytest.raises(TypeError, match=r"torch.float64"):
            q.copy_(values(40, 72).double())
        with pytest.raises(RuntimeError, match="expand"):
            q.copy_(values(41, 72))
        assert_same(q, make(ROW))

    def test_into_a_plain_tensor(self):
        q = make(ROW)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = torch.empty(40, 72, dtype=dtype)
            x.copy_(q)
            assert torch.equal(x, q.dequantize(dtype if dtype != torch.float64 else None).to(dtype))

    def test_nominal_dtype_is_the_targets(self):
        q = make(ROW).float()
        q.copy_(make(ROW, seed=1))
        assert q.dtype == torch.float32 and torch.equal(q.qdata, make(ROW, seed=1).qdata)


class TestEqual:
    def test_compares_values(self):
        q = make(ROW)
        assert torch.equal(q, q.clone()) and torch.equal(q, make(ROW, scale_layout=SWIZZLED_32_4_4))
        assert torch.equal(q, q.dequantize(torch.float32)) and torch.equal(q.dequantize(torch.float32), q)
        assert not torch.equal(q, make(ROW, seed=1)) and not torch.equal(q, q.view(20, 2, 72))
        assert not torch.equal(q, values(40, 72))
        x = values(40, 72)
        x[3, 5] = float("nan")
        assert not torch.equal(hb.quantize(x, ROW), hb.quantize(x, ROW))
        assert torch.equal(hb.quantize(-torch.zeros(1, 16), ROW), hb.quantize(torch.zeros(1, 16), ROW))


class TestFallback:
    def test_computes_with_the_values_and_warns_once_per_function(self):
        q, x = make(ROW), values(40, 72, seed=1)
        with pytest.warns(DequantizeWarning, match=r"aten.add.Tensor computes with the dequantized") as seen:
            out = [q + x for _ in range(3)][-1]
        assert len(seen) == 1 and seen[0].filename == __file__
        assert type(out) is Tensor and torch.equal(out, q.dequantize() + x)
        with pytest.warns(DequantizeWarning, match=r"aten.mul.Tensor") as seen:
            assert torch.equal(x * q, x * q.dequantize())
        assert len(seen) == 1

    @pytest.mark.parametrize(
        "function",
        [
            lambda t, x: torch.nn.functional.linear(x, t),
            lambda t, x: x @ t.t(),
            lambda t, x: torch.cat([t, x]),
            lambda t, x: t.abs().max(),
            lambda t, x: torch.where(x > 0, t, x),
            lambda t, x: t[:, 3],
            lambda t, x: torch.stack(list(t)),
            lambda t, x: x.clone().add_(t),
            lambda t, x: torch.ones_like(t),
            lambda t, x: torch.zeros_like(t, dtype=torch.bool),
            lambda t, x: torch.isnan(t).any(),
            lambda t, x: torch.nn.functional.embedding(torch.tensor([3, 1]), t),
        ],
    )
    @pytest.mark.parametrize("spec", (ROW, TILE, MX), ids=describe)
    @pytest.mark.filterwarnings("default::halfbyte.tensor.DequantizeWarning")
    def test_right_answers(self, function, spec):
        q, x = make(spec), values(40, 72, seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DequantizeWarning)
            out = function(q, x)
        assert type(out) is Tensor and torch.equal(out, function(q.dequantize(), x))

    @pytest.mark.parametrize(
        "change",
        [
            lambda q: q.add_(1),
            lambda q: q.mul_(2),
            lambda q: operator.iadd(q, 1),
            lambda q: operator.isub(q, values(40, 72)),
            lambda q: operator.imul(q, 2),
            lambda q: operator.itruediv(q, 2),
            lambda q: operator.ipow(q, 2),
            lambda q: operator.ior(q, q),
            lambda q: q.fill_(1),
            lambda q: q.clamp_(0, 1),
            lambda q: q.normal_(),
            lambda q: q.t_(),
            lambda q: q.resize_(3),
            lambda q: torch.add(values(40, 72), 1, out=q),
            lambda q: torch._foreach_add_([q], 1.0),
            lambda q: q.__setitem__(0, 1.0),
            lambda q: q.view(20, 2, 72).add_(1),
            lambda q: setattr(q, "data", values(40, 72)),
        ],
    )
    def test_in_place_is_refused(self, change):
        q = make(ROW)
        with pytest.raises(TypeError, match="QuantTensor"):
            change(q)
        assert_same(q, make(ROW))

    def test_rotated_values_are_not_taken_for_the_input(self):
        q = make(SPECS["rotated"])
        for use in (lambda: q + 1, lambda: values(40, 72).copy_(q), lambda: torch.equal(q, values(40, 72)), q.sum):
            with pytest.raises(ValueError, match="rotated"):
                use()
        assert torch.equal(q, q.clone())

    def test_memory_questions_concern_the_inner_tensors(self):
        q = make(ROW)
        assert not q.is_pinned() and not q.is_shared()
        assert q.share_memory_() is q and q.is_shared() and q.block_scale.is_shared() and q.amax.is_shared()
        assert_same(q, make(ROW))

    def test_no_buffer_is_handed_out(self):
        q = make(ROW)
        for use in (q.numpy, q.tolist, q.__dlpack__):
            with pytest.raises((TypeError, RuntimeError)):
                use()


class TestAutograd:
    def test_needs_no_gradient(self):
        q = make(ROW)
        for ask in (q.requires_grad_, lambda: setattr(q, "requires_grad", True), lambda: torch.nn.Parameter(q)):
            with pytest.raises(RuntimeError, match=r"requires_grad=True.*gradient"):
                ask()
        assert q.requires_grad_(False) is q and not q.requires_grad
        x = values(40, 72).requires_grad_()
        assert not hb.quantize(x, ROW).requires_grad and not hb.quantize(x, ROW).dequantize().requires_grad

    def test_is_a_constant_for_others(self):
        q = make(ROW)
        x = values(5, 72).requires_grad_()
        with pytest.warns(DequantizeWarning):
            torch.nn.functional.linear(x, q).sum().backward()
        expected = x.detach().clone().requires_grad_()
        torch.nn.functional.linear(expected, q.dequantize()).sum().backward()
        assert torch.equal(x.grad, expected.grad)
