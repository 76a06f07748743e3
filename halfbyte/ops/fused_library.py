"""The custom ops of norms and activations: their output and, from the same pass, the amaxes it is quantized with.

row: "", "tensor" or "row": which amax the row operand has. col_key: the key of a column operand with one amax for the
tensor, or "". An amax that is not wanted comes back empty.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.ops.backends import REFERENCE, choose
from halfbyte.ops.library import _LIBRARY, _draw
from halfbyte.ops.repeat import define
from halfbyte.spec import NVFP4, parse

_WANTED = "str row, str col_key, Tensor? sign_rng, int sign_stream, str backend"
_SCHEMAS = (
    f"norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centered, ScalarType dtype, {_WANTED}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool centered, bool has_bias, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    "split_mean(Tensor x, str backend) -> (Tensor, Tensor)",
    f"activation(Tensor x, Tensor? up, str function, {_WANTED}) -> (Tensor, Tensor, Tensor)",
    f"activation_backward(Tensor dh, Tensor x, Tensor? up, str function, {_WANTED}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _backend(device: torch.device, backend: str) -> ModuleType:
    if choose(device, backend or None) == REFERENCE:
        return reference
    from halfbyte.kernels import fused as kernels  # imports Triton, so only where it runs

    return kernels


def _wanted(row, col_key, sign_rng, sign_stream) -> tuple:
    spec = parse(col_key) if col_key else None
    assert spec is None or isinstance(spec, NVFP4), "only NVFP4 has an amax"
    return row, spec, _draw(sign_rng, sign_stream)


def norm(x, weight, bias, eps, centered, dtype, row, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, ...]:
    wanted = _wanted(row, col_key, sign_rng, sign_stream)
    module = _backend(x.device, backend)
    y, statistics, amaxes = module.norm_with_amaxes(x, (weight, bias), (eps, centered, dtype), *wanted)
    return y, *statistics, *amaxes


def norm_backward(dy, x, weight, mean, rstd, centered, has_bias, backend) -> tuple[Tensor, ...]:
    return _backend(x.device, backend).norm_backward(dy, x, weight, (mean, rstd), centered, has_bias)


def split_mean(x, backend) -> tuple[Tensor, Tensor]:
    residual, mean = reference.split_mean(x)
    return residual, mean


def activation(x, up, function, row, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, ...]:
    wanted = _wanted(row, col_key, sign_rng, sign_stream)
    h, amaxes = _backend(x.device, backend).activation_with_amaxes(x, up, function, *wanted)
    return h, *amaxes


def activation_backward(dh, x, up, function, row, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, ...]:
    wanted = _wanted(row, col_key, sign_rng, sign_stream)
    module = _backend(x.device, backend)
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


def _fake_norm(x, weight, bias, eps, centered, dtype, row, col_key, *rest):
    mean, rstd = (x.new_empty(n, dtype=torch.float32) for n in (x.shape[0] if centered else 0, x.shape[0]))
    return _contiguous_like(x, dtype), mean, rstd, *_amaxes_like(x, row, col_key)


def _fake_norm_backward(dy, x, weight, mean, rstd, centered, has_bias, backend):
    sums = (x.new_empty(n, dtype=torch.float32) for n in (x.shape[1], x.shape[1] if has_bias else 0))
    return _contiguous_like(x), *sums


def _fake_activation(x, up, function, row, col_key, *rest):
    return _contiguous_like(x), *_amaxes_like(x, row, col_key)


def _fake_activation_backward(dh, x, up, function, row, col_key, *rest):
    amaxes = _amaxes_like(x, row, col_key)
    if up is None:
        return _contiguous_like(x), x.new_empty(0), *amaxes, *_no_amaxes(x)
    return _contiguous_like(x), _contiguous_like(up), *amaxes, *_amaxes_like(x, row, col_key)


def _fake_split_mean(x, backend):
    return x.new_empty(x.shape, dtype=torch.float32), x.new_empty(x.shape[1], dtype=torch.float32)


_FAKES = {
    norm: _fake_norm,
    norm_backward: _fake_norm_backward,
    split_mean: _fake_split_mean,
    activation: _fake_activation,
    activation_backward: _fake_activation_backward,
}

for _schema, (_function, _fake) in zip(_SCHEMAS, _FAKES.items(), strict=True):
    define(_LIBRARY, _schema, _function, _fake)
