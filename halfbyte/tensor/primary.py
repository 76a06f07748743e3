"""PrimaryWeight: a model's weight that exists only in NVFP4 and is trained through fp32 masters elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.types import Device

from halfbyte import ops
from halfbyte.layout import LINEAR, SWIZZLED_32_4_4, Blocks, Operand, ceil_div, check_scale_layout, swizzled_numel
from halfbyte.spec import NVFP4, Eden
from halfbyte.tensor.quant_tensor import QuantTensor, check_value_dtype, describe, rebuild

_requires_grad: Any = torch._C.TensorBase.requires_grad
_grad: Any = torch._C.TensorBase.grad


class PrimaryWeight(QuantTensor):
    """A QuantTensor [N, K] in 16x16 tiles, or of experts [E, N, K], that is a parameter: it may require a gradient.

    Its gradient is a plain tensor [N, K] of the nominal dtype in `.grad`, that of the values it stands for. No
    optimizer can step it; `hb.distributed.cast_master_weights_to_nvfp4` writes new bytes into it in place.

    turned: the other orientation, filled by `hb.distributed.post_all_gather_processing`; None until then, and
        `hb.linear` transposes in every forward.
    turn: fills `turned`, whose memory is released with the weight's and filled again when a backward reads it. None: it
        is filled as soon as the codes are complete.
    is_stale: whether codes were cast since `turned` was filled.
    dgrad: what `hb.linear` multiplies by in dgrad where that cannot be made of these codes: an operand of w.T, or its
        values; `turn` fills it. None: the codes, transposed or decoded.
    rounded: what values were rounded to before they were quantized, where that is not the nominal dtype: forwards under
        autocast compute in it. None: the nominal dtype.
    shared_amax: the amax that other weights have too, so that this one is not quantized alone; None if it is its own.
    without_masters: whether these bytes were loaded, or made on purpose: no masters were lost, and new ones may begin
        with their values.
    before_use: called by `hb.linear` before it reads the bytes: it waits for a gather that may still run.
    operands: what `hb.linear` made of it last and what it was made of; no other code reads it.
    codes_suffice: whether forward and backward read the codes alone, which somebody fills before each: compiled code
        takes them as they are, and does without `turned`, `turn` and `operands`.
    on_no_grad: called where somebody reads `.grad` and it is None: who takes gradients as they come may say so.
    """

    turned: Blocks | None = None
    turn: Callable[[], None] | None = None
    is_stale: bool = False
    dgrad: Operand | Tensor | None = None
    rounded: torch.dtype | None = None
    shared_amax: Tensor | None = None
    without_masters: bool = False
    before_use: Callable[[], None] | None = None
    codes_suffice: bool = False
    on_no_grad: Callable[[], None] | None = None
    operands: Any = None

    @staticmethod
    def empty(
        shape: tuple[int, ...],
        spec: NVFP4 | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: Device = None,
        scale_layout: str = LINEAR,
        qdata: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> PrimaryWeight:
        """Return a weight of zeros.

        Args:
            shape: N and K, or E, N and K of experts, each of which is a matrix with tiles and an amax of its own.
            spec: NVFP4 in 16x16 tiles with rounding to nearest; NVFP4(block=(16, 16)) by default.
            dtype: nominal dtype, that masters are rounded to before they are quantized.
            device: where it is.
            scale_layout: "linear" or "swizzled_32_4_4".
            qdata: uint8 [N, ceil(K/16) * 8], [E * N, …] of experts, to hold the codes, such as a part of a buffer that
                is gathered; at an address that is a multiple of 8.
            amax: fp32 [] that several weights share; their tensor scale is then one.

        Raises:
            ValueError: the spec has no cast from masters, the shape is not that of a matrix or of experts, these share
                an amax or have swizzled scales, or kernels cannot read words from qdata.
        """
        spec = NVFP4(block=(16, 16)) if spec is None else spec
        check_primary_spec(spec)
        is_shape = isinstance(shape, tuple | list) and len(shape) in (2, 3)
        if not is_shape or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"shape={shape}: give N and K, its rows and columns, or E, N and K of experts")
        check_scale_layout(scale_layout)
        check_value_dtype("dtype", dtype, "name the dtype of the layer")
        is_grouped = len(shape) == 3
        if is_grouped and (scale_layout != LINEAR or amax is not None):
            what = f"scale_layout={scale_layout!r}" if scale_layout != LINEAR else "amax"
            raise ValueError(f"{what}: experts have linear scales and an amax each; leave it out")
        rows, blocks = math.prod(shape[:-1]), ceil_div(shape[-1], spec.block_length)
        size = (rows, blocks) if scale_layout == LINEAR else (swizzled_numel(rows, blocks),)
        if qdata is None:
            qdata = torch.zeros(rows, blocks * 8, dtype=torch.uint8, device=device)
        if qdata.data_ptr() % 8:
            raise ValueError("qdata starts at an address that is no multiple of 8: pad the buffer before it")
        scale = torch.zeros(size, dtype=torch.uint8, device=qdata.device)
        own = torch.zeros(shape[:-2], dtype=torch.float32, device=qdata.device) if amax is None else amax
        options: dict[str, Any] = {"shape": tuple(shape), "dtype": dtype, "scale_layout": scale_layout}
        if is_grouped:
            options["group_offsets"] = torch.arange(1, shape[0] + 1, dtype=torch.int32, device=qdata.device) * shape[1]
        weight = PrimaryWeight(Blocks(qdata, scale, own), spec, **options)
        weight.shared_amax = amax
        return weight

    @property
    def rowwise_data(self) -> Tensor:
        """The codes as one run of bytes, as Megatron-Core asks for them."""
        return self.qdata.view(-1)

    @property
    def requires_grad(self) -> bool:
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, a plain tensor; None where an optimizer took it."""
        grad = _grad.__get__(self)
        if grad is None and self.on_no_grad is not None:
            self.on_no_grad()
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)

    def requires_grad_(self, requires_grad: bool = True) -> PrimaryWeight:
        """Say whether backward computes this weight's gradient."""
        torch._C.TensorBase.requires_grad_(self, requires_grad)
        return self

    @staticmethod
    def __tensor_unflatten__(inner, header, outer_size, outer_stride):
        blocks = inner["qdata"], inner["block_scale"], inner["amax"]
        return PrimaryWeight._wrap(blocks, header, outer_size, inner.get("group_offsets"), outer_stride)

    def allocate_turned(self) -> Blocks:
        """Return the memory of the other orientation, LINEAR [K, N], allocated once, with this weight's amax."""
        if self.turned is None:
            rows, cols = self.shape
            blocks, device = ceil_div(rows, self.spec.block_length), self.device
            qdata = torch.zeros(cols, blocks * 8, dtype=torch.uint8, device=device)
            scale = torch.zeros(cols, blocks, dtype=torch.uint8, device=device)
            self.turned = Blocks(qdata, scale, self.blocks.amax)
        elif self.turned.amax is not self.blocks.amax:
            self.turned = self.turned._replace(amax=self.blocks.amax)
        return self.turned

    def as_parameter(self) -> PrimaryWeight:
        """Return this weight, its bytes shared, as a torch.nn.Parameter that requires a gradient."""
        parameter = cast(PrimaryWeight, torch.nn.Parameter(self))
        parameter.turned, parameter.rounded, parameter.shared_amax = self.turned, self.rounded, self.shared_amax
        parameter.turn, parameter.dgrad = self.turn, self.dgrad
        return parameter

    def after_alias(self, source: QuantTensor) -> None:
        if isinstance(source, PrimaryWeight):
            self.turned, self.is_stale, self.shared_amax = source.turned, source.is_stale, source.shared_amax
            self.rounded, self.turn, self.dgrad = source.rounded, source.turn, source.dgrad
            self.codes_suffice = source.codes_suffice

    def before_values(self, values: Tensor) -> Tensor:
        """Round values as masters are; refuse them where their amax would rescale other weights."""
        if self.shared_amax is not None and self.shared_amax.data_ptr() == self.blocks.amax.data_ptr():
            raise ValueError(
                "copy_: this weight shares its amax with others, whose values would change with it: load such values "
                "into a model built anew, or write all of them by hb.distributed.cast_master_weights_to_nvfp4; codes, "
                "as in a state dict of NVFP4 weights, can be copied"
            )
        return values.to(self.dtype)

    def after_write(self) -> None:
        """Turn the new bytes: the backward would read those of before."""
        if self.turned is not None:
            scale = self.linear_scale().view(torch.uint8)
            rows, cols = self.shape
            turned = ops.transpose(self.blocks.qdata, scale, rows, cols)
            for to, from_ in zip(self.turned, turned, strict=False):
                to.copy_(from_)
            self.is_stale = False

    def __deepcopy__(self, memo):
        if self.before_use is not None:
            self.before_use()  # codes of this step with scales of the last would be copied
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        _, state = super().__reduce_ex__(protocol)
        return rebuild_primary, (state, self.requires_grad)

    @property
    def swizzled(self) -> bool:
        return self.scale_layout == SWIZZLED_32_4_4


