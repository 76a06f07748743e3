"""What torch functions do with a QuantTensor: exact where bytes only move, dequantized with one warning elsewhere.

A handler returns NotImplemented where its exact meaning ends (a view that splits rows, a slice through a tile); the
fallback then computes with the dequantized values. A view that falls back is a copy, and its warning says so.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import LINEAR, matrix_shape
from halfbyte.tensor.create import quantize
from halfbyte.tensor.quant_tensor import HANDLERS, VALUE_DTYPES, QuantTensor, check_value_dtype, describe

aten = torch.ops.aten


class DequantizeWarning(UserWarning):
    """A torch function without an exact meaning for quantized tensors used the dequantized values."""


def implements(*overloads):
    """Register the decorated handler(func, args, kwargs) for aten overloads."""

    def register(handler):
        HANDLERS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


# Views: all inner tensors are shared


@implements(aten.detach.default, aten.alias.default)
def _alias(func, args, kwargs):
    out = return_and_correct_aliasing(func, args, kwargs, args[0].map(lambda t: t.detach()))
    out.after_alias(args[0])
    return out


@implements(
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _regroup(func, args, kwargs):
    """Leading dimensions regroup freely: rows keep their order, and the last dimension its blocks."""
    q = args[0]
    shape = func(torch.empty(q.shape, device="meta", dtype=torch.float32), *args[1:], **kwargs).shape
    if len(shape) == 0 or matrix_shape(shape) != matrix_shape(q.shape):
        return NotImplemented
    return return_and_correct_aliasing(func, args, kwargs, q.map(lambda t: t.detach(), shape=shape))


@implements(aten.as_strided.default)
def _as_strided(func, args, kwargs):
    """How a compiled function makes an output that aliases its input: contiguous strides are a view."""
    q, shape, stride, offset = (*args, kwargs.get("storage_offset"))[:4]
    if offset or tuple(stride) != torch.empty(tuple(shape), device="meta", dtype=torch.float32).stride():
        return NotImplemented
    if math.prod(shape) != q.numel():
        return NotImplemented
    out = _regroup(aten.view.default, (q, shape), {})
    if out is not NotImplemented and tuple(shape) == tuple(q.shape):  # so FSDP2 takes what an extension gathered
        out.after_alias(q)
    return out


def _rows(q: QuantTensor, start: int, stop: int) -> QuantTensor:
    """Return q[start:stop] along dimension 0 as a view, or NotImplemented."""
    if q.dim() < 2 or q.scale_layout != LINEAR or q.group_offsets is not None:
        return NotImplemented
    per_index = matrix_shape(q.shape[1:])[0]
    first, length = start * per_index, (stop - start) * per_index
    if q.spec.is_tile and first % NVFP4_BLOCK:
        return NotImplemented
    shape = (stop - start, *q.shape[1:])
    # An amax of the whole tensor stays the whole tensor's: its slices may be read, not written.
    header = q.header._replace(borrowed=q.header.borrowed or (q.amax is not None and q.amax.dim() == 0))
    return q.map(lambda t: t.narrow(0, first, length) if t.dim() else t.detach(), shape=shape, header=header)


@implements(aten.slice.Tensor)
def _slice(func, args, kwargs):
    q: QuantTensor = args[0]
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    if dim not in (0, -q.dim()) or step != 1:
        return NotImplemented
    start, end, _ = slice(start, end).indices(q.shape[0])
    out = _rows(q, start, max(start, end))
    return out if out is NotImplemented else return_and_correct_aliasing(func, args, kwargs, out)


@implements(aten.select.int)
def _select(func, args, kwargs):
    q, dim, index = args
    if dim not in (0, -q.dim()) or not -q.shape[0] <= index < q.shape[0]:
        return NotImplemented
    out = _rows(q, index % q.shape[0], index % q.shape[0] + 1)
    if out is NotImplemented:
        return out
    return return_and_correct_aliasing(func, args, kwargs, out.map(lambda t: t, shape=q.shape[1:], header=out.header))


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func, args, kwargs):
    q, sizes, dim = (*args, 0)[:3]
    n = q.shape[0]
    if dim not in (0, -q.dim()) or n == 0 or (isinstance(sizes, int) and sizes < 1):
        return NotImplemented
    lengths = [min(sizes, n - start) for start in range(0, n, sizes)] if isinstance(sizes, int) else list(sizes)
    if sum(lengths) != n or min(lengths) < 0:
        return NotImplemented
    stops = list(itertools.accumulate(lengths))
    parts = [_rows(q, stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    return return_and_correct_aliasing(func, args, kwargs, parts)


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func, args, kwargs):
    """A transpose of 16x16 tiles is exact but new memory, which `borrowed` keeps from being written in place."""
    q, *rest = args
    dims = {aten.t.default: (1, 0), aten.permute.default: rest[0] if rest else ()}.get(func, rest)
    exact = q.dim() == 2 and q.spec.is_tile and q.group_offsets is None
    if not exact or len(dims) != 2 or not all(-2 <= d < 2 for d in dims) or (dims[0] - dims[1]) % 2 == 0:
        return NotImplemented
    if func is aten.permute.default and dims[0] % 2 == 0:
        return NotImplemented
    return q.transpose()


# Copies


@implements(aten.clone.default)
def _clone(func, args, kwargs):
    q = args[0]
    return q.map(torch.clone, header=q.header._replace(borrowed=False))


@implements(aten._to_copy.default)
def _to_copy(func, args, kwargs):
    """`.to(device)` moves the bytes; `.to(dtype)` changes the nominal dtype and no byte."""
    q, dtype, device = args[0], kwargs.get("dtype"), kwargs.get("device")
    header = q.header._replace(borrowed=False)
    if dtype is not None:
        check_value_dtype("dtype", dtype, "a QuantTensor's dtype is what dequantize() returns; convert that result")
        header = header._replace(dtype=dtype)
    non_blocking = kwargs.get("non_blocking", False)
    return q.map(lambda t: t.to(device=device, non_blocking=non_blocking, copy=True), header=header)


@implements(aten.empty_like.default, aten.zeros_like.default)
def _like(func, args, kwargs):
    q, dtype, device = args[0], kwargs.get("dtype") or args[0].dtype, kwargs.get("device")
    if dtype not in VALUE_DTYPES:
        return NotImplemented
    header = q.header._replace(dtype=dtype, borrowed=False)
    out = q.map(lambda t: torch.empty_like(t, device=device), header=header)
    if q.group_offsets is not None:  # where groups end is of the shape, not of the values
        out.group_offsets.copy_(q.group_offsets)
    return out.zero_() if func is aten.zeros_like.default else out


@implements(aten._pin_memory.default)
def _pin_memory(func, args, kwargs):
    return args[0].map(lambda t: t.pin_memory())


# Changes in place


def _refuse_borrowed(name: str, q: QuantTensor) -> None:
    if q.header.borrowed:
        raise ValueError(
            f"{name}: this slice or transpose has the amax of the tensor it was taken from; clone() it first, or "
            f"change the whole tensor"
        )


@implements(aten.zero_.default)
def _zero_(func, args, kwargs):
    """All bytes 0 and amax 0: what quantizing zeros gives, in every format."""
    q = args[0]
    _refuse_borrowed("zero_", q)
    for tensor in (q.qdata.view(torch.uint8), q.block_scale.view(torch.uint8), q.amax):
        if tensor is not None:
            tensor.zero_()
    q.after_write()
    return q


@implements(aten.copy_.default)
def _copy_(func, args, kwargs):
    target, source = args[:2]
    if not isinstance(target, QuantTensor):
        values = _values("copy_", source).dequantize(target.dtype if target.dtype in VALUE_DTYPES else None)
        return target.copy_(values, *args[2:])
    _refuse_borrowed("copy_", target)
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    source = source if isinstance(source, QuantTensor) else _quantize_like(source, target)
    for name in ("spec", "shape"):
        ours, theirs = getattr(target, name), getattr(source, name)
        if ours != theirs:
            raise ValueError(
                f"copy_: source {name} {theirs} is not this tensor's {ours}; bytes copy only between equal ones. "
                "Quantize the original values again with this tensor's spec and shape"
            )
    if (target.group_offsets is None) != (source.group_offsets is None):
        raise ValueError("copy_: one tensor is grouped (group_offsets is set) and the other is not")
    scale = source.block_scale
    if source.scale_layout != target.scale_layout:
        scale = source.linear_scale() if target.scale_layout == LINEAR else source.swizzled_scale()
    pairs = ((target.qdata, source.qdata), (target.block_scale, scale))
    for to, from_ in (*pairs, (target.amax, source.amax), (target.group_offsets, source.group_offsets)):
        if to is not None and from_ is not None:
            to.copy_(from_, non_blocking=non_blocking)
    target.after_write()
    return target


def _quantize_like(values: Tensor, target: QuantTensor) -> QuantTensor:
    """Return plain `values` quantized to the spec, shape and layout of `target`, with their own amax."""
    spec = target.spec
    if spec.needs_rng or spec.needs_sign_rng:
        raise ValueError(
            f"copy_: {describe(spec)} draws random bits, which copy_ cannot take; "
            "use q.copy_(halfbyte.quantize(x, q.spec, rng=..., sign_rng=...))"
        )
    if target.group_offsets is not None:
        raise ValueError("copy_: the tensor is grouped; quantize the values with their group offsets and copy that")
    values = target.before_values(values.to(target.device).expand(target.shape))
    return quantize(values, spec, scale_layout=target.scale_layout)


# Readings


@implements(aten.equal.default)
def _equal(func, args, kwargs):
    """Equality of values, as torch defines it: -0 equals 0, NaN differs from itself."""
    a, b = args
    if isinstance(a, QuantTensor) and isinstance(b, QuantTensor) and a.spec == b.spec:
        return torch.equal(a.dequantize(torch.float32), b.dequantize(torch.float32))
    plain = [_values("equal", t).dequantize(torch.float32) if isinstance(t, QuantTensor) else t for t in args]
    return torch.equal(*(t.float() if t.dtype in VALUE_DTYPES else t for t in plain))


@implements(aten.is_pinned.default)
def _is_pinned(func, args, kwargs):
    return args[0].qdata.is_pinned()


@implements(aten.record_stream.default)
def _record_stream(func, args, kwargs):
    args[0].map(lambda t: (t.record_stream(*args[1:]), t)[1])


# Anything else


def _values(name: str, q: QuantTensor) -> QuantTensor:
    """Return q if its values are those of the tensor it was quantized from, or raise."""
    if q.spec.rotation is not None:
        raise ValueError(
            f"{name}: the values of a QuantTensor with {describe(q.spec)} are rotated, only a GEMM with an equally "
            "rotated operand undoes that; use q.dequantize() if you mean the rotated values"
        )
    return q


def _written(func, args, kwargs):
    """Yield the arguments that the overload changes."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))


def _fallback(func, args, kwargs):
    name = str(func).removesuffix(".default")
    if any(isinstance(leaf, QuantTensor) for leaf in _written(func, args, kwargs)):
        raise TypeError(
            f"{name} would change a QuantTensor in place and quantize it again, which loses accuracy; compute with "
            "dequantize() and write the result back with q.copy_(...)"
        )

    def plain(leaf):
        return _values(name, leaf).dequantize() if isinstance(leaf, QuantTensor) else leaf

    args, kwargs = tree_map(plain, (args, kwargs))
    _warn_once(name, bool(func.is_view))
    return func(*args, **kwargs)


@functools.cache
def _warn_once(name: str, is_view: bool) -> None:
    message = f"{name} computes with the dequantized values of a QuantTensor"
    if is_view:
        message += "; the result is a copy, writing to it does not change the QuantTensor"
    warnings.warn(message, DequantizeWarning, stacklevel=5)


HANDLERS["fallback"] = _fallback
