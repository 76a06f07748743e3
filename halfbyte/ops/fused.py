"""Norms and activations on plain matrices, with the amaxes that quantizing their output needs (docs/fused.md).

Of the ops, row: "", "tensor" or "row" says which amax the row operand has; col_key: the key of a column operand with
one amax for the tensor, or "". An amax that is not wanted comes back empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.arithmetic import Normed
from halfbyte.ops.define import draw_of, implementation, op, spec_of
from halfbyte.ops.repeat import call_op
from halfbyte.rng import Draw
from halfbyte.spec import Spec


class NormKind(NamedTuple):
    """eps added to the variance; centered: LayerNorm, whose mean is subtracted, rather than RMSNorm."""

    eps: float
    centered: bool


class Amaxes(NamedTuple):
    """The amaxes of one tensor's two orientations; None is left to the quantize kernels."""

    row: Tensor | None = None
    col: Tensor | None = None


class Following(NamedTuple):
    """How a tensor will be quantized next: the specs of both orientations, and where fresh signs are drawn."""

    row: Spec | None = None
    col: Spec | None = None
    sign_draw: Draw | None = None

    @property
    def arguments(self) -> tuple:
        """What the ops take: row, col_key, sign_rng, sign_stream.

        Left to the quantize kernels, "" here: the amax of a row operand that is rotated, of a column operand with one
        amax per row of it, and of tiles that both orientations share.
        """
        row = col = ""
        if self.row is not None and self.row.rotation is None:
            row = self.row.outer or ""
        fresh = False
        if self.col is not None and self.col.has_tensor_amax and not (self.row == self.col and self.col.is_tile):
            col, fresh = self.col.key, self.col.needs_sign_rng
        place = (self.sign_draw.base, self.sign_draw.stream) if fresh and self.sign_draw is not None else (None, 0)
        return row, col, *place

    def known(self, row: Tensor, col: Tensor) -> Amaxes:
        """Return what an op computed, None where it computed nothing."""
        wants_row, wants_col = self.arguments[:2]
        return Amaxes(row if wants_row else None, col if wants_col else None)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: NormKind,
    dtype: torch.dtype,
    following: Following = Following(),  # noqa: B008  a frozen value
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Amaxes]:
    """Return ((x - mean) * rstd) * weight + bias, (mean, rstd) for the backward, and the amaxes of the result.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        weight, bias: [cols]; bias may be None.
        kind: RMSNorm or LayerNorm.
        dtype: of the result.
        following: how the result will be quantized.
    """
    y, mean, rstd, *amaxes = call_op(
        torch.ops.halfbyte.norm, x, weight, bias, *kind, dtype, *following.arguments, backend or ""
    )
    return y, (mean, rstd), following.known(*amaxes)


def add_norm(
    x: Tensor,
    residual: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    kind: NormKind,
    dtype: torch.dtype,
    following: Following = Following(),  # noqa: B008
    backend: str | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Amaxes]:
    """Return the norm of x + residual, that sum, (mean, rstd) for the backward, and the amaxes of the norm.

    Args:
        x, residual: bf16, fp16 or fp32 [rows, cols]; the sum has the dtype and the bits that torch gives it.
        parameters: weight and bias [cols]; bias may be None.
        kind, dtype, following: as for `norm`.
    """
    y, total, mean, rstd, *amaxes = call_op(
        torch.ops.halfbyte.add_norm, x, residual, *parameters, *kind, dtype, *following.arguments, backend or ""
    )
    return y, total, (mean, rstd), following.known(*amaxes)


