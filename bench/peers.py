"""Other libraries' quantization, for comparison, where they can be imported: torchao, fouroversix, ModelOpt.

All of them compute the amax themselves. A peer that does not import, or does not run on this GPU, is left out.
fouroversix has Triton kernels for Blackwell alone; elsewhere its PyTorch backend runs, under a name that says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import E2M1, E4M3, NVFP4_BLOCK

Function = Callable[[Tensor], Any]


def quantizers(kind: str, x: Tensor) -> dict[str, Function]:
    """Return name -> function of one tensor for the peers that can do `kind` on `x`.

    Args:
        kind: "1x16", "16x16", "1x16-sr", "4over6", "mxfp8", "row_col-sr", or "" for none.
        x: what it is tried on.
    """
    found = {}
    fouroversix = "triton" if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 10 else "pytorch"
    builders = {
        "torchao": _torchao,
        "fouroversix" if fouroversix == "triton" else "fouroversix in PyTorch": partial(_fouroversix, fouroversix),
        "modelopt": _modelopt,
    }
    for name, build in builders.items():
        try:
            function = build(kind)
            if function is not None:
                function(x)
                found[name] = function
        except Exception as error:  # a peer's failure of any kind is not ours
            if not isinstance(error, ModuleNotFoundError):
                print(f"  {name} does not run {kind!r} here: {type(error).__name__}: {str(error)[:160]}")
    return found


def _torchao(kind: str) -> Function | None:
    if kind == "1x16":
        module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
        per_amax = 1 / (E4M3.max * E2M1.max)
        torch._dynamo.reset()
        return torch.compile(
            lambda x: module.nvfp4_quantize(x, NVFP4_BLOCK, x.abs().amax().float() * per_amax), dynamic=False
        )
    if kind == "mxfp8":
        module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        mode = module.ScaleCalculationMode.RCEIL
        torch._dynamo.reset()
        return torch.compile(lambda x: module.to_mx(x, torch.float8_e4m3fn, 32, mode), dynamic=False)
    return None


def _fouroversix(backend: str, kind: str) -> Function | None:
    options: dict[str, dict[str, Any]] = {
        "1x16": {"scale_rule": "static_6"},
        "16x16": {"scale_rule": "static_6", "block_scale_2d": True},
        "1x16-sr": {"scale_rule": "static_6", "round_style": "stochastic"},
        "4over6": {"scale_rule": "mae"},
        "row_col-sr": {"scale_rule": "static_6", "round_style": "stochastic", "rht": True, "transpose": True},
    }
    if kind not in options:
        return None
    module = importlib.import_module("fouroversix")
    config = module.QuantizationConfig(backend=backend, **options[kind])
    if kind != "row_col-sr":
        return lambda x: module.quantize_to_fp4(x, config)
    row = module.QuantizationConfig(backend=backend, **options["1x16-sr"])
    return lambda x: (module.quantize_to_fp4(x, row), module.quantize_to_fp4(x, config))


def _modelopt(kind: str) -> Function | None:
    if kind != "1x16":
        return None
    module = importlib.import_module("modelopt.torch.quantization.qtensor")
    return lambda x: module.NVFP4QTensor.quantize(x, NVFP4_BLOCK)
