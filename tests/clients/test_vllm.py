"""What vLLM makes of an export: its loaders' rule for fused siblings, and its own CPU functions where its file is.

vLLM cannot be imported without a build for a GPU, and its wheel is 336 MB, so that `make test-integrations` does not
fetch it. Put `vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py` of 0.33.0 under .venv/peers/vllm,
and its functions run here, alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from export_decoder import decoded, stored
from export_models import TOKENS, llama, trained

import halfbyte as hb
from halfbyte.verify.alone import load_alone

FILE = "vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py"
NAMES = (
    *("break_fp4_bytes", "convert_swizzled_to_linear", "dequantize_to_dtype", "get_reciprocal", "cast_to_fp4"),
    *("ref_nvfp4_quant", "ref_nvfp4_quant_dequant", "run_nvfp4_emulations"),
    *("kE2M1ToFloat_handle", "FLOAT4_E2M1_MAX_RECIPROCAL"),
)
LAYER, SIBLINGS = "model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj")
FORMS = ("compressed-tensors", "modelopt")


def emulation():
    """Return vLLM's functions, with a CPU for its platform."""
    path = Path(sys.prefix) / "peers" / "vllm" / FILE
    if not path.is_file():
        pytest.skip(f"{path} is not there: unzip it from the wheel of vllm 0.33.0")
    platform = SimpleNamespace(is_cuda_alike=lambda: False)
    given = {"torch": torch, "SimpleNamespace": SimpleNamespace, "FLOAT4_E2M1_MAX": 6.0, "current_platform": platform}
    return SimpleNamespace(**load_alone(path, NAMES, given))


def fused(folder, form, names=SIBLINGS):
    """Return codes, scales and the fp32 factors of weight and input as vLLM's loaders leave them for one fused layer.

    compressed_tensors_w4a4_nvfp4.py takes the greatest of the stored divisors, modelopt.py of the stored factors.
    """
    tensors = stored(folder)
    words = ("weight_packed", "weight_global_scale", "input_global_scale")
    codes, weight, given = words if form == "compressed-tensors" else ("weight", "weight_scale_2", "input_scale")
    parts = [{k.rpartition(".")[2]: t for k, t in tensors.items() if k.startswith(f"{LAYER}.{n}.")} for n in names]
    factor, divisor = (torch.stack([part[name].reshape(()) for part in parts]).max() for name in (weight, given))
    if form == "compressed-tensors":
        factor = 1 / factor
    else:
        divisor = 1 / divisor
    return torch.cat([p[codes] for p in parts]), torch.cat([p["weight_scale"] for p in parts]), factor, divisor


@pytest.fixture(scope="module")
def model():
    return trained(llama(), "nvfp4", steps=2)


@pytest.mark.parametrize("form", FORMS)
def test_fused_siblings_keep_their_values(model, tmp_path, form):
    hb.export.save(model, tmp_path / "out", format=form, activations="static", batches=[TOKENS])
    codes, scale, factor, _ = fused(tmp_path / "out", form)
    quants = [hb.export.load(tmp_path / "out").quantized[f"{LAYER}.{name}.weight"] for name in SIBLINGS]
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
    values = table[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    values = values * scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=1) * factor
    torch.testing.assert_close(values, torch.cat([q.dequantize(torch.float32) for q in quants]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_siblings_with_amaxes_of_their_own_would_decode_wrong(form):
    """Why an export gives them one: of amaxes 1 and 4 one form takes the smallest for all, the other the largest."""
    amaxes = torch.tensor([1.0, 4.0])
    divisors, factors = 2688 / amaxes, amaxes / 2688
    taken = 1 / divisors.max() if form == "compressed-tensors" else factors.max()
    assert (taken / factors).tolist() == ([1.0, 0.25] if form == "compressed-tensors" else [4.0, 1.0])


@pytest.mark.parametrize("form", FORMS)
def test_vllms_own_functions_compute_our_layer(model, tmp_path, form):
    theirs = emulation()
    hb.export.save(model, tmp_path / "out", format=form, activations="static", batches=[TOKENS])
    codes, scale, factor, divisor = fused(tmp_path / "out", form)
    tensors, checkpoint = stored(tmp_path / "out"), hb.export.load(tmp_path / "out")
    values = theirs.dequantize_to_dtype(codes, scale, factor, torch.float32, swizzle=False)
    if form == "compressed-tensors":
        by_numpy = torch.cat([torch.from_numpy(decoded(tensors, f"{LAYER}.{name}")) for name in SIBLINGS])
        torch.testing.assert_close(values, by_numpy.float(), rtol=1e-6, atol=0)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(2))
    out = theirs.run_nvfp4_emulations(x, divisor.reshape(1), codes, scale, factor.reshape(1), swizzle=False)
    amax = torch.tensor(checkpoint.input_amaxes[f"{LAYER}.q_proj"])
    operand = hb.quantize(x, hb.NVFP4(), amax=amax)
    quants = [checkpoint.quantized[f"{LAYER}.{name}.weight"] for name in SIBLINGS]
    ours = torch.cat([hb.gemm_nt(operand, quant, out_dtype=torch.float32) for quant in quants], dim=1)
    assert (out - ours).norm() < 1e-3 * ours.norm()
