"""Specs refuse what makes no sense, saying which field, which value and what instead, and survive their own key."""

import dataclasses
import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import SIGNS

import halfbyte as hb
from halfbyte.spec import HADAMARD_SIZES, parse

RHT = hb.Hadamard()
WIDE = hb.Hadamard(size=128)
FRESH = hb.Hadamard(signs="fresh")
TILE = hb.NVFP4(block=(16, 16))

# Each line: what is built, then the field, the value and the remedy that the message must name.
REFUSED = [
    (lambda: hb.NVFP4(block=(1, 32)), "block", "(1, 32)", "(1, 16), (16, 16)"),
    (lambda: hb.NVFP4(block=(16,)), "block", "(16,)", "(1, 16), (16, 16)"),
    (lambda: hb.NVFP4(rounding="sr"), "rounding", "'sr'", "'stochastic'"),
    (lambda: hb.NVFP4(outer="block"), "outer", "'block'", "'tensor', 'row'"),
    (lambda: hb.NVFP4(rotation=16), "rotation", "16", "Hadamard(size=16"),
    (lambda: hb.NVFP4(scaling="4over6"), "scaling", "'4over6'", "BlockMax(), FourOverSix(...) or Eden()"),
    (lambda: hb.NVFP4(fp4_max=0), "fp4_max", "0", "0 < fp4_max <= 6"),
    (lambda: hb.NVFP4(fp4_max=6.5), "fp4_max", "6.5", "0 < fp4_max <= 6"),
    (lambda: hb.NVFP4(fp4_max=math.nan), "fp4_max", "nan", "0 < fp4_max <= 6"),
    (lambda: hb.NVFP4(fp4_max=True), "fp4_max", "True", "0 < fp4_max <= 6"),
    (lambda: hb.NVFP4(fp4_max=1e-60), "fp4_max", "1e-60", "use a larger one"),
    (lambda: hb.NVFP4(fp4_max=1e-39), "fp4_max", "1e-39", "use a larger one"),
    (lambda: hb.NVFP4(e4m3_max=1e-38, fp4_max=1e-3), "e4m3_max", "1e-38", "use a larger one"),
    (lambda: hb.NVFP4(e4m3_max=-256.0), "e4m3_max", "-256.0", "0 < e4m3_max <= 448"),
    (lambda: hb.NVFP4(e4m3_max=449), "e4m3_max", "449", "0 < e4m3_max <= 448"),
    (lambda: hb.NVFP4(e4m3_max="256"), "e4m3_max", "'256'", "0 < e4m3_max <= 448"),
    (lambda: hb.NVFP4(block=(16, 16), outer="row"), "outer", "'row'", "block=(1, 16) or outer='tensor'"),
    (lambda: hb.NVFP4(block=(16, 16), rotation=RHT), "rotation", "Hadamard(", "block=(1, 16)"),
    (
        lambda: hb.NVFP4(rounding="stochastic", scaling=hb.FourOverSix()),
        "rounding",
        "'stochastic'",
        "rounding='nearest' or scaling=BlockMax()",
    ),
    (
        lambda: hb.NVFP4(rounding="stochastic", scaling=hb.Eden()),
        "rounding",
        "'stochastic'",
        "rounding='nearest' or scaling=BlockMax()",
    ),
    (
        lambda: hb.NVFP4(rounding="toward_zero", scaling=hb.FourOverSix()),
        "rounding",
        "'toward_zero'",
        "rounding='nearest' or scaling=BlockMax()",
    ),
    (lambda: hb.NVFP4(block=(16, 16), scaling=hb.Eden()), "scaling", "Eden()", "block=(1, 16)"),
    (lambda: hb.NVFP4(scaling=hb.Eden(), fp4_max=8.5), "fp4_max", "8.5", "0 < fp4_max <= 8"),
    (lambda: hb.NVFP4(fp4_max=4.0, scaling=hb.FourOverSix()), "fp4_max", "4.0", "fp4_max=6.0"),
    (lambda: hb.Hadamard(size=24), "size", "24", "16, 32, 64, 128"),
    (lambda: hb.Hadamard(signs="random"), "signs", "'random'", "'fixed', 'fresh', 'none'"),
    (lambda: hb.Hadamard(signs=""), "signs", "''", "'fixed', 'fresh', 'none'"),
    (lambda: hb.Hadamard(signs=("+", "-")), "signs", "('+', '-')", "of a length that divides 16"),
    (lambda: hb.Hadamard(signs="+-+"), "signs", "'+-+'", "of a length that divides 16"),
    (lambda: hb.Hadamard(size=32, signs="+-" * 32), "signs", "'+-+-", "of a length that divides 32"),
    (lambda: hb.FourOverSix(error="max"), "error", "'max'", "'mae', 'mse'"),
    (lambda: hb.FourOverSix(error_math="fast"), "error_math", "'fast'", "'exact', 'scaled'"),
    (lambda: hb.FourOverSix(candidates=(1.5,)), "candidates", "(1.5,)", "contains 1.0"),
    (lambda: hb.FourOverSix(candidates=1.5), "candidates", "1.5", "tuple"),
    (lambda: hb.FourOverSix(candidates=None), "candidates", "None", "tuple"),
    (lambda: hb.FourOverSix(candidates=("a", 1.0)), "candidates", "('a', 1.0)", "tuple"),
    (lambda: hb.FourOverSix(candidates=(1.0, -1.0)), "candidates", "(1.0, -1.0)", "between 0 and 64"),
    (lambda: hb.FourOverSix(candidates=(1.0, math.nan)), "candidates", "nan", "between 0 and 64"),
    (lambda: hb.MXFP8(element="e2m1"), "element", "'e2m1'", "'e4m3', 'e5m2'"),
    (lambda: hb.GemmSpec(a="nvfp4"), "a", "'nvfp4'", "NVFP4(...)"),
    (lambda: hb.GemmSpec(a=hb.NVFP4(), b=hb.MXFP8()), "a, b", "NVFP4(", "NVFP4 with NVFP4"),
    (lambda: hb.GemmSpec(a=hb.NVFP4(rotation=RHT), b=hb.NVFP4()), "rotation", "Hadamard(", "give both the same"),
    (lambda: hb.GemmSpec(a=hb.NVFP4(rotation=RHT), b=None), "rotation", "Hadamard(", "give both the same"),
    (lambda: hb.GemmSpec(a=hb.NVFP4(rotation=RHT), b=TILE), "rotation", "Hadamard(", "give both the same"),
    (
        lambda: hb.GemmSpec(a=hb.NVFP4(rotation=RHT), b=hb.NVFP4(rotation=WIDE)),
        "rotation",
        "size=128",
        "give both the same",
    ),
    (
        lambda: hb.GemmSpec(a=hb.NVFP4(rotation=RHT), b=hb.NVFP4(rotation=FRESH)),
        "rotation",
        "'fresh'",
        "give both the same",
    ),
    (lambda: hb.Recipe(backward="exact"), "backward", "'exact'", "'original', 'dequantized'"),
    (lambda: hb.Recipe(activation_mean="removed"), "activation_mean", "'removed'", "'kept', 'split'"),
    (lambda: hb.Recipe(activation_mean="split"), "activation_mean", "'split'", "use 'kept'"),
    (
        lambda: hb.Recipe(dgrad=hb.GemmSpec(a=TILE, b=TILE), activation_mean="split"),
        "activation_mean",
        "'split'",
        "no GEMM quantizes x",
    ),
    (
        lambda: hb.Recipe(fprop=hb.GemmSpec(a=TILE), backward="dequantized", activation_mean="split"),
        "activation_mean",
        "'split'",
        "use 'kept'",
    ),
    (lambda: hb.Recipe(fprop=hb.NVFP4()), "fprop", "NVFP4(", "GemmSpec(a=..., b=...)"),
    (lambda: hb.Recipe(backward="dequantized"), "backward", "'dequantized'", "'original'"),
    (
        lambda: hb.Recipe(
            fprop=hb.GemmSpec(a=hb.NVFP4(rotation=RHT), b=hb.NVFP4(rotation=RHT)), backward="dequantized"
        ),
        "backward",
        "'dequantized'",
        "drop rotation",
    ),
]