def rebuild_primary(state: tuple, requires_grad: bool) -> PrimaryWeight:
    """Return the PrimaryWeight that was pickled; state: what `rebuild` takes."""
    qdata, block_scale, amax, group_offsets, key, rest, shape = state
    as_tensor = (*rest[:3], False, *rest[4:])
    quant = cast(QuantTensor, rebuild(qdata, block_scale, amax, group_offsets, key, as_tensor, shape))
    check_primary_spec(quant.spec)
    options = {"shape": shape, "dtype": quant.dtype, "scale_layout": quant.scale_layout}
    out = PrimaryWeight(quant.blocks, quant.spec, **options, group_offsets=quant.group_offsets)
    return out.as_parameter().requires_grad_(requires_grad) if rest[3] else out


def check_primary_spec(spec: object) -> None:
    """Raise ValueError unless weights of `spec` can be cast from shards of their masters."""
    if not isinstance(spec, NVFP4) or not spec.is_tile:
        what = describe(spec) if isinstance(spec, NVFP4) else repr(spec)
        raise ValueError(
            f"spec={what}: a primary weight serves forward and backward, which needs 16x16 tiles; use "
            "hb.NVFP4(block=(16, 16))"
        )
    if spec.rounding != "nearest" or isinstance(spec.scaling, Eden):
        raise ValueError(f"spec={describe(spec)}: masters are rounded to nearest; use rounding='nearest', no Eden")
