"""Norms and activations with amax, and a whole LayerNormMLP beside compiled bf16.

Their outputs and amaxes are compared bit for bit with the reference on the CPU, a small ragged matrix and a slice.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import halfbyte as hb
from bench.measure import CPU, against_bf16, bandwidth, matrices, over, random_matrix, require_equal
from bench.registry import Bar, Case, Outcome, Setting, Shape, Unequal
from halfbyte import functional as HF
from halfbyte import ops
from halfbyte.arithmetic import Normed
from halfbyte.nn import LayerNormMLP, forward_shared
from halfbyte.spec import NVFP4, Hadamard

FOLLOWING = ops.Following(NVFP4(), NVFP4(rotation=Hadamard()))
RMS = ops.NormKind(1e-5, centered=False)
RAGGED, SLICE = (333, 1001), 64
MLP_SHAPE = (8192, 4096, 14336)
"""M tokens, K model width, N width of the activation."""


def norm(setting: Setting, shape: Shape, *, backward: bool = False) -> Outcome:
    """Check, then time RMSNorm with both amaxes, or its backward."""
    for rows, cols in (RAGGED, (SLICE, shape[1])):
        small, weight, dy = (random_matrix(s, CPU, i) for i, s in enumerate(((rows, cols), (1, cols), (rows, cols))))
        results = [_norm(t, w[0], d, None) for t, w, d in _on_both(setting, (small, weight, dy))]
        require_equal(results[1], results[0], f"norm of {rows}x{cols}")
    xs, dys = matrices(setting, shape), matrices(setting, shape)
    weight = torch.ones(shape[1], dtype=torch.bfloat16, device=setting.device)
    statistics = ops.norm(xs[0], weight, None, RMS, xs[0].dtype, backend=setting.backend)[1]

    def run(pair: tuple[Tensor, Tensor]) -> object:
        x, dy = pair
        if backward:
            return ops.norm_backward(dy, Normed(x, weight, statistics, False, False), backend=setting.backend)
        return ops.norm(x, weight, None, RMS, x.dtype, FOLLOWING, setting.backend)

    moved = (3 if backward else 2) * xs[0].numel() * xs[0].element_size()
    checked = ["output, statistics, amaxes, gradients: the bytes of the reference on the CPU"]
    return bandwidth(setting, over(list(zip(xs, dys, strict=True)), run), moved, checked)


def _norm(x: Tensor, weight: Tensor, dy: Tensor, backend: str | None) -> tuple[Tensor, ...]:
    y, statistics, amaxes = ops.norm(x, weight, None, RMS, x.dtype, FOLLOWING, backend)
    assert amaxes.row is not None and amaxes.col is not None, "both were asked for"
    gradients = ops.norm_backward(dy, Normed(x, weight, statistics, False, False), backend=backend)[:2]
    return y, statistics[1], amaxes.row, amaxes.col, *gradients


def add_norm(setting: Setting, shape: Shape, *, backward: bool = False) -> Outcome:
    """Check, then time RMSNorm of a sum that it takes and writes, with both amaxes, or its backward."""
    for rows, cols in (RAGGED, (SLICE, shape[1])):
        small = [random_matrix((rows, cols), CPU, i) for i in range(4)]
        weight = random_matrix((1, cols), CPU, 4)
        results = [_add_norm(tensors, None) for tensors in _on_both(setting, [*small, weight])]
        require_equal(results[1], results[0], f"norm of a sum of {rows}x{cols}")
    sets = list(zip(*(matrices(setting, shape) for _ in range(3)), strict=True))
    weight = torch.ones(shape[1], dtype=torch.bfloat16, device=setting.device)
    statistics = ops.norm(sets[0][0], weight, None, RMS, weight.dtype, backend=setting.backend)[1]

    def run(tensors: tuple[Tensor, Tensor, Tensor]) -> object:
        x, other, total = tensors
        if backward:
            return ops.norm_backward(x, Normed(total, weight, statistics, False, False), other, setting.backend)
        return ops.add_norm(x, other, (weight, None), RMS, x.dtype, FOLLOWING, setting.backend)

    moved = 4 * sets[0][0].numel() * sets[0][0].element_size()
    checked = ["sum, output, statistics, amaxes, gradients: the bytes of the reference on the CPU"]
    return bandwidth(setting, over(sets, run), moved, checked)


def _add_norm(tensors: list[Tensor], backend: str | None) -> tuple[Tensor, ...]:
    x, residual, dy, dtotal, weight = tensors
    parameters = weight[0], None
    y, total, statistics, amaxes = ops.add_norm(x, residual, parameters, RMS, x.dtype, FOLLOWING, backend)
    assert amaxes.row is not None and amaxes.col is not None, "both were asked for"
    gradients = ops.norm_backward(dy, Normed(total, weight[0], statistics, False, False), dtotal, backend)[:2]
    return y, total, statistics[1], amaxes.row, amaxes.col, *gradients


def activation(setting: Setting, shape: Shape, *, backward: bool = False) -> Outcome:
    """Check, then time SwiGLU with both amaxes, or its backward with those of both gradients."""
    for rows, cols in (RAGGED, (SLICE, shape[1])):
        small = [random_matrix((rows, cols), CPU, i) for i in range(3)]
        results = [_swiglu(dh, gate, up, None) for dh, gate, up in _on_both(setting, small)]
        require_equal(results[1], results[0], f"SwiGLU of {rows}x{cols}")
    sets = list(zip(*(matrices(setting, shape) for _ in range(3)), strict=True))

    def run(tensors: tuple[Tensor, Tensor, Tensor]) -> object:
        dh, gate, up = tensors
        if backward:
            return ops.activation_backward(dh, gate, up, "silu", FOLLOWING, setting.backend)
        return ops.activation(gate, up, "silu", FOLLOWING, setting.backend)

    moved = (5 if backward else 3) * sets[0][0].numel() * sets[0][0].element_size()
    checked = ["output, gradients, amaxes: the bytes of the reference on the CPU"]
    return bandwidth(setting, over(sets, run), moved, checked)


def _swiglu(dh: Tensor, gate: Tensor, up: Tensor, backend: str | None) -> tuple[Tensor | None, ...]:
    h, amaxes = ops.activation(gate, up, "silu", FOLLOWING, backend)
    gradients, more = ops.activation_backward(dh, gate, up, "silu", FOLLOWING, backend)
    return h, *amaxes, *gradients, *more[0], *more[1]


def _on_both(setting: Setting, tensors: tuple[Tensor, ...] | list[Tensor]) -> list[list[Tensor]]:
    return [[t.to(device) for t in tensors] for device in (CPU, setting.device)]


def mlp(setting: Setting, shape: Shape, *, recipe: str) -> Outcome:
    """Check, then time forward plus backward of a LayerNormMLP; bf16 is compiled."""
    M, K, N = shape
    module = LayerNormMLP(K, N, recipe=recipe, state=hb.RunState(5)).to(setting.device, torch.bfloat16)
    x, dy = (random_matrix((M, K), setting.device, i) for i in range(2))
    leaves = [x.requires_grad_(), *module.parameters()]
    first, down = [module.get_submodule(name) for name in module.names[:-1]], module.get_submodule(module.names[-1])
    weights = [module.get_parameter(f"{name}.weight") for name in module.names]

    def unfused() -> Tensor:
        y = HF.rms_norm(x, module.norm.weight)
        return down(HF.activation("swiglu", *forward_shared(y, first)))

    def plain(x: Tensor, scale: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = F.rms_norm(x, (K,), scale, 1e-5)
        return F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    def step(forward) -> tuple[Tensor, ...]:
        y = forward()
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    for name, a, b in zip(("y", "dx"), step(lambda: module(x)), step(unfused), strict=False):
        if not torch.equal(a, b):
            raise Unequal(f"{name}: fused and unfused differ")
    baseline = torch.compile(plain) if setting.on_gpu else plain
    bf16 = partial(step, lambda: baseline(x, module.norm.weight, *weights))
    ours = partial(step, lambda: module(x))
    checked = ["output and input gradient: the bytes of norm, linear layers and activation one after the other"]
    return against_bf16(setting, [ours], [bf16], 18.0 * M * N * K, checked, "x bf16")


CASES = (
    Case(
        name="fused/rmsnorm",
        about="RMSNorm with the amaxes of row and rotated column",
        shapes={(8192, 4096): None, (16384, 8192): None},
        small=(64, 512),
        run=norm,
    ),
    Case(
        name="fused/rmsnorm-backward",
        about="gradients of RMSNorm",
        shapes={(8192, 4096): None, (16384, 8192): None},
        small=(64, 512),
        run=partial(norm, backward=True),
    ),
    Case(
        name="fused/rmsnorm-residual",
        about="RMSNorm of x + residual, the sum and the amaxes of row and rotated column",
        shapes={(8192, 4096): None, (16384, 8192): None, (32768, 768): None},
        small=(64, 512),
        run=add_norm,
    ),
    Case(
        name="fused/rmsnorm-residual-backward",
        about="gradients of RMSNorm of a sum, that of the sum added",
        shapes={(8192, 4096): None, (16384, 8192): None, (32768, 768): None},
        small=(64, 512),
        run=partial(add_norm, backward=True),
    ),
    Case(
        name="fused/swiglu",
        about="SwiGLU with the amaxes of row and rotated column",
        shapes={(8192, 14336): None},
        small=(64, 512),
        run=activation,
    ),
    Case(
        name="fused/swiglu-backward",
        about="gradients of SwiGLU with the amaxes of both",
        shapes={(8192, 14336): None},
        small=(64, 512),
        run=partial(activation, backward=True),
    ),
    Case(
        name="fused/mlp-nvfp4",
        about="LayerNormMLP forward + backward, recipe nvfp4, beside compiled bf16",
        shapes={MLP_SHAPE: Bar(least=1.25, aim=1.15)},
        small=(64, 96, 128),
        run=partial(mlp, recipe="nvfp4"),
    ),
    *(
        Case(
            name=f"fused/mlp-{name}",
            about=f"LayerNormMLP forward + backward, recipe {name}",
            shapes={MLP_SHAPE: None},
            small=(64, 96, 128),
            run=partial(mlp, recipe=name),
        )
        for name in ("nvfp4_mxfp8_bwd", "mxfp8", "nvfp4_forward")
    ),
)