@pytest.mark.parametrize("build, field, value, remedy", REFUSED)
def test_refusal_names_field_value_and_remedy(build, field, value, remedy):
    with pytest.raises(ValueError) as caught:
        build()
    message = str(caught.value)
    head, _, tail = message.partition(": ")
    assert field in head
    assert value in message
    assert remedy in tail


@pytest.mark.parametrize("spec", [hb.NVFP4, hb.MXFP8, hb.Hadamard, hb.FourOverSix, hb.GemmSpec, hb.Recipe])
def test_values_are_keyword_only_and_frozen(spec):
    with pytest.raises(TypeError):
        spec("x")
    value = spec()
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.anything = 1
    assert hash(value) == hash(spec()) and value == spec()


def finite(limit: float) -> st.SearchStrategy[float]:
    return st.floats(min_value=2.0**-20, max_value=limit, allow_nan=False)


hadamards = st.builds(hb.Hadamard, size=st.sampled_from(HADAMARD_SIZES), signs=st.sampled_from(SIGNS))
candidates = st.lists(finite(8.0), max_size=3).map(lambda ratios: (1.0, *ratios))
four_over_six = st.builds(
    hb.FourOverSix,
    error=st.sampled_from(["mae", "mse"]),
    candidates=candidates,
    error_math=st.sampled_from(["exact", "scaled"]),
)
scalings = st.one_of(st.just(hb.BlockMax()), st.just(hb.Eden()), four_over_six)
nvfp4_fields = st.fixed_dictionaries(
    {},
    optional={
        "block": st.sampled_from([(1, 16), (16, 16)]),
        "rounding": st.sampled_from(["nearest", "stochastic", "toward_zero"]),
        "outer": st.sampled_from(["tensor", "row"]),
        "rotation": st.one_of(st.none(), hadamards),
        "scaling": scalings,
        "fp4_max": st.one_of(st.just(6.0), finite(9.0)),
        "e4m3_max": st.one_of(st.just(256), finite(448.0)),
    },
)


