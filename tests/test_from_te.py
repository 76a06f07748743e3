"""TransformerEngine's options as recipes: operand by operand, and everything else refused by name.

tests/clients/test_from_te.py does the same with its own recipe class and compares bytes with its reference.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

import halfbyte as hb
from halfbyte.recipes import from_te


@dataclass
class Options:
    """What an NVFP4BlockScaling holds, as 2.20.2 has it."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: object = "E2M1"
    fp8_format: object = "E4M3"
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


VARIABLES = {
    "disable_rht": "NVTE_NVFP4_DISABLE_RHT",
    "disable_stochastic_rounding": "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "disable_2d_quantization": "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    "row_scaled_activation": "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    "nvfp4_4over6": "NVTE_NVFP4_4OVER6",
    "nvfp4_4over6_e4m3_use_256": "NVTE_NVFP4_4OVER6_E4M3_USE_256",
    "nvfp4_4over6_err_mode": "NVTE_NVFP4_4OVER6_ERR_MODE",
    "backward_override": "NVTE_BACKWARD_OVERRIDE",
}
PLAIN = hb.recipes.nvfp4(hadamard=None)
X, W, TILE = hb.NVFP4(), hb.NVFP4(), hb.NVFP4(block=(16, 16))
SR = hb.NVFP4(rounding="stochastic")
SIX = hb.FourOverSix()


def recipe(x, w, dy) -> hb.Recipe:
    """A recipe without rotation, in which wgrad reads x and dgrad w as fprop does."""
    pairs = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}
    return hb.Recipe(**{name: hb.GemmSpec(a=a, b=b) for name, (a, b) in pairs.items()})


CASES = [
    ({}, hb.recipes.nvfp4()),
    ({"disable_rht": True}, recipe(X, TILE, SR)),
    ({"disable_stochastic_rounding": True}, hb.recipes.nvfp4(stochastic_rounding=False)),
    ({"disable_2d_quantization": True}, hb.recipes.nvfp4(weight_block=(1, 16))),
    ({"disable_rht": True, "row_scaled_activation": True}, recipe(replace(X, outer="row"), TILE, SR)),
    ({"nvfp4_4over6": "weights"}, hb.recipes.four_over_six(scope="weights")),
    (
        {"nvfp4_4over6": "all", "disable_rht": True, "disable_stochastic_rounding": True},
        recipe(replace(X, scaling=SIX, e4m3_max=256.0), replace(TILE, scaling=SIX, e4m3_max=256.0), hb.NVFP4()),
    ),
    (
        {"nvfp4_4over6": "all", "disable_rht": True, "nvfp4_4over6_e4m3_use_256": "activations"},
        recipe(replace(X, scaling=SIX, e4m3_max=256.0), replace(TILE, scaling=SIX), SR),
    ),
    (
        {"nvfp4_4over6": "activations", "disable_rht": True, "nvfp4_4over6_e4m3_use_256": "none"},
        recipe(replace(X, scaling=SIX), TILE, SR),
    ),
    (
        {"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"},
        hb.recipes.four_over_six(scope="weights", error="mse"),
    ),
    ({"backward_override": "high_precision"}, hb.Recipe(fprop=hb.GemmSpec(a=X, b=TILE))),
    (
        {"backward_override": "dequantized", "disable_2d_quantization": True},
        hb.recipes.nvfp4_forward(backward="dequantized"),
    ),
]


@pytest.mark.parametrize("options, expected", CASES)
def test_options_are_operands(options, expected):
    assert from_te(Options(**options)) == expected
    env = {VARIABLES[name]: "1" if value is True else value for name, value in options.items()}
    assert from_te(env=env | {"PATH": "/bin", "NVTE_DEBUG": "1"}) == expected


