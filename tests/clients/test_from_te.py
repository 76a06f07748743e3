"""recipes.from_te on TransformerEngine's own recipe class, and the operands' bytes against its own reference.

Both are files of its wheel, which `make test-integrations` unpacks: the package itself needs a GPU to import.
"""

import importlib.util
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import halfbyte as hb
from halfbyte.recipes import from_te
from halfbyte.verify.alone import load_alone

FOLDER = Path(sys.prefix) / "peers" / "transformer-engine" / "transformer_engine"
SCOPES = ("none", "weights", "activations", "all")
FUNCTIONS = (
    "cast_to_fp4x2",
    "cast_from_fp4x2",
    "_ref_nvfp4_4over6_fp16_candidate",
    "_sum_4over6_2d_error",
    "_quantize_blockwise_4over6_reference",
    "_quantize_blockwise_reference",
)


@pytest.fixture
def recipes(monkeypatch):
    """Import its recipes under given variables, which their classes read when they are defined."""

    def load(env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        spec = importlib.util.spec_from_file_location("te_recipes", FOLDER / "common" / "recipe" / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "te_recipes", module)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_default_is_the_published_recipe(recipes):
    module = recipes({})
    assert from_te(module.NVFP4BlockScaling()) == hb.recipes.nvfp4() == from_te(env=os.environ)
    with pytest.raises(TypeError, match="recipe=MXFP8BlockScaling: has no disable_rht"):
        from_te(module.MXFP8BlockScaling())
    changed = module.NVFP4BlockScaling()
    changed.fp4_quant_fwd_inp = module.QParams(stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"fp4_quant_fwd_inp\.random_hadamard_transform=False: its flags make it True"):
        from_te(changed)


def test_variables_and_the_recipe_that_reads_them_are_one(recipes):
    for four, top, error, tiles in itertools.product(SCOPES, SCOPES, ("MAE", "mse"), "01"):
        env = {
            "NVTE_NVFP4_DISABLE_RHT": "1",
            "NVTE_NVFP4_ROW_SCALED_ACTIVATION": tiles,
            "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": tiles,
            "NVTE_NVFP4_4OVER6": four,
            "NVTE_NVFP4_4OVER6_E4M3_USE_256": top,
            "NVTE_NVFP4_4OVER6_ERR_MODE": error,
        }
        assert from_te(recipes(env).NVFP4BlockScaling()) == from_te(env=env)


def reference():
    """Return its quantizer of blocks; methods call each other by the name of their class."""
    owner = SimpleNamespace()
    given = {"torch": torch, "NVFP4QuantizerRef": owner}
    found = load_alone(FOLDER / "pytorch" / "custom_recipes" / "reference_nvfp4.py", FUNCTIONS, given)
    vars(owner).update(found)
    return lambda x, amax, **options: found[FUNCTIONS[-1]](owner, x, amax, pow_2_scales=False, eps=0.0, **options)


def near_ties() -> torch.Tensor:
    """Return values of few bits: the errors of two candidates are often equal but for their last bits."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3))
    x = (x * 8).round() / 8 + 0.0  # no -0, which its reference makes +0
    x[0, 0] = 5.3
    return x.bfloat16()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("error", ["MAE", "MSE"])
@pytest.mark.parametrize("top", [448, 256])
def test_operands_have_the_bytes_of_its_reference(recipes, fast, error, top):
    """x by tensor and by row, and w in tiles, each with 4over6: equal bytes, fast error mathematics included."""
    quantize = reference()
    options = {
        "disable_rht": True,
        "nvfp4_4over6": "all",
        "nvfp4_4over6_err_mode": error,
        "nvfp4_4over6_e4m3_use_256": "all" if top == 256 else "none",
    }
    kernel = {"NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "1" if fast else "0"}
    x = near_ties()
    other = hb.FourOverSix(error=error.lower(), error_math="exact" if fast else "scaled")
    for by_row in (False, True):
        recipe = from_te(recipes({}).NVFP4BlockScaling(**options, row_scaled_activation=by_row), env=kernel)
        for spec in recipe.fprop.specs:
            q = hb.quantize(x, spec)
            height, row_scaled = spec.block[0], spec.outer == "row"
            amax = x.float().abs().amax(-1) if row_scaled else x.float().abs().amax()
            codes, scale = quantize(
                x,
                amax,
                tile_len_x=16,
                tile_len_y=height,
                row_scaled_nvfp4=row_scaled,
                nvfp4_use_4over6=True,
                nvfp4_e4m3_max=top,
                nvfp4_4over6_err_mode=error,
                nvfp4_4over6_err_use_fast_math=fast,
            )
            assert torch.equal(q.block_scale.view(torch.uint8), scale.contiguous().view(torch.uint8))
            assert torch.equal(q.qdata, codes)
            if height == 1 and not row_scaled:  # data on which the other error mathematics chooses otherwise
                unlike = hb.quantize(x, replace(spec, scaling=other)).block_scale
                assert (unlike.view(torch.uint8) != scale.contiguous().view(torch.uint8)).any()