def contradicts(fields: dict) -> bool:
    """Say independently of the code which combinations section 3 of numerics.md refuses."""
    tile = fields.get("block") == (16, 16)
    scaling = fields.get("scaling", hb.BlockMax())
    rounds_otherwise = fields.get("rounding", "nearest") != "nearest"
    eden = scaling == hb.Eden()
    return (
        (tile and eden)
        or fields.get("fp4_max", 6.0) > (8.0 if eden else 6.0)
        or (tile and fields.get("outer") == "row")
        or (tile and fields.get("rotation") is not None)
        or (rounds_otherwise and scaling != hb.BlockMax())
        or (isinstance(scaling, hb.FourOverSix) and fields.get("fp4_max", 6.0) != 6.0)
    )


@given(fields=nvfp4_fields)
def test_exactly_the_contradictions_are_refused(fields):
    if contradicts(fields):
        with pytest.raises(ValueError):
            hb.NVFP4(**fields)
    else:
        assert hb.NVFP4(**fields).fp4_max == fields.get("fp4_max", 6.0)


specs = st.one_of(
    st.builds(hb.MXFP8, element=st.sampled_from(["e4m3", "e5m2"])),
    nvfp4_fields.filter(lambda fields: not contradicts(fields)).map(lambda fields: hb.NVFP4(**fields)),
)


@given(spec=specs)
def test_key_round_trip(spec):
    again = parse(spec.key)
    assert again == spec
    assert again.key == spec.key


@given(a=specs, b=specs)
def test_keys_tell_specs_apart(a, b):
    assert (a.key == b.key) == (a == b)


@given(text=st.text(alphabet=string.printable, max_size=40))
def test_foreign_key_is_refused_by_name(text):
    with pytest.raises(ValueError, match="not a spec key"):
        parse(text)


@pytest.mark.parametrize(
    "key",
    [
        "nvfp4",
        "nvfp4/1x16",
        "nvfp4/1x16/nearest/tensor/-/blockmax/6.0/448.0/more",
        "nvfp4/1x16/nearest/tensor/fixed17/blockmax/6.0/448.0",
        "nvfp4/16x16/nearest/row/-/blockmax/6.0/448.0",
        "nvfp4/1x16/nearest/tensor/-/unknown/6.0/448.0",
        "nvfp4/1x16/nearest/tensor/-/blockmax/six/448.0",
        "mxfp8/e2m1",
    ],
)
def test_damaged_key_is_refused(key):
    with pytest.raises(ValueError, match="not a spec key"):
        parse(key)


def test_candidates_are_a_set_in_the_order_of_the_tie_rule():
    spec = hb.FourOverSix(candidates=(1.5, 0.875, 1, 1.5))
    assert spec.candidates == (1.0, 0.875, 1.5)
    assert spec == hb.FourOverSix(candidates=(0.875, 1.0, 1.5))


def test_replace_checks_again():
    spec = hb.NVFP4(rounding="stochastic")
    with pytest.raises(ValueError, match="rounding"):
        dataclasses.replace(spec, scaling=hb.FourOverSix())
    assert dataclasses.replace(spec, fp4_max=4.0).key != spec.key


@given(spec=specs)
def test_derived_facts(spec):
    rotation = spec.rotation
    assert spec.alignment == (rotation.size if rotation else spec.block_length)
    assert spec.alignment % spec.block_length == 0
    if isinstance(spec, hb.NVFP4):
        assert spec.is_tile == (spec.block == (16, 16))
        assert spec.needs_rng == (spec.rounding == "stochastic" or spec.scaling == hb.Eden())
        assert spec.needs_sign_rng == (rotation is not None and rotation.signs == "fresh")


def test_equal_signs_have_one_spelling():
    assert hb.Hadamard(signs="++++") == hb.Hadamard(signs="none") and hb.Hadamard(signs="none").key == "none16"
    assert hb.Hadamard(size=64, signs="+-" * 32).signs == "+-"
    assert hb.Hadamard(size=64, signs="+++-+------+-+--" * 2) == hb.Hadamard(size=64)
    assert hb.Hadamard(size=128, signs="+" * 127 + "-").key == "+" * 127 + "-128"


def test_an_empty_gemm_is_bf16():
    assert hb.Recipe(fprop=hb.GemmSpec()) == hb.Recipe()
    assert hb.Recipe().key == "fprop=bf16;dgrad=bf16;wgrad=bf16;backward=original"


def test_equal_numbers_of_another_type_make_equal_keys():
    spec = hb.NVFP4(block=(1.0, 16.0), rotation=hb.Hadamard(size=16.0))
    assert spec.key == hb.NVFP4(block=(1, 16), rotation=hb.Hadamard(size=16)).key and parse(spec.key) == spec


def test_a_block_that_is_no_pair_is_refused():
    with pytest.raises(ValueError, match="block=16: use one of"):
        hb.NVFP4(block=16)
