"""NVIDIA's ModelOpt decodes what hb.export.save wrote in its form to our values."""

from __future__ import annotations

import pytest
import torch
from export_decoder import stored
from export_models import TOKENS, llama, mixtral, trained
from modelopt.torch.quantization import qtensor
from test_compressed_tensors import assert_same_but_ties

import halfbyte as hb


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("build", [llama, mixtral])
@pytest.mark.parametrize("recipe", [hb.recipes.nvfp4(), hb.recipes.four_over_six(), hb.recipes.nvfp4_forward()])
def test_modelopt_gives_our_values(tmp_path, build, recipe):
    """Its -0 is +0; 256 of 4over6 is in the fp32 factor."""
    model = trained(build(), recipe, steps=1)
    hb.export.save(model, tmp_path / "out", format="modelopt", activations="static", batches=[TOKENS])
    tensors, checkpoint = stored(tmp_path / "out"), hb.export.load(tmp_path / "out")
    for key, quant in checkpoint.quantized.items():
        theirs = qtensor.NVFP4QTensor(quant.shape, torch.bfloat16, tensors[key]).dequantize(
            dtype=torch.bfloat16,
            scale=tensors[f"{key}_scale"].view(torch.float8_e4m3fn),
            double_scale=tensors[f"{key}_scale_2"],
            block_sizes={-1: 16},
        )
        assert_same_but_ties(theirs, quant)
