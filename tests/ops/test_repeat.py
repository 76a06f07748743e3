"""Ops and layers whose kernels are repeated return the bits of those whose kernels are not, whatever changes."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from importlib import import_module

import pytest
import quantize_checks as checks
import torch
from record_checks import Counted
from repeating import anew, check_repeats, kernels, same
from torch import Tensor

import halfbyte as hb
from halfbyte import ops, reference
from halfbyte.arithmetic import Normed
from halfbyte.kernels import prepared
from halfbyte.kernels.repeating import known
from halfbyte.layout import Operand
from halfbyte.ops import repeat
from halfbyte.sides import Side, both_sides

linear = import_module("halfbyte.functional.linear")  # the package has a function of this name

pytestmark = pytest.mark.usefixtures("kernels")
__all__ = ["kernels"]

CPU = torch.device("cpu")
TILE, RHT, SR = hb.NVFP4(block=(16, 16)), hb.NVFP4(rotation=hb.Hadamard()), hb.NVFP4(rounding="stochastic")
FRESH = hb.NVFP4(rotation=hb.Hadamard(size=32, signs="fresh"))
STREAMS = (3, 70_000, (1 << 30) + 9)
LARGE = (1 << 31, (1 << 31) + 16, (1 << 40) + 5)


def data(i: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(i))
    if x.numel() > 1:
        x.view(-1)[i] = 30.0
    return x.to(dtype)


def places(i: int, streams=STREAMS) -> dict:
    """Return draws at another place for every i."""
    draw, sign = hb.Philox(11 + i, 5).on(CPU), hb.Philox(99, 3 + i).on(CPU)
    return {"draw": draw._replace(stream=streams[i]), "sign_draw": sign._replace(stream=streams[-1 - i])}


def pair_of(recipe: hb.Recipe):
    """Return the pairs of specs of one recipe's tensors: x, w, dy."""
    fprop, dgrad, wgrad = (gemm or hb.GemmSpec() for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    return {(fprop.a, wgrad.b), (fprop.b, dgrad.b), (dgrad.a, wgrad.a)} - {(None, None)}


LEFT_OUT = ("quartet2", "rl")
"""Presets that have no kernels, or none that other presets have not."""
KNOWN = [preset() for name, preset in hb.recipes.PRESETS.items() if name not in LEFT_OUT]
PAIRS = sorted({*checks.PAIRS, *(pair for recipe in KNOWN for pair in pair_of(recipe))}, key=repr)
PAIRS = [
    *PAIRS,
    *((pair[0], None) for pair in PAIRS if None not in pair),
    *((None, p[1]) for p in PAIRS if None not in p),
]


@pytest.mark.parametrize("spec", checks.SPECS, ids=lambda spec: spec.key)
def test_quantize(spec):
    def call(given, i):
        amax = torch.tensor(20.0 + i) if spec == hb.NVFP4() and given else None
        layout = "swizzled_32_4_4" if given else "linear"
        return ops.quantize(data(i, 20, 48), Side(spec, **places(i), amax=amax, scale_layout=layout))

    for given in (False, True):
        check_repeats(partial(call, given))


@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("pair", list(dict.fromkeys(PAIRS)), ids=lambda p: " ".join(s.key if s else "-" for s in p))
def test_quantize_row_col(pair, transient):
    check_repeats(
        lambda i: ops.quantize_row_col(data(i, 17, 33), *both_sides(*pair, **places(i), transient=(transient,) * 2)),
        (1,),
    )


@pytest.mark.parametrize("pair", [(TILE, TILE), (hb.NVFP4(), RHT)], ids=["tiles", "rotated"])
def test_quantize_row_col_with_amaxes_of_both(pair):
    def call(i):
        amaxes = {"row_amax": torch.tensor(9.0 + i), "col_amax": torch.tensor(9.0 + 2 * i)}
        return ops.quantize_row_col(data(i, 32, 48), *both_sides(*pair, **amaxes, **places(i)))

    check_repeats(call)


@pytest.mark.parametrize("spec", [SR, FRESH], ids=["rounding", "signs"])
def test_streams_beyond_32_bits(spec):
    """Each is what the reference draws there, whichever was recorded first."""
    for order in (STREAMS, LARGE, (STREAMS[0], *LARGE), (LARGE[0], *STREAMS)):
        prepared._RECORDS.clear()
        for stream in order:
            x, draws = data(1, 16, 64), {k: draw._replace(stream=stream) for k, draw in places(0).items()}
            same(ops.quantize(x, Side(spec, **draws)), reference.quantize(x, spec, **draws))
    check_repeats(lambda i: ops.quantize(data(i, 16, 64), Side(spec, **places(i, LARGE))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amax(dtype):
    check_repeats(lambda i: ops.amax(data(i, 40, 70, dtype=dtype)))
    check_repeats(lambda i: ops.amax_of_all([data(i, 40, 72, dtype=dtype), data(i + 9, 8, 72, dtype=dtype)]))


@pytest.mark.parametrize("spec", [hb.NVFP4(), hb.NVFP4(outer="row"), TILE, hb.MXFP8()], ids=lambda spec: spec.key)
def test_dequantize(spec):
    def call(layout, i):
        with anew():
            blocks = ops.quantize(data(i, 20, 40), Side(spec, scale_layout=layout))
        return ops.dequantize(Operand(blocks, spec, 40, layout), torch.bfloat16)

    for layout in ("linear", "swizzled_32_4_4"):
        check_repeats(partial(call, layout))


def test_transpose():
    def call(i):
        with anew():
            blocks = ops.quantize(data(i, 32, 48), Side(TILE))
        given = torch.empty(48, 16, dtype=torch.uint8), torch.empty(48, 2, dtype=torch.uint8)
        into = given if i % 2 else None
        return ops.transpose(blocks.qdata, blocks.block_scale, 32, 48, into=into)

    check_repeats(call, (2, 4))
    check_repeats(call, (3, 5), first=1)


@pytest.mark.parametrize("wrong", ("shape", "dtype", "strides"))
def test_transpose_refuses_other_memory(wrong):
    qdata, scale = torch.empty(48, 16, dtype=torch.uint8), torch.empty(48, 2, dtype=torch.uint8)
    into = {"shape": (qdata, scale[1:]), "dtype": (qdata.char(), scale), "strides": (qdata, scale.mT.contiguous().mT)}
    blocks = ops.quantize(data(0, 32, 48), Side(TILE))
    with pytest.raises(ValueError, match="give contiguous torch.uint8"):
        ops.transpose(blocks.qdata, blocks.block_scale, 32, 48, into=into[wrong])


GEMMS = {
    "quantized": (hb.NVFP4(), TILE, {}),
    "rows": (hb.NVFP4(outer="row"), hb.NVFP4(), {}),
    "MXFP8": (hb.MXFP8(), hb.MXFP8(), {}),
    "left": (hb.NVFP4(), None, {}),
    "plain": (None, None, {}),
    "bias": (hb.NVFP4(), TILE, {"bias": 1}),
    "fp32": (hb.NVFP4(), TILE, {"out_dtype": torch.float32}),
    "out": (hb.NVFP4(), TILE, {"out": 1}),
    "accumulate": (hb.NVFP4(), TILE, {"out": 1, "accumulate": True, "bias": 1}),
    "long": (hb.NVFP4(), TILE, {"K": 4096}),
    "one row": (None, None, {"M": 1, "K": 1100, "bias": 1, "out": 1, "accumulate": True}),
    "one row of codes": (hb.NVFP4(), TILE, {"M": 1}),
}


@pytest.mark.parametrize("case", GEMMS)
def test_gemm_nt(case, monkeypatch):
    specs, options = GEMMS[case][:2], GEMMS[case][2]
    if case == "long":
        from halfbyte.kernels.gemm import dense

        plan = dense.gemm_plan
        monkeypatch.setattr(dense, "gemm_plan", lambda *given: dataclasses_replace(plan(*given), splits=2))

    def call(i):
        made = dict(options)
        M, K = made.pop("M", 20), made.pop("K", 48)
        sides = []
        for spec, rows, seed in ((specs[0], M, i), (specs[1], 24, i + 7)):
            x = data(seed, rows, K)
            with anew():
                blocks = None if spec is None else ops.quantize(x, Side(spec))
            sides.append(x if blocks is None else ops.Operand(blocks, spec, K))
        if "bias" in made:
            made["bias"] = data(i + 3, 24)
        if "out" in made:
            made["out"] = data(i + 4, M, 24, dtype=torch.float32)
        return ops.gemm_nt(*sides, **made)

    check_repeats(call)


def dataclasses_replace(value, **changes):
    return dataclasses.replace(value, **changes) if dataclasses.is_dataclass(value) else value._replace(**changes)


FOLLOWING = (ops.Following(), ops.Following(hb.NVFP4(), hb.NVFP4()), ops.Following(hb.NVFP4(outer="row"), FRESH))


@pytest.mark.parametrize("following", FOLLOWING, ids=["nothing", "tensor", "row"])
def test_norms_and_activations(following):
    def how(i):
        return following._replace(sign_draw=places(i)["sign_draw"])

    def norm(centered, i):
        x, w, b = data(i, 9, 40), data(i + 1, 40), data(i + 2, 40) if centered else None
        y, statistics, amaxes = ops.norm(x, w, b, ops.NormKind(1e-5, centered), torch.bfloat16, how(i))
        back = ops.norm_backward(data(i + 3, 9, 40), Normed(x, w, statistics, centered, centered))
        return y, statistics, amaxes, back

    def add_norm(centered, i):
        x, w, b = data(i, 9, 40), data(i + 1, 40), data(i + 2, 40) if centered else None
        kind = ops.NormKind(1e-5, centered)
        y, total, statistics, amaxes = ops.add_norm(x, data(i + 4, 9, 40), (w, b), kind, torch.bfloat16, how(i))
        gradients = data(i + 3, 9, 40), data(i + 5, 9, 40)
        normed = Normed(total, w, statistics, centered, centered)
        return y, total, statistics, amaxes, ops.norm_backward(gradients[0], normed, gradients[1])

    def activation(gated, i):
        x, up = data(i, 9, 40), data(i + 1, 9, 40) if gated else None
        h = ops.activation(x, up, "silu", how(i))
        return h, ops.activation_backward(data(i + 2, 9, 40), x, up, "silu", how(i))

    for centered in (False, True):
        check_repeats(partial(norm, centered), (1,))
        check_repeats(partial(add_norm, centered), (1,))
    for gated in (False, True):
        check_repeats(partial(activation, gated), (1,))


GROUPS = ((8, 8, 24), (0, 16, 30), (5, 21, 32))


def offsets(i: int) -> Tensor:
    return torch.tensor(GROUPS[i], dtype=torch.int32)


LONG = ((hb.NVFP4(), RHT), (SR, SR))


@pytest.mark.parametrize(
    "pair",
    [
        *(pytest.param(pair, marks=pytest.mark.full) for pair in LONG),
        *((hb.MXFP8(), None), (None, TILE), (TILE, TILE)),
    ],
    ids=str,
)
def test_grouped_quantize_row_col(pair):
    check_repeats(lambda i: ops.grouped_quantize_row_col(data(i, 32, 48), offsets(i), *both_sides(*pair, **places(i))))
    check_repeats(
        lambda i: ops.grouped_quantize_row_col(data(i, 3, 16, 32), None, *both_sides(*pair, **places(i))), (1,)
    )


@lru_cache(maxsize=4)
def grouped_operands(i: int):
    """Return tokens and experts, and both operands of a product whose groups split the contraction."""
    tokens, tokens_col = ops.grouped_quantize_row_col(data(i, 32, 32), offsets(i), *both_sides(hb.NVFP4(), RHT))
    experts, _ = ops.grouped_quantize_row_col(data(i + 1, 3, 16, 32), None, *both_sides(TILE, None))
    _, dy = ops.grouped_quantize_row_col(data(i + 2, 32, 16), offsets(i), *both_sides(None, RHT))
    sides = (tokens, hb.NVFP4(), 32), (experts, TILE, 32), (dy, RHT, 32), (tokens_col, RHT, 32)
    return [ops.Operand(*side) for side in sides]


GROUPED = {
    "tokens": lambda i, a, b, *_: ops.grouped_gemm_nt(a, b, offsets(i)),
    "contraction": lambda i, _a, _b, *columns: ops.grouped_gemm_nt(*columns, offsets(i)),
    "out": lambda i, _a, _b, *columns: ops.grouped_gemm_nt(
        *columns, offsets(i), out=data(i, 3, 16, 32, dtype=torch.float32), accumulate=True
    ),
    "plain": lambda i, *_: ops.grouped_gemm_nt(data(i, 32, 32), data(i, 3, 16, 32), offsets(i)),
    "dequantize": lambda i, a, *_: ops.grouped_dequantize(a, offsets(i)),
    "experts": lambda i, _, b, *columns: ops.grouped_dequantize(b, None),
    "decode": lambda i, _, b, *columns: ops.grouped_decode(b).blocks,
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.full) if what == "tokens" else what for what in GROUPED]
)
def test_grouped_gemms_and_decoding(what):
    def call(i):
        with anew():
            operands = grouped_operands(i)
        return GROUPED[what](i, *operands)

    check_repeats(call, (1,))


@pytest.mark.parametrize("shape", [(0, 48), (32, 0), (0, 0)])
def test_empty_tensors(shape):
    for spec in (hb.NVFP4(), RHT, TILE, hb.MXFP8()):
        for pair in ((spec, spec), (spec, None), (None, spec)):
            for _ in range(2):
                given = ops.quantize_row_col(torch.empty(shape), *both_sides(*pair))
                with anew():
                    same(given, ops.quantize_row_col(torch.empty(shape), *both_sides(*pair)))
    a, b = torch.empty(shape, dtype=torch.bfloat16), data(0, 24, shape[1])
    for _ in range(2):
        for bias in (None, data(1, 24)):
            given = ops.gemm_nt(a, b, bias=bias)
            with anew():
                same(given, ops.gemm_nt(a, b, bias=bias))


def as_given(x: Tensor) -> Tensor:
    """Return x."""
    return x


def shifted(x: Tensor) -> Tensor:
    """Return x in memory that starts one element later."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def turned(x: Tensor) -> Tensor:
    """Return x in the memory of its transpose."""
    return x.mT.contiguous().mT


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize(
    "order",
    [(as_given, shifted, turned, with_gaps), (with_gaps, turned, shifted, as_given)],
    ids=lambda order: order[0].__name__,
)
def test_memory_of_other_kinds(order):
    """Equal values in other places are equal bytes, whichever came first."""
    for spec in (hb.NVFP4(), RHT, TILE):
        prepared._RECORDS.clear()
        for i in (0, 1):
            for kind in order:
                x = data(i, 32, 48)
                same(
                    ops.quantize_row_col(kind(x), *both_sides(spec, spec)),
                    reference.quantize_row_col(x, *both_sides(spec, spec)),
                )


def test_one_tensor_in_several_places():
    """x is its own weight, and then is not, and the other way round."""
    for order in ((True, False), (False, True)):
        prepared._RECORDS.clear()
        for i, one in enumerate((*order, *order)):
            a = data(i, 24, 48)
            b = a if one else data(i + 5, 24, 48)
            given = ops.gemm_nt(a, b)
            with anew():
                same(given, ops.gemm_nt(a, b))


def test_sign_that_waits_is_seen():
    """A view of imaginary parts of conjugates holds the opposite of what it is."""
    for waits in (False, True, False):
        z = torch.complex(data(0, 16, 48, dtype=torch.float32), data(1, 16, 48, dtype=torch.float32))
        x = z.conj().imag if waits else -z.imag
        assert x.is_neg() == waits
        w = data(2, 16, 48, dtype=torch.float32)
        assert torch.equal(hb.linear(x, w, None, "nvfp4_forward"), hb.linear(x.clone(), w, None, "nvfp4_forward"))


def test_an_op_takes_parameters_if_it_is_said_to():
    weight = torch.nn.Parameter(torch.ones(2))
    for takes in (True, False):
        measure = repeat.repeated(
            lambda x, backend: x.detach(), "row_amax(Tensor x, str backend) -> Tensor", takes_parameters=takes
        )
        if takes:
            assert torch.equal(measure(weight, ""), weight)
        else:
            with pytest.raises(ValueError, match=r"row_amax was given a tensor that requires a gradient"):
                measure(weight, "")


def test_only_ops_that_say_which_backend_can_be_repeated():
    with pytest.raises(AssertionError, match="backend"):
        repeat.repeated(lambda x: x, "thing(Tensor x) -> Tensor", takes_parameters=False)


def test_ops_and_passes_of_compiled_code_make_no_key_of_what_they_know(monkeypatch):
    counted = Counted(known.key_of)
    monkeypatch.setattr(known, "key_of", counted)
    recipe, place = hb.recipes.nvfp4(), hb.Philox(3, 7)
    w = data(1, 32, 48).requires_grad_()

    @partial(torch.compile, backend="aot_eager", fullgraph=True)
    def layer(x):
        return linear.linear(x, w, None, recipe, rng=place)

    made = []
    for i in range(5):
        x = data(i, 32, 48).requires_grad_()
        layer(x).sum().backward()
        torch.ops.halfbyte.amax(x.detach(), "")
        torch.ops.halfbyte.amax_of_all([x.detach(), w.detach()], "")
        made.append(counted.runs)
    assert made[1] > made[0] > 0, "first recorded, then found by its key, from which guards are made"
    assert made[2:] == [made[1]] * 3
