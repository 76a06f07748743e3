"""How other libraries quantize: torchao, fouroversix, ModelOpt, Quartet II, and why TransformerEngine is left out.

All of them compute the amax themselves. Each yields its ways from the fastest on; which of them run depends on the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bench.measure import Left
from bench.peers import Library, Way
from halfbyte import layout
from halfbyte.formats import E2M1, E4M3, E8M0_BIAS, MXFP8_BLOCK, NVFP4_BLOCK

BLACKWELL = 10


def torchao(kind: str, x: Tensor) -> Iterator[Way]:
    """Its functions through torch.compile, as its documentation says; MXFP8 by its Triton kernel too."""
    if kind == "1x16":
        module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")

        def nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            per_tensor = x.abs().amax().float() / (E4M3.max * E2M1.max)
            block_scale, packed = module.nvfp4_quantize(x, NVFP4_BLOCK, per_tensor)
            return packed, block_scale, per_tensor

        yield Way(name="compiled", run=_compiled(nvfp4, x), values=lambda q: [_decode(*q)])
    if kind == "mxfp8":
        module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        mode = module.ScaleCalculationMode.RCEIL
        compiled = _compiled(lambda x: module.to_mx(x, torch.float8_e4m3fn, MXFP8_BLOCK, mode), x)
        yield Way(name="compiled", run=compiled, values=lambda q: [_decode_mx(q[1], q[0])])
        kernels = importlib.import_module("torchao.prototype.mx_formats.kernels")
        yield Way(
            name="Triton",
            run=lambda x: kernels.triton_to_mxfp8_dim0(x, MXFP8_BLOCK, "rceil"),
            values=lambda q: [_decode_mx(*q)],
        )


FOUROVERSIX: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "1x16": ({"scale_rule": "static_6"},),
        "16x16": ({"scale_rule": "static_6", "block_scale_2d": True},),
        "1x16-sr": ({"scale_rule": "static_6", "round_style": "stochastic"},),
        "4over6": ({"scale_rule": "mae"},),
        "row_col-sr": (
            {"scale_rule": "static_6", "round_style": "stochastic"},
            {"scale_rule": "static_6", "round_style": "stochastic", "rht": True, "transpose": True},
        ),
    }
)


def fouroversix(kind: str, x: Tensor) -> Iterator[Way]:
    """Its CUDA kernels (Blackwell), its Triton kernels (every CUDA GPU), and plain PyTorch where neither may run."""
    if kind not in FOUROVERSIX:
        return
    module = importlib.import_module("fouroversix")

    def way(backend: str, name: str) -> Way:
        configs = [module.QuantizationConfig(backend=backend, **options) for options in FOUROVERSIX[kind]]
        return Way(
            name=name,
            run=lambda x: [module.quantize_to_fp4(x, config) for config in configs],
            values=lambda qs: [module.dequantize(q, torch.float32) for q in qs],
        )

    if not x.is_cuda:
        yield way("pytorch", "PyTorch")
        return
    if torch.cuda.get_device_capability(x.device)[0] >= BLACKWELL:
        yield way("cuda", "CUDA")
    yield way("triton", "Triton")


def modelopt(kind: str, x: Tensor) -> Iterator[Way]:
    """Its NVFP4 tensor: PyTorch operations, as they are and compiled."""
    if kind != "1x16":
        return
    tensor = importlib.import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, block_scale, per_tensor = tensor.quantize(x, NVFP4_BLOCK)
        return q._quantized_data, block_scale, per_tensor

    tensor.get_e2m1_bounds(x.device)  # its cache of constants, which a compiler would look for in every call
    yield Way(name="compiled", run=_compiled(parts, x), values=lambda q: [_decode(*q)])
    yield Way(name="PyTorch", run=parts, values=lambda q: [_decode(*q)])


def modelopt_values(kind: str, x: Tensor) -> Iterator[Way]:
    """Its Triton kernel for simulated quantization, which stores values in bf16 and no codes."""
    if kind != "1x16":
        return
    if not x.is_cuda:
        raise Left("its Triton kernel needs a GPU")
    module = importlib.import_module("modelopt.torch.kernels.quantization.gemm")
    yield Way(name="Triton", run=lambda x: module.fp4_fake_quant_block(x, x.abs().amax()), values=lambda y: [y.float()])


def quartet2(kind: str, x: Tensor) -> Iterator[Way]:
    """The CUDA kernels of Quartet II: nearest, and two candidates by squared error."""
    modes = {"1x16": "RNE", "4over6": "FOUR_SIX"}
    if kind not in modes:
        return
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] < BLACKWELL:
        raise Left(
            "its kernels are for sm_100 and sm_120: they use packed fp32 arithmetic (__fmul2_rn, __ffma2_rn) that CUDA "
            "defines for no GPU before, so that they do not compile for this one"
        )
    module = importlib.import_module("quartet2.quant")
    mode = module.NVFP4QuantMode[modes[kind]]

    def values(q: Any) -> list[Tensor]:
        rows, cols = q.fp4.shape
        blocks = layout.unswizzle(q.micro_scales.flatten().view(torch.uint8), rows, 2 * cols // NVFP4_BLOCK)
        return [_decode(q.fp4, blocks.view(torch.float8_e4m3fn), q.tensor_scale)]

    yield Way(name="CUDA", run=lambda x: module.quant_fp4(x, scale_override=1.0, mode=mode), values=values)


def transformer_engine(kind: str, x: Tensor) -> Iterator[Way]:
    """Left out: its kernels for both formats are for sm_100 and later, where this benchmark has not run."""
    raise Left("its NVFP4 and MXFP8 kernels are for sm_100 and later; elsewhere it refuses both recipes")
    yield  # a generator, as the others


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "torchao": torchao,
        "fouroversix": fouroversix,
        "ModelOpt": modelopt,
        "ModelOpt, values alone": modelopt_values,
        "Quartet II": quartet2,
        "TransformerEngine": transformer_engine,
    }
)


def _compiled(function: Callable[[Tensor], Any], x: Tensor) -> Callable[[Tensor], Any]:
    """Return the compiled function; on a CPU, where compiling takes longer than it saves, the function."""
    if not x.is_cuda:
        return function
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def _decode(packed: Tensor, block_scale: Tensor, per_tensor: Tensor) -> Tensor:
    """Return the fp32 values of codes (two a byte, the even column in the low nibble), E4M3 scales and a factor."""
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).long()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=packed.device)
    values = torch.cat([magnitudes, -magnitudes])[codes]
    scale = block_scale.float().reshape(len(values), -1) * per_tensor.float()
    return (values.unflatten(-1, (-1, NVFP4_BLOCK)) * scale.unsqueeze(-1)).flatten(-2)


def _decode_mx(elements: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 values of E4M3 elements with E8M0 scales."""
    exponents = scale.view(torch.uint8).float().reshape(len(elements), -1) - E8M0_BIAS
    return (elements.float().unflatten(-1, (-1, MXFP8_BLOCK)) * exponents.exp2().unsqueeze(-1)).flatten(-2)
