"""QuantTensor: codes, scales and the values that say how to read them, as one torch.Tensor in one orientation.

The class holds the data and the exact operations on it. What torch functions do with it is a table in aten.py; how it
is made from values is create.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import layout, ops
from halfbyte.layout import LINEAR, SWIZZLED_32_4_4, Blocks, matrix_shape, round_up
from halfbyte.spec import MXFP8, NVFP4, Spec, parse

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What is quantized and dequantized to; fp64 and integers are refused (docs/numerics.md section 2)."""

ROUNDING = 2.0**-22
"""How far the product of a code, a scale and a factor is from the exact one, relative; the next ones are 6 % away."""

TORCH_DTYPES = {
    "e2m1": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
"""What QuantTensor shows elements and scales as; E2M1 codes are packed."""

HANDLERS: dict[Any, Callable] = {}
"""aten overload -> handler(func, args, kwargs), filled by aten.py; NotImplemented from a handler means fall back."""


class Header(NamedTuple):
    """All of a QuantTensor that is neither tensor nor shape; equal headers mean equally read bytes."""

    spec: Spec
    dtype: torch.dtype
    scale_layout: str
    borrowed: bool = False
    splits_columns: bool = False


class QuantTensor(torch.Tensor):
    """A quantized tensor in one orientation: its blocks run along the last dimension, a GEMM's contraction.

    With shape (..., K), M = the product of the leading sizes, K' = round_up(K, spec.alignment), and docs/numerics.md
    sections 2, 3 and 6:

        NVFP4   qdata        uint8 [M, K'/2]: code[i, k] = (qdata[i, k // 2] >> 4 * (k % 2)) & 15
                block_scale  float8_e4m3fn, S = linear_scale() is [M, K'/16]
                amax         fp32 [] (outer="tensor") or [M] (outer="row")
                value[i, k]  = e2m1(code[i, k]) * S[i, k // 16] * max(amax, tiny) / (e4m3_max * fp4_max)
                16x16        S[i, j] == S[16 * (i // 16), j]
        MXFP8   qdata        float8_e4m3fn or float8_e5m2 [M, K']
                block_scale  float8_e8m0fnu, S = linear_scale() is [M, K'/32];  amax is None
                value[i, k]  = qdata[i, k] * S[i, k // 32]
        both    block_scale  is S (LINEAR) or layout.swizzle(S) (SWIZZLED_32_4_4)
                value == 0 for k >= K, unless spec.rotation: then value approximates the rotated tensor
                clone() shares no byte with its source; views of leading dimensions share all of them
        groups  the parts [group_offsets[g-1], group_offsets[g]) of the rows, or of K if splits_columns, are quantized
                each for itself and stored as layout.grouped_shapes says; amax [groups], with outer="row" as there

    `dtype` is nominal: that of the tensor it was quantized from and the default of `dequantize`. Codes have no
    gradient, so a QuantTensor never requires grad. Torch functions without an exact meaning here use the dequantized
    values and warn once (aten.py); a change in place that would have to quantize again is refused.

    Args:
        blocks: the plain tensors, scales (and MXFP8 elements) as uint8 or float8.
        spec: NVFP4, MXFP8 or the `.key` of one.
        shape: the logical shape, at least 1-D.
        dtype: nominal dtype: bfloat16, float16 or float32.
        scale_layout: "linear" or "swizzled_32_4_4".
        group_offsets: of a grouped operand, integer [groups], cumulative ends; None otherwise.
        splits_columns: whether the groups split the last dimension, not the rows.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: the tensors do not satisfy the equations' shapes.
    """

    qdata: Tensor
    block_scale: Tensor
    amax: Tensor | None
    group_offsets: Tensor | None
    header: Header

    __torch_function__ = torch._C._disabled_torch_function_impl

    if TYPE_CHECKING:  # torch.Tensor has no __init__ that checkers could compare with __new__

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    def __new__(
        cls,
        blocks: Blocks,
        spec: Spec | str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scale_layout: str = LINEAR,
        group_offsets: Tensor | None = None,
        splits_columns: bool = False,
    ):
        spec = parse(spec) if isinstance(spec, str) else spec
        check_spec("spec", spec)
        check_value_dtype("dtype", dtype, "name the float dtype that dequantize() returns")
        layout.check_scale_layout(scale_layout)
        inner, header = _typed(blocks, spec), Header(spec, dtype, scale_layout, splits_columns=splits_columns)
        _check_inner(inner, header, tuple(shape), group_offsets)
        return cls._wrap(inner, header, shape, group_offsets)

    @classmethod
    def _wrap(cls, inner, header: Header, shape, group_offsets=None, stride=None) -> QuantTensor:
        """Make the wrapper of tensors already known to fit."""
        out = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=header.dtype, device=inner[0].device, requires_grad=False
        )
        out.qdata, out.block_scale, out.amax = inner
        out.group_offsets = group_offsets
        out.header = header
        return out

    def map(self, function: Callable[[Tensor], Tensor], *, shape=None, header: Header | None = None) -> QuantTensor:
        """Return a QuantTensor of `function` of each inner tensor; the shape keeps rows and last dimension."""
        inner = [None if t is None else function(t) for t in (self.qdata, self.block_scale, self.amax)]
        offsets = None if self.group_offsets is None else function(self.group_offsets)
        return self._wrap(inner, header or self.header, self.shape if shape is None else shape, offsets)

    # What it is

    @property
    def spec(self) -> Spec:
        return self.header.spec

    @property
    def scale_layout(self) -> str:
        return self.header.scale_layout

    @property
    def splits_columns(self) -> bool:
        """Whether the groups of a grouped operand split its last dimension, not its rows."""
        return self.header.splits_columns

    @property
    def blocks(self) -> Blocks:
        """The plain tensors as ops take them: uint8 codes and scales, fp32 amax (empty for MXFP8)."""
        return blocks_of(self)

    @property
    def nbytes(self) -> int:
        """Bytes that codes, scales and amax occupy."""
        return sum(t.numel() * t.element_size() for t in (self.qdata, self.block_scale, self.amax) if t is not None)

    def __repr__(self, *, tensor_contents=None) -> str:
        nbytes, numel = self.nbytes, self.numel()
        if isinstance(nbytes, int) and isinstance(numel, int):  # numbers, not the symbols of a traced graph
            size = f"{nbytes / numel:.4g} bytes/element" if numel else "empty"
        else:
            size = "traced"
        groups = "" if self.group_offsets is None else f", groups={self.group_offsets.numel()}"
        return (
            f"QuantTensor(shape={list(self.shape)}, {describe(self.spec)}, {self.scale_layout}{groups}, "
            f"dtype={self.dtype}, device={self.device}, {size})"
        )

    # Exact operations

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values that the codes stand for (of a rotated operand: in the rotated basis).

        Args:
            dtype: bfloat16, float16 or float32; None means `self.dtype`.

        Returns:
            Plain tensor of `self.shape`, rounded once from fp32.

        Raises:
            TypeError: any other dtype.
            ValueError: the groups split the last dimension.
        """
        dtype = self.dtype if dtype is None else dtype
        check_value_dtype("dtype", dtype, "dequantize to float32 and convert from there")
        operand = ops.Operand(self.blocks, self.spec, self.shape[-1], self.scale_layout)
        if self.group_offsets is not None and not self.splits_columns:
            return ops.grouped_dequantize(operand, self.group_offsets, dtype).view(self.shape)
        self._refuse_groups("dequantize")
        return ops.dequantize(operand, dtype).view(self.shape)

    def transpose(self, dim0: int | None = None, dim1: int | None = None) -> Tensor:
        """Return the other orientation of a 2-D tensor of 16x16 tiles: nibbles and scales move, nothing is rounded.

        The result does not alias `self`. With two dimensions given this is torch's `transpose`.

        Raises:
            ValueError: not 16x16 tiles or not 2-D.
        """
        if dim0 is not None and dim1 is not None:
            return super().transpose(dim0, dim1)
        if dim0 is not None or dim1 is not None:
            raise TypeError(f"transpose(dim0={dim0}, dim1={dim1}): give both dimensions or none")
        if not self.spec.is_tile:
            raise ValueError(
                f"spec={describe(self.spec)}: blocks along one dimension have no exact transpose; use "
                "quantize_row_col(x, row_spec, col_spec), block=(16, 16), or dequantize().transpose()"
            )
        if self.dim() != 2:
            raise ValueError(f"shape={tuple(self.shape)}: transpose() needs two dimensions; view it as [M, K] first")
        self._refuse_groups("transpose")
        rows, cols = self.shape
        qdata, scale = ops.transpose(self.blocks.qdata, self.linear_scale().view(torch.uint8), rows, cols)
        if self.scale_layout == SWIZZLED_32_4_4:
            scale = layout.swizzle(scale)
        inner = self.blocks._replace(qdata=qdata, block_scale=scale)
        inner = _typed(inner if inner.amax is None else inner._replace(amax=inner.amax.clone()), self.spec)
        return self._wrap(inner, self.header._replace(borrowed=True), (cols, rows))

    def linear_scale(self) -> Tensor:
        """Return the block scales in LINEAR layout: float8 [M, K' / spec.block_length]."""
        if self.scale_layout == LINEAR:
            return self.block_scale
        self._refuse_groups("linear_scale")
        return layout.unswizzle(self.block_scale, *_scale_shape(self.spec, self.shape))

    def swizzled_scale(self) -> Tensor:
        """Return the block scales in SWIZZLED_32_4_4 layout: float8 [round_up(M, 128) * round_up(blocks, 4)]."""
        if self.scale_layout == SWIZZLED_32_4_4:
            return self.block_scale
        self._refuse_groups("swizzled_scale")
        return layout.swizzle(self.block_scale)

    def _refuse_groups(self, name: str) -> None:
        if self.group_offsets is not None:
            raise ValueError(f"{name}: the tensor is grouped (group_offsets is set); take one group at a time")

    # What torch asks of a subclass

    def __tensor_flatten__(self):
        names = ("qdata", "block_scale", "amax", "group_offsets")
        return [name for name in names if getattr(self, name) is not None], self.header

    @staticmethod
    def __tensor_unflatten__(inner, header, outer_size, outer_stride):
        blocks = (inner["qdata"], inner["block_scale"], inner.get("amax"))
        return QuantTensor._wrap(blocks, header, outer_size, inner.get("group_offsets"), outer_stride)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            return _dispatch_in_inference_mode(func, args, kwargs)
        return _dispatch(func, args, kwargs)

    def __reduce_ex__(self, protocol):
        blocks, header = self.blocks, self.header
        tensors = (blocks.qdata, blocks.block_scale, self.amax, self.group_offsets)
        is_parameter = isinstance(self, torch.nn.Parameter)
        rest = (header.dtype, header.scale_layout, header.borrowed, is_parameter, header.splits_columns)
        return rebuild, (*tensors, header.spec.key, rest, tuple(self.shape))

    def after_alias(self, source: QuantTensor) -> None:
        """Called on a tensor that shares the bytes of `source`: subclasses share what else they hold."""

    def before_values(self, values: Tensor) -> Tensor:
        """Called with plain values that are to be quantized into this tensor: subclasses change or refuse them."""
        return values

    def after_write(self) -> None:
        """Called once the bytes were changed in place: subclasses change what follows from them."""

    def __setitem__(self, index, value) -> None:
        raise TypeError("QuantTensor does not support item assignment; change dequantize() and quantize that again")

    def _refuse_to_change(self, other):
        raise TypeError(
            "this would change a QuantTensor in place and quantize it again, which loses accuracy; compute with "
            "dequantize() and write the result back with q.copy_(...), or to merge adapters, as PEFT's merge would in "
            "high precision, hb.merge_lora_(model)"
        )

    # torch turns the TypeError of what is called by dispatch into a plain tensor that takes the name's place.
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _refuse_to_change
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _refuse_to_change

    def __dlpack__(self, **options):
        raise TypeError("QuantTensor has no single buffer for DLPack; export dequantize(), or qdata and block_scale")

    def storage(self):
        """Refuse: the bytes lie in several tensors. Writers of files that take tensors as one ask for this."""
        raise TypeError(
            "QuantTensor has no storage of its own, so safetensors.torch.save_file and others cannot write it; use "
            "plain, metadata = hb.tensor.to_safetensors(tensors) and save_file(plain, path, metadata)"
        ) from None

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> QuantTensor:
        """Refuse True: codes have no gradient.

        Raises:
            RuntimeError: requires_grad is True.
        """
        if requires_grad:
            raise RuntimeError(
                "requires_grad=True: the codes of a QuantTensor have no gradient; train the high-precision parameter "
                "through halfbyte.linear, or use torch.nn.Parameter(q, requires_grad=False)"
            )
        return self

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise TypeError(
            "QuantTensor.data cannot be replaced: the bytes are in qdata and block_scale; use q.copy_(), or to merge "
            "adapters, as PEFT's merge would in high precision, hb.merge_lora_(model)"
        )

    def share_memory_(self) -> QuantTensor:
        """Move the inner tensors to shared memory, in place."""
        self.map(lambda t: t.share_memory_())
        return self

    def is_shared(self) -> bool:
        return self.qdata.is_shared()


def _dispatch(func, args, kwargs):
    handler = HANDLERS.get(func)
    result = handler(func, args, kwargs) if handler else NotImplemented
    return HANDLERS["fallback"](func, args, kwargs) if result is NotImplemented else result


def _dispatch_in_inference_mode(func, args, kwargs):
    """Take apart what autograd would have; a view of a tensor made outside has to be one made outside."""
    result = NotImplemented if func in HANDLERS else func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    from_outside = func.is_view and isinstance(args[0], Tensor) and not args[0].is_inference()
    with torch.inference_mode(not from_outside), torch.no_grad():
        return _dispatch(func, args, kwargs)


def rebuild(qdata, block_scale, amax, group_offsets, key: str, rest: tuple, shape: tuple[int, ...]) -> Tensor:
    """Return the QuantTensor that was pickled: plain tensors, a spec key and numbers, all of them checked."""
    dtype, scale_layout, borrowed, is_parameter, splits_columns = rest
    options = {"shape": shape, "dtype": dtype, "scale_layout": scale_layout}
    groups = {"group_offsets": group_offsets, "splits_columns": splits_columns}
    out = QuantTensor(Blocks(qdata, block_scale, amax), key, **options, **groups)
    out.header = out.header._replace(borrowed=borrowed)
    return torch.nn.Parameter(out, requires_grad=False) if is_parameter else out


_DEFAULT = NVFP4()


def describe(spec: Spec) -> str:
    """Return a spec in a few words, naming only what differs from the default."""
    if isinstance(spec, MXFP8):
        return f"mxfp8 {spec.element}"
    default, words = _DEFAULT, [f"nvfp4 {spec.block[0]}x{spec.block[1]} {spec.rounding}"]
    if spec.outer != default.outer:
        words.append(f"outer={spec.outer}")
    if spec.rotation is not None:
        words.append(f"rotation={spec.rotation.key}")
    if spec.scaling != default.scaling:
        words.append(spec.scaling.key.split(",")[0])
    words += [f"{n}={getattr(spec, n):g}" for n in ("fp4_max", "e4m3_max") if getattr(spec, n) != getattr(default, n)]
    return " ".join(words)


def check_spec(name: str, spec: object) -> None:
    """Raise TypeError unless `spec` is one; `name` is the argument's."""
    if not isinstance(spec, Spec):
        raise TypeError(f"{name}={spec!r}: give a spec such as NVFP4() or MXFP8()")


def check_value_dtype(name: str, dtype: object, remedy: str) -> None:
    """Raise TypeError unless `dtype` is one that values are quantized from and dequantized to."""
    if dtype not in VALUE_DTYPES:
        raise TypeError(f"{name}={dtype}: only bfloat16, float16 and float32 are supported; {remedy}")


def exact_amax(values: Tensor, amax: Tensor) -> Tensor:
    """Return decoded values [N, K] with the amax itself where three fp32 factors came to a neighbour of it.

    Quantized again, they find that amax and so the fp32 factor of their tensor.

    Args:
        values: fp32, of codes whose tensor had `amax`.
        amax: fp32 [], or [N] of rows.
    """
    greatest = amax if amax.dim() == 0 else amax.reshape(-1, 1)
    return torch.where((values.abs() - greatest).abs() <= greatest * ROUNDING, greatest.copysign(values), values)


Inner = tuple[Tensor, Tensor, Tensor | None]


def blocks_of(x: QuantTensor) -> Blocks:
    """Return `x.blocks`; of a compiled function's argument only this, since every read of a property is guarded."""
    amax = x.amax if x.amax is not None else torch.empty(0, device=x.device, dtype=torch.float32)
    return Blocks(x.qdata.view(torch.uint8), x.block_scale.view(torch.uint8), amax)


def _typed(blocks: Blocks, spec: Spec) -> Inner:
    """Return the blocks with one-byte tensors viewed as the dtypes that QuantTensor shows."""
    qdata_dtype, scale_dtype = (TORCH_DTYPES[part.name] for part in (spec.format.element, spec.format.scale))
    amax = blocks.amax if spec.format.has_amax else None
    for name, tensor, dtype in (("qdata", blocks.qdata, qdata_dtype), ("block_scale", blocks.block_scale, scale_dtype)):
        if tensor.dtype not in (torch.uint8, dtype):
            raise TypeError(f"{name}.dtype={tensor.dtype}: {describe(spec)} has {dtype} or its bytes as uint8")
    return blocks.qdata.view(qdata_dtype), blocks.block_scale.view(scale_dtype), amax


def _scale_shape(spec: Spec, shape: tuple[int, ...]) -> tuple[int, int]:
    rows, cols = matrix_shape(shape)
    return rows, round_up(cols, spec.alignment) // spec.block_length


def _check_inner(inner: Inner, header: Header, shape: tuple[int, ...], group_offsets: Tensor | None) -> None:
    """Raise unless the shapes satisfy the class's equations; reads no value, so it never synchronises a device."""
    spec, (qdata, block_scale, amax) = header.spec, inner
    rows, cols = _scale_shape(spec, shape)
    codes, shared = (rows, cols * spec.format.block_bytes), () if group_offsets is None else group_offsets.shape
    expected: list[tuple[str, Tensor, tuple[int, ...]]] = []
    if header.splits_columns:
        if group_offsets is None:
            raise ValueError("splits_columns=True: give group_offsets, where the groups end")
        count = group_offsets.shape[0]
        whole = layout.grouped_shapes((rows, shape[-1]), count, spec, header.scale_layout, contraction=True)
        codes, shared = whole.qdata, whole.amax
        expected.append(("block_scale", block_scale, whole.block_scale))
    elif header.scale_layout == LINEAR:
        expected.append(("block_scale", block_scale, (rows, cols)))
    elif group_offsets is None:  # else each group of a grouped operand pads its own region
        expected.append(("block_scale", block_scale, (layout.swizzled_numel(rows, cols),)))
    expected.insert(0, ("qdata", qdata, codes))
    if spec.format.has_amax:
        if amax is None:
            raise ValueError(f"amax=None: {describe(spec)} needs the fp32 amax that its scales are relative to")
        if amax.dtype != torch.float32:
            raise TypeError(f"amax.dtype={amax.dtype}: give float32")
        by_row = spec.has_row_amax and not header.splits_columns
        expected.append(("amax", amax, (rows,) if by_row else tuple(shared)))
    for name, tensor, size in expected:
        if tuple(tensor.shape) != size:
            raise ValueError(
                f"{name}.shape={tuple(tensor.shape)}: {describe(spec)} of logical shape {shape} in "
                f"{header.scale_layout} layout has {size}"
            )
        if tensor.device != qdata.device:
            raise ValueError(f"{name}.device={tensor.device}: qdata is on {qdata.device}; move one of them")
