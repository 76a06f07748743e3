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
from triton.language import core
from triton.runtime import interpreter

MOST = 4096
"""Types that are kept; pointers are types of their own in every launch."""


def install() -> None:
    """Replace what makes equal things again by what looks them up."""
    interpreter._patch_lang = _replace_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    core.block_type.__init__ = _block_types(core.block_type.__init__)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
    core.tuple.__eq__ = _equal_tuples(core.tuple.__eq__)
    core.dtype.__eq__ = _equal_types(core.dtype.__eq__)


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