def test_the_modes_that_no_recipe_holds():
    expected = hb.recipes.four_over_six(scope="weights", error_math="scaled")
    env = {"NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "1", "NVTE_USE_FAST_MATH": "0", "NVTE_NVFP4_DISABLE_RHT": "1"}
    assert from_te(Options(nvfp4_4over6="weights"), env=env) == expected  # the recipe has read the third already
    assert from_te(env={"NVTE_NVFP4_4OVER6_ERR_MODE": "mse", "NVTE_NVFP4_4OVER6": "weights"}) == (
        hb.recipes.four_over_six(scope="weights", error="mse")
    )
    with pytest.raises(ValueError, match="NVTE_USE_FAST_MATH='1': its approximate divisions have no defined bytes"):
        from_te(Options(), env={"NVTE_USE_FAST_MATH": "1"})


def test_older_versions_lack_what_they_do_not_do():
    old = SimpleNamespace(disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False)
    assert from_te(old) == hb.recipes.nvfp4()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"row_scaled_activation": True}, "row_scaled_activation=True with disable_rht=False: .* set disable_rht=True"),
        ({"nvfp4_4over6": "all"}, "nvfp4_4over6='all' with disable_rht=False"),
        ({"nvfp4_4over6": "some"}, "nvfp4_4over6='some': use one of 'none', 'weights'"),
        ({"nvfp4_4over6_err_mode": "mae"}, "nvfp4_4over6_err_mode='mae': use one of 'MAE', 'MSE'"),
        ({"backward_override": "bf16"}, "backward_override='bf16': use one of None, 'high_precision'"),
        ({"disable_rht": 1}, "disable_rht=1: use True or False"),
        ({"fp4_format": "E3M0"}, "fp4_format='E3M0': NVFP4 has E2M1 alone"),
        ({"fp8_mha": True}, "fp8_mha=True: attention is not quantized here"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        from_te(Options(**options))


@pytest.mark.parametrize(
    "env, message",
    [
        ({"NVTE_NVFP4_DISABLE_RHT": "true"}, "NVTE_NVFP4_DISABLE_RHT='true': TransformerEngine reads '1' as on"),
        ({"NVTE_NVFP4_4OVER6": "yes"}, "NVTE_NVFP4_4OVER6='yes': use one of"),
        ({"NVTE_NVFP4_NEW": "1"}, "NVTE_NVFP4_NEW='1': no option of TransformerEngine 2.20"),
    ],
)
def test_refused_variables(env, message):
    with pytest.raises(ValueError, match=message):
        from_te(env=env)


def test_other_objects_and_changed_operands_are_refused():
    @dataclass
    class Newer(Options):
        nvfp4_8over6: bool = False

    with pytest.raises(ValueError, match="nvfp4_8over6=False: no option of TransformerEngine"):
        from_te(Newer())
    changed = Options()
    changed.fp4_quant_bwd_grad = SimpleNamespace(stochastic_rounding=False)
    with pytest.raises(ValueError, match=r"fp4_quant_bwd_grad\.stochastic_rounding=False: its flags make it True"):
        from_te(changed)
    with pytest.raises(TypeError, match="env='os.environ': give os.environ"):
        from_te(env="os.environ")
    with pytest.raises(TypeError, match="recipe=SimpleNamespace: has no disable_rht, so it is no NVFP4BlockScaling"):
        from_te(SimpleNamespace(margin=0))
    with pytest.raises(ValueError, match=r"from_te\(\): give TransformerEngine's recipe, or env=os.environ"):
        from_te()


@pytest.mark.parametrize("operand", ["fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"])
def test_every_field_of_an_operand_is_looked_at(operand):
    """One that somebody replaced asks for other bytes; as the flags make it, it asks for nothing."""
    own = {
        "random_hadamard_transform": operand != "fp4_quant_fwd_weight",
        "stochastic_rounding": operand == "fp4_quant_bwd_grad",
        "fp4_2d_quantization": operand == "fp4_quant_fwd_weight",
        "power_2_scale": False,
        "amax_epsilon": 0.0,
    }
    recipe = Options()
    setattr(recipe, operand, SimpleNamespace(**own))
    assert from_te(recipe) == hb.recipes.nvfp4()
    for field, value in own.items():
        other = 1e-6 if field == "amax_epsilon" else not value
        setattr(recipe, operand, SimpleNamespace(**own | {field: other}))
        with pytest.raises(ValueError, match=rf"{operand}\.{field}={other}: its flags make it {value}"):
            from_te(recipe)
