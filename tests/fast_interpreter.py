"""Triton's interpreter without repeated work: it makes the same types anew for every value of a program.

And it replaces the language's functions anew for every device function; they stay replaced while a kernel runs, so only
the first call of a kernel has anything to replace. The bytes are the same; most kernels run several times as fast.
`tests/kernels/test_fast_interpreter.py` compares what is made once with what Triton makes.
"""

import builtins
import inspect
import math
from functools import wraps

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

MOST = 4096
"""Types that are kept; pointers are types of their own in every launch."""
MOST_CONSTANTS, LARGEST = 1024, 4096
"""Constants that are kept, each in the shape of its neighbour, and elements of the largest: 32 MiB at most."""


def install() -> None:
    """Replace what makes equal things again by what looks them up."""
    interpreter._patch_lang = _replace_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    core.block_type.__init__ = _block_types(core.block_type.__init__)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
    core.tuple.__eq__ = _equal_tuples(core.tuple.__eq__)
    core.dtype.__eq__ = _equal_types(core.dtype.__eq__)
    interpreter._validate_np_data_size = _known_sizes(interpreter._validate_np_data_size)
    rules = semantic.TritonSemantic
    rules.binary_op_type_checking_impl = _operands(rules.binary_op_type_checking_impl)
    rules.binary_op_sanitize_overflow_impl = _asserted(rules.binary_op_sanitize_overflow_impl)


def _replace_once(replace):
    known = {}

    @wraps(replace)
    def replace_once(fn):
        names = fn.__globals__
        found = known.get(id(names))
        if found is None or found[0] is not names or found[1] != len(names):
            modules = [v for v in names.values() if inspect.ismodule(v) and v in (tl, tl.core)]
            found = known[id(names)] = names, len(names), modules
        if found[2] and not any(core.is_builtin(module.load) for module in found[2]):
            return interpreter._LangPatchScope()
        return replace(fn)

    return replace_once


def _numpy_types(numpy_type):
    known = {}

    @wraps(numpy_type)
    def by_name(tt_dtype):
        name = tt_dtype.scalar.name  # of a block and of its elements numpy's type is one
        if name not in known:
            known[name] = numpy_type(tt_dtype)
        return known[name]

    return by_name


def _block_types(make):
    known = {}

    @wraps(make)
    def look_up(self, element_ty, shape):
        if type(shape) not in (list, core.tuple):
            return make(self, element_ty, shape)
        sizes = builtins.tuple([s.value if type(s) is core.constexpr else s for s in shape])
        key = id(element_ty), sizes, *map(type, sizes)  # True == 1
        found = known.get(key)
        if found is None:
            make(self, element_ty, shape)
            if len(known) >= MOST:
                known.clear()
            known[key] = vars(self).copy()  # holds the element's type, whose id is not given away meanwhile
        else:
            vars(self).update(found)
        return None

    return look_up


def _tensors(make):
    scalar = core.constexpr(1), core.tuple([])

    @wraps(make)
    def look_up(self, handle, type):
        if not type.is_block():
            self.numel, self.shape = scalar
        else:
            kept = vars(type.shape)
            if "constants" not in kept:
                kept["constants"] = (
                    core.constexpr(math.prod(type.shape)),
                    core.tuple([core.constexpr(s) for s in type.shape]),
                )
            self.numel, self.shape = kept["constants"]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return look_up


def _equal_tuples(equal):
    @wraps(equal)
    def compare(self, other):
        if type(other) not in (list, core.tuple):
            return equal(self, other)
        return core.constexpr(self.values == [core._unwrap_if_constexpr(value) for value in other])

    return compare


def _equal_types(equal):
    @wraps(equal)
    def compare(self, other):
        return other is self or equal(self, other)

    return compare


def _known_sizes(fits):
    known = {}

    @wraps(fits)
    def look_up(np_array, tl_dtype):
        if type(tl_dtype) is not core.dtype:
            return fits(np_array, tl_dtype)
        key = np_array.itemsize, tl_dtype.name
        if key not in known:
            known[key] = fits(np_array, tl_dtype)
        return known[key]

    return look_up


def _asserted(sanitize):
    """What looks for overflow computes in 64 bits what it asserts, and without `debug` asserts nothing."""

    @wraps(sanitize)
    def sanitize_in_debug(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            sanitize(self, lhs, rhs, binary_op)

    return sanitize_in_debug


def _operands(check):
    """Of operands of one type nothing is to be cast, and a number beside a tensor is the same constant every time."""
    constants = {}

    def constant_beside(self, tensor, number, is_left, options):
        """Return what `check` makes of both; a constant that leaves the tensor as it is is kept."""
        kind, shape = tensor.dtype, tensor.type.shape if tensor.type.is_block() else None
        key = id(kind), type(number), number, is_left, options, shape and builtins.tuple(shape.values)
        found = constants.get(key)
        if found is None:
            left, right = check(self, number, tensor, *options) if is_left else check(self, tensor, number, *options)
            same, constant = (right, left) if is_left else (left, right)
            if same is not tensor or constant.handle.data.size > LARGEST:
                return left, right
            constant.handle.data.flags.writeable = False
            if len(constants) >= MOST_CONSTANTS:
                constants.clear()
            found = constants[key] = constant, kind  # whose id is not given away meanwhile
        return (found[0], tensor) if is_left else (tensor, found[0])

    @wraps(check)
    def look_up(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        left, right = type(lhs), type(rhs)
        if left is core.tensor and type(lhs.dtype) is core.dtype:  # no pointer
            if right is core.tensor and lhs.dtype is rhs.dtype and not (div_or_mod and lhs.dtype.is_floating()):
                shapes = [t.type.shape.values if t.type.is_block() else None for t in (lhs, rhs)]
                return (lhs, rhs) if shapes[0] == shapes[1] else self.broadcast_impl_value(lhs, rhs)
            if right is int or right is float or right is bool:
                return constant_beside(self, lhs, rhs, False, options)
        elif right is core.tensor and type(rhs.dtype) is core.dtype and (left is int or left is float or left is bool):
            return constant_beside(self, rhs, lhs, True, options)
        return check(self, lhs, rhs, *options)

    return look_up
