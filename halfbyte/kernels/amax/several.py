"""The largest finite magnitude of several tensors, such as the weights of siblings, by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax import route
from halfbyte.kernels.amax.plain import finite_amax
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.launch import jit


class Vectors(NamedTuple):
    """Tensors of bf16 or fp32 that lie in one piece, from multiples of 16 bytes on."""

    a_ptr: Any
    b_ptr: Any
    c_ptr: Any


class Lengths(NamedTuple):
    """Their words of 4 bytes, multiples of 4; none of what only fills a place."""

    a: int
    b: int
    c: int


@triton.jit
def largest_words(m, x_ptr, words, first, programs, PACKED: tl.constexpr, C: tl.constexpr):
    """Raise m [C], pairs of bf16 magnitudes or bits of fp32, by runs `first`, `first` + `programs`, … of C words."""
    word_ptr = x_ptr.to(tl.pointer_type(tl.uint32 if PACKED else tl.int32))
    end = tl.multiple_of(tl.cast(words, tl.int64), 4)
    for start in range(first.to(tl.int64) * C, end, tl.cast(programs, tl.int64) * C):
        word = start + tl.arange(0, C)
        read = tl.load(word_ptr + word, mask=word < end, other=0)
        if PACKED:
            m = mg.raised(m, read)
        else:
            m = tl.maximum(m, read & 0x7FFFFFFF)
    return m


@triton.jit
def largest_finite(bits, x_ptr, words, first, programs, VALUES: tl.constexpr, C: tl.constexpr):
    """Raise int32 bits [VALUES * C] likewise, without what is not finite; a word has so many values."""
    end = tl.cast(words, tl.int64) * VALUES
    for start in range(first.to(tl.int64) * (VALUES * C), end, tl.cast(programs, tl.int64) * (VALUES * C)):
        i = start + tl.arange(0, VALUES * C)
        bits = tl.maximum(bits, mg.finite_bits(mg.magnitude_bits(tl.load(x_ptr + i, mask=i < end, other=0.0))))
    return bits


@jit(do_not_specialize=("words", "programs"))
def amax_several_kernel(
    xs, words, out_ptr, space_ptr, programs, PACKED: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr
):
    """The amax of all of xs, out fp32 []. Programs take runs of C words in turn, of one tensor after the other.

    PACKED: a word is two bf16, else one fp32.
    """
    overlap.begin(OVERLAP)
    m = tl.zeros((C,), tl.uint32 if PACKED else tl.int32)
    first = tl.program_id(0)
    for j in tl.static_range(len(xs)):
        m = largest_words(m, xs[j], words[j], first, programs, PACKED, C)
        # Whoever comes first in the next tensor had the fewest runs of this one.
        first = (first + programs - tl.cdiv(words[j], C) % programs) % programs
    largest = tl.max(mg.larger_bits(m), axis=0) if PACKED else tl.max(m, axis=0)
    if largest >= mg.INF_BITS:
        values: tl.constexpr = 2 if PACKED else 1
        bits = tl.zeros((values * C,), tl.int32)
        first = tl.program_id(0)
        for j in tl.static_range(len(xs)):
            bits = largest_finite(bits, xs[j], words[j], first, programs, values, C)
            first = (first + programs - tl.cdiv(words[j], C) % programs) % programs
        largest = tl.max(bits, axis=0)
    rm.publish((largest,), (out_ptr,), space_ptr, programs)


def greatest_amax(xs: Sequence[Tensor]) -> Tensor:
    """Return the largest `finite_amax` of tensors, fp32 [].

    Args:
        xs: bf16, fp16 or fp32, at least one.
    """
    choice = route.choose_several(route.AmaxOfSeveral(tuple(xs)))
    if choice.kernel == route.ONE_BY_ONE:
        return torch.stack([finite_amax(x) for x in xs]).amax()
    out = torch.empty((), dtype=torch.float32, device=xs[0].device)
    absent = len(Vectors._fields) - len(xs)
    amax_several_kernel[choice.grid](
        Vectors(*xs, *[xs[0]] * absent),
        Lengths(*[route.words_in(x) for x in xs], *[0] * absent),
        out,
        rm.workspace(rm.Wanted("tensor"), out.device),
        *choice.grid,
        **choice.constants,
        **overlap.launch_options(out.device),
    )
    return out
