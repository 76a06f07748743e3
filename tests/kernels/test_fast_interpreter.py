"""What the tests' interpreter looks up is what Triton makes; that kernels' bytes are right all tests of kernels say."""

import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

DTYPES = [dtype for dtype in vars(tl).values() if isinstance(dtype, tl.dtype) and dtype.name not in ("void", "uint1")]
POINTERS = [tl.pointer_type(tl.float32), tl.pointer_type(tl.pointer_type(tl.int8))]
RULES = semantic.TritonSemantic
SHAPES = [[1], [16], [4, 8], [1, 1, 2], [core.constexpr(4), 2], core.tuple([8, 2]), core.tuple([core.constexpr(2)])]


def facts(value) -> dict:
    """Return everything that an object holds, with the classes of what is in tuples."""
    found = {name: part for name, part in vars(value).items() if not isinstance(part, core.tuple | core.constexpr)}
    for name, part in vars(value).items():
        if isinstance(part, core.constexpr):
            found[name] = type(part.value), part.value
        if isinstance(part, core.tuple):
            found[name] = [(type(item), getattr(item, "value", item)) for item in part.values], str(part.type)
    return found


def test_it_is_installed():
    """Without it `make test` takes longer than it may."""
    for function in (
        interpreter._patch_lang,
        interpreter._get_np_dtype,
        core.block_type.__init__,
        core.tensor.__init__,
        RULES.binary_op_type_checking_impl,
        RULES.binary_op_sanitize_overflow_impl,
    ):
        assert function.__wrapped__ is not function


def test_numpy_types():
    assert len(DTYPES) >= 17
    for dtype in DTYPES + POINTERS:
        for one in (dtype, tl.block_type(dtype, [2, 4])):
            for _ in range(2):
                assert interpreter._get_np_dtype(one) == interpreter._get_np_dtype.__wrapped__(one)


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_types_and_tensors(number):
    shape = SHAPES[number]
    for dtype in (tl.float32, tl.int1, *POINTERS):
        for _ in range(2):
            made, wanted = (object.__new__(tl.block_type) for _ in range(2))
            core.block_type.__init__(made, dtype, shape)
            core.block_type.__init__.__wrapped__(wanted, dtype, shape)
            assert facts(made) == facts(wanted) and made == wanted
            for kind in (made, dtype):
                handle = interpreter.TensorHandle(np.zeros(1, bool), kind.scalar)
                given, plain = (object.__new__(tl.tensor) for _ in range(2))
                core.tensor.__init__(given, handle, kind)
                core.tensor.__init__.__wrapped__(plain, handle, kind)
                assert facts(given) == facts(plain)


def test_equal_sizes_of_other_kinds_are_told_apart():
    assert [type(tl.block_type(tl.int8, [size]).shape.values[0]) for size in (1, True, 1)] == [int, bool, int]


REFUSED = ([], TypeError), ([3], ValueError), ([2.0], TypeError), ([1 << 30], ValueError), ((2,), AssertionError)


@pytest.mark.parametrize("shape, error", REFUSED)
def test_refusals_stay(shape, error):
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.float32, shape)


def test_equal_tuples():
    one, equal, number = core.tuple([4, 8]), core.tuple.__eq__, core.constexpr
    others = [4, 8], [4], [number(4), 8], core.tuple([4, 8]), core.tuple([number(4), 9]), (4, 8), number((4, 8)), []
    for other in others:
        assert equal(one, other).value is equal.__wrapped__(one, other).value


def test_equal_types():
    for one in DTYPES:
        assert [one == other for other in DTYPES] == [one.name == other.name for other in DTYPES]
    assert tl.int8 == core.constexpr(tl.int8) and tl.int8 != 8


NUMBERS = (0, 1, True, False, 1.0, -0.0, 0.0, 0.5, -3, 255, 256, -(2**31), 2**31, 2**63, 1e-40, float("inf"))
OPERANDS = [(), (1,), (4,), (2, 4), (1, 4)]


def rules() -> semantic.TritonSemantic:
    return RULES(interpreter.interpreter_builder)


def tensor(dtype, shape: tuple) -> tl.tensor:
    data = np.ones(shape or 1, interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(check, *operands, **options):
    """Return what both operands are made: which it is, or its type and bytes; or the error."""
    try:
        made = check(rules(), *operands, **options)
    except Exception as error:
        return type(error), str(error)
    which = [[one is operand for operand in operands] for one in made]
    return [
        (
            same
            if any(same)
            else (str(one.type), str(one.handle.dtype), one.handle.data.dtype, one.handle.data.tobytes())
        )
        for one, same in zip(made, which, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands(dtype):
    """Every type beside others and numbers, in every shape; a second time, when constants are there."""
    check = RULES.binary_op_type_checking_impl
    others = [dtype, tl.int32, tl.float32, tl.bfloat16, POINTERS[0]]
    for options in (
        {},
        {"div_or_mod": True},
        {"allow_lhs_ptr": True, "allow_rhs_ptr": True},
        {"arithmetic_check": False},
    ):
        for shape in OPERANDS:
            one = tensor(dtype, shape)
            pairs = [(one, tensor(other, size)) for other, size in product(others, OPERANDS)]
            pairs += [(one, number) for number in NUMBERS]
            for pair in (*pairs, *[pair[::-1] for pair in pairs]):
                wanted = outcome(check.__wrapped__, *pair, **options)
                assert [outcome(check, *pair, **options) for _ in range(2)] == [wanted] * 2, (pair, options)


def test_overflow_is_looked_for_where_it_is_asserted():
    one, found = tensor(tl.int32, (4,)), []

    class Asserting(type(interpreter.interpreter_builder)):
        def create_assert(self, condition, message):
            found.append((bool(condition.data.all()), message))

    for debug in (False, True):
        builder = Asserting()
        builder.options = replace(interpreter.interpreter_builder.options, debug=debug)
        RULES(builder).add(one, tensor(tl.int32, (4,)), True)
    assert found == [(True, "int32 overflow detected for operation add")]