def norm_backward(
    dy: Tensor, normed: Normed, dtotal: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx of x's dtype and the gradients of weight and bias, fp32 [cols]; bias's is empty without one.

    Args:
        dy: of the norm.
        normed: statistics as `norm` or `add_norm` returned them; of `add_norm` x is the sum.
        dtotal: of that sum; it is added once the norm's part is rounded, as autograd does. None: of `norm`.
    """
    x, weight, statistics, *kind = normed
    if dtotal is None:
        return call_op(torch.ops.halfbyte.norm_backward, dy, x, weight, *statistics, *kind, backend or "")
    return call_op(torch.ops.halfbyte.add_norm_backward, dy, dtotal, x, weight, *statistics, *kind, backend or "")


def activation(
    x: Tensor,
    up: Tensor | None,
    function: str,
    following: Following = Following(),  # noqa: B008
    backend: str | None = None,
) -> tuple[Tensor, Amaxes]:
    """Return h = f(x), or f(x) * up, of x's dtype, and its amaxes.

    Args:
        x: bf16, fp16 or fp32 [rows, cols], the gate if there is an `up`.
        up: as x, or None.
        function: one of halfbyte.arithmetic.FUNCTIONS.
        following: how h will be quantized.
    """
    h, *amaxes = call_op(torch.ops.halfbyte.activation, x, up, function, *following.arguments, backend or "")
    return h, following.known(*amaxes)


def activation_backward(
    dh: Tensor,
    x: Tensor,
    up: Tensor | None,
    function: str,
    following: Following = Following(),  # noqa: B008
    backend: str | None = None,
) -> tuple[tuple[Tensor, Tensor | None], tuple[Amaxes, Amaxes]]:
    """Return the gradients of x and `up`, and the amaxes of each."""
    dx, dup, *amaxes = call_op(
        torch.ops.halfbyte.activation_backward, dh, x, up, function, *following.arguments, backend or ""
    )
    both = following.known(*amaxes[:2]), following.known(*amaxes[2:])
    return (dx, None if up is None else dup), both


_WANTED = "str row, str col_key, Tensor? sign_rng, int sign_stream, str backend"


def _wanted(row, col_key, sign_rng, sign_stream) -> tuple:
    return row, spec_of(col_key), draw_of(sign_rng, sign_stream)


def _norm(x, weight, bias, eps, centered, dtype, row, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, ...]:
    wanted = _wanted(row, col_key, sign_rng, sign_stream)
    module = implementation(x.device, backend)
    y, _, statistics, amaxes = module.norm_with_amaxes(x, (weight, bias), (eps, centered, dtype), *wanted)
    return y, *statistics, *amaxes


def _add_norm(
    x, residual, weight, bias, eps, centered, dtype, row, col_key, sign_rng, sign_stream, backend
) -> tuple[Tensor, ...]:
    wanted = _wanted(row, col_key, sign_rng, sign_stream)
    module = implementation(x.device, backend)
    arguments = x, (weight, bias), (eps, centered, dtype), *wanted, residual
    y, total, statistics, amaxes = module.norm_with_amaxes(*arguments)
    return y, total, *statistics, *amaxes


def _norm_backward(dy, x, weight, mean, rstd, centered, has_bias, backend) -> tuple[Tensor, ...]:
    return implementation(x.device, backend).norm_backward(dy, Normed(x, weight, (mean, rstd), centered, has_bias))


def _add_norm_backward(dy, dtotal, total, weight, mean, rstd, centered, has_bias, backend) -> tuple[Tensor, ...]:
    normed = Normed(total, weight, (mean, rstd), centered, has_bias)
    return implementation(total.device, backend).norm_backward(dy, normed, dtotal)


def _activation(x, up, function, row, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, ...]:
    wanted = _wanted(row, col_key, sign_rng, sign_stream)
    h, amaxes = implementation(x.device, backend).activation_with_amaxes(x, up, function, *wanted)
    return h, *amaxes


def _activation_backward(dh, x, up, function, row, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, ...]:
    wanted = _wanted(row, col_key, sign_rng, sign_stream)
    module = implementation(x.device, backend)
    (dx, dup), amaxes = module.activation_backward_with_amaxes((dh, x, up), function, *wanted)
    if dup is None:
        return dx, x.new_empty(0), *amaxes[0], *_no_amaxes(x)
    return dx, dup, *amaxes[0], *amaxes[1]


def _no_amaxes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)


def _amaxes_like(x, row, col_key):
    shapes = {"": (0,), "tensor": (), "row": (x.shape[0],)}[row], () if col_key else (0,)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _contiguous_like(x, dtype=None):
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _norm_fake(x, weight, bias, eps, centered, dtype, row, col_key, *rest):
    mean, rstd = (x.new_empty(n, dtype=torch.float32) for n in (x.shape[0] if centered else 0, x.shape[0]))
    return _contiguous_like(x, dtype), mean, rstd, *_amaxes_like(x, row, col_key)


def _norm_backward_fake(dy, x, weight, mean, rstd, centered, has_bias, backend):
    sums = (x.new_empty(n, dtype=torch.float32) for n in (x.shape[1], x.shape[1] if has_bias else 0))
    return _contiguous_like(x), *sums


def _add_norm_fake(x, residual, weight, bias, *rest):
    y, *others = _norm_fake(x, weight, bias, *rest)
    return y, _contiguous_like(x, torch.promote_types(x.dtype, residual.dtype)), *others


def _add_norm_backward_fake(dy, dtotal, total, *rest):
    return _norm_backward_fake(dy, total, *rest)


def _activation_fake(x, up, function, row, col_key, *rest):
    return _contiguous_like(x), *_amaxes_like(x, row, col_key)


def _activation_backward_fake(dh, x, up, function, row, col_key, *rest):
    amaxes = _amaxes_like(x, row, col_key)
    if up is None:
        return _contiguous_like(x), x.new_empty(0), *amaxes, *_no_amaxes(x)
    return _contiguous_like(x), _contiguous_like(up), *amaxes, *_amaxes_like(x, row, col_key)


op(
    f"norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centered, ScalarType dtype, {_WANTED}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm,
    _norm_fake,
)
op(
    "norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool centered, bool has_bias, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)
op(
    "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool centered, ScalarType dtype, "
    f"{_WANTED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _add_norm,
    _add_norm_fake,
)
op(
    "add_norm_backward(Tensor dy, Tensor dtotal, Tensor total, Tensor weight, Tensor mean, Tensor rstd, bool centered, "
    "bool has_bias, str backend) -> (Tensor, Tensor, Tensor)",
    _add_norm_backward,
    _add_norm_backward_fake,
)
op(
    f"activation(Tensor x, Tensor? up, str function, {_WANTED}) -> (Tensor, Tensor, Tensor)",
    _activation,
    _activation_fake,
)
op(
    f"activation_backward(Tensor dh, Tensor x, Tensor? up, str function, {_WANTED}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _activation_backward,
    _activation_backward_fake,
)
