"""Presets are exactly the table of docs/recipes.md, and their options change what they name and nothing else."""

import dataclasses

import pytest

import halfbyte as hb
from halfbyte.recipes import PRESETS

ROW = hb.NVFP4()
TILE = hb.NVFP4(block=(16, 16))
SR = hb.NVFP4(rounding="stochastic")
RHT = hb.Hadamard(size=16)
E4M3 = hb.MXFP8()
RL_W = hb.NVFP4(scaling=hb.FourOverSix(error="mae"), e4m3_max=256.0)
RL_X = dataclasses.replace(RL_W, outer="row")
MSE = hb.NVFP4(scaling=hb.FourOverSix(error="mse"), e4m3_max=256.0)
EDEN = hb.NVFP4(
    rotation=hb.Hadamard(size=128, signs="fresh"),
    scaling=hb.Eden(),
    fp4_max=6 / (17 / 16 * 0.93),
    e4m3_max=255.99,
)


def operands(recipe: hb.Recipe) -> dict:
    """Return the six operands by name."""
    names = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
    table = {}
    for gemm, (a, b) in names.items():
        spec = getattr(recipe, gemm) or hb.GemmSpec()
        table[f"{gemm} {a}"], table[f"{gemm} {b}"] = spec.a, spec.b
    return table


def changed(recipe: hb.Recipe, base: hb.Recipe) -> set[str]:
    ours, theirs = operands(recipe), operands(base)
    return {name for name in ours if ours[name] != theirs[name]}


TABLE = {
    "bf16": (None, None, None, None, None, None),
    "nvfp4": (
        ROW,
        TILE,
        SR,
        TILE,
        dataclasses.replace(SR, rotation=RHT),
        dataclasses.replace(ROW, rotation=RHT),
    ),
    "nvfp4_mxfp8_bwd": (ROW, ROW, E4M3, E4M3, E4M3, E4M3),
    "quartet2": (MSE, MSE, EDEN, EDEN, EDEN, EDEN),
    "rl": (RL_X, RL_W, None, None, None, None),
    "mxfp8": (E4M3,) * 6,
    "nvfp4_forward": (ROW, ROW, None, None, None, None),
    "qat": (ROW, ROW, None, None, None, None),
}


@pytest.mark.parametrize("name", TABLE)
def test_preset_is_its_row_of_the_table(name):
    assert tuple(operands(hb.recipes.get(name)).values()) == TABLE[name]


@pytest.mark.parametrize("name", PRESETS)
def test_get_builds_every_preset(name):
    recipe = hb.recipes.get(name)
    assert recipe == getattr(hb.recipes, name)() and hash(recipe) == hash(getattr(hb.recipes, name)())


def test_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ValueError, match="recipe='nvfp5'") as caught:
        hb.recipes.get("nvfp5")
    assert all(name in str(caught.value) for name in PRESETS)


def test_keys_tell_presets_apart():
    assert len({hb.recipes.get(name).key for name in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize("name, draws", [("bf16", False), ("nvfp4", True), ("mxfp8", False), ("nvfp4_forward", False)])
def test_needs_rng(name, draws):
    assert hb.recipes.get(name).needs_rng == draws


class TestNvfp4:
    """Each of SR, the rotation and 16x16 can be left out."""

    base = hb.recipes.nvfp4()

    def test_without_stochastic_rounding(self):
        recipe = hb.recipes.nvfp4(stochastic_rounding=False)
        assert changed(recipe, self.base) == {"dgrad dy", "wgrad dy"}
        assert not recipe.needs_rng

    def test_without_rotation(self):
        recipe = hb.recipes.nvfp4(hadamard=None)
        assert changed(recipe, self.base) == {"wgrad dy", "wgrad x"}
        assert not any(spec.rotation for spec in recipe.specs)

    def test_without_tiles(self):
        recipe = hb.recipes.nvfp4(weight_block=(1, 16))
        assert changed(recipe, self.base) == {"fprop w", "dgrad w"}
        assert not any(spec.is_tile for spec in recipe.specs)

    def test_wide_fresh_rotation(self):
        rotation = hb.Hadamard(size=128, signs="fresh")
        recipe = hb.recipes.nvfp4(hadamard=rotation)
        assert recipe.wgrad.a.rotation == recipe.wgrad.b.rotation == rotation

    def test_row_scaled_activations(self):
        recipe = hb.recipes.nvfp4(activation_outer="row")
        assert changed(recipe, self.base) == {"fprop x"}
        assert recipe.fprop.a.outer == "row"

    def test_saved_activations_rounded_stochastically(self):
        recipe = hb.recipes.nvfp4(saved_rounding="stochastic")
        assert changed(recipe, self.base) == {"wgrad x"} and recipe.wgrad.b.rounding == "stochastic"

    def test_split_mean(self):
        recipe = hb.recipes.nvfp4(activation_mean="split")
        assert changed(recipe, self.base) == set() and recipe.activation_mean == "split"

    def test_headroom(self):
        recipe = hb.recipes.nvfp4(fp4_max_gradient=6 * 16 / 17)
        assert changed(recipe, self.base) == {"dgrad dy", "wgrad dy"}


class TestFourOverSix:
    """4over6 goes where its scope says, and never on a stochastically rounded operand."""

    base = hb.recipes.nvfp4()
    weights = frozenset({"fprop w", "dgrad w"})
    activations = frozenset({"fprop x", "wgrad x"})

    @pytest.mark.parametrize(
        "scope, expected", [("weights", weights), ("activations", activations), ("all", weights | activations)]
    )
    def test_scope(self, scope, expected):
        recipe = hb.recipes.four_over_six(scope=scope)
        table = operands(recipe)
        assert changed(recipe, self.base) == expected
        assert all(table[name].scaling == hb.FourOverSix() and table[name].e4m3_max == 256 for name in expected)

    @pytest.mark.parametrize("scope", ["weights", "activations", "all"])
    @pytest.mark.parametrize("maximum_scope", ["weights", "activations", "all"])
    def test_the_scope_of_the_maximum_lies_within_that_of_the_candidates(self, scope, maximum_scope):
        """TransformerEngine's rule: 256 applies where 4over6 does, of that where its own option says."""
        groups = {"weights": self.weights, "activations": self.activations, "all": self.weights | self.activations}
        table = operands(hb.recipes.four_over_six(scope=scope, e4m3_max_scope=maximum_scope))
        assert {name for name, spec in table.items() if spec.scaling != hb.BlockMax()} == groups[scope]
        within = groups[scope] & groups[maximum_scope]
        assert {name: spec.e4m3_max for name, spec in table.items()} == {n: 256 if n in within else 448 for n in table}

    def test_the_default_is_256_wherever_candidates_are_tried_and_448_is_256_nowhere(self):
        """TransformerEngine's "all", which is its default, and its "none"."""
        tried = {"fprop x", "fprop w", "dgrad w", "wgrad x"}
        default = operands(hb.recipes.four_over_six())
        assert {name for name, spec in default.items() if spec.e4m3_max == 256} == tried
        none = operands(hb.recipes.four_over_six(e4m3_max=448.0))
        assert all(spec.e4m3_max == 448 for spec in none.values())
        assert {name for name, spec in none.items() if spec.scaling == hb.FourOverSix()} == tried

    def test_gradients_join_when_rounded_to_nearest(self):
        base = hb.recipes.nvfp4(stochastic_rounding=False)
        assert changed(hb.recipes.four_over_six(base=base), base) == set(operands(base))
        assert changed(hb.recipes.four_over_six(base=base, scope="activations"), base) == self.activations

    def test_keeps_what_is_not_nvfp4(self):
        base = hb.recipes.nvfp4_mxfp8_bwd()
        assert changed(hb.recipes.four_over_six(base=base), base) == {"fprop x", "fprop w"}

    def test_keeps_backward_of_its_base(self):
        base = hb.recipes.nvfp4_forward(backward="dequantized")
        assert hb.recipes.four_over_six(base=base).backward == "dequantized"

    def test_leaves_corrected_scales_alone(self):
        base = hb.recipes.quartet2()
        recipe = hb.recipes.four_over_six(base=base, error="mae")
        assert changed(recipe, base) == {"fprop x", "fprop w"} and recipe.backward == "dequantized"
        assert hb.recipes.four_over_six(base=base, error="mse") == base

    @pytest.mark.parametrize("field", ["scope", "e4m3_max_scope"])
    def test_unknown_scope(self, field):
        with pytest.raises(ValueError, match=rf"{field}='gradients'.*'weights', 'activations', 'all'"):
            hb.recipes.four_over_six(**{field: "gradients"})

    def test_options_reach_the_scaling(self):
        recipe = hb.recipes.four_over_six(error="mse", error_math="scaled", candidates=(1.0, 1.25), e4m3_max=448)
        expected = hb.FourOverSix(error="mse", error_math="scaled", candidates=(1.0, 1.25))
        assert recipe.fprop.a == hb.NVFP4(scaling=expected)


def test_quartet2_takes_another_rotation_or_none():
    for rotation in (hb.Hadamard(size=64, signs="fresh"), None):
        recipe = hb.recipes.quartet2(hadamard=rotation)
        assert changed(recipe, hb.recipes.quartet2()) == {"dgrad dy", "dgrad w", "wgrad dy", "wgrad x"}
        assert recipe.dgrad == recipe.wgrad and recipe.wgrad.b == dataclasses.replace(EDEN, rotation=rotation)


@pytest.mark.parametrize("name", ["quartet2", "rl", "qat"])
def test_presets_that_differentiate_what_the_forward_multiplied(name):
    assert [n for n in PRESETS if hb.recipes.get(n).backward == "dequantized"] == ["quartet2", "rl", "qat"]
    assert hb.recipes.get(name).backward == "dequantized"


def test_qat_is_the_forward_that_is_served():
    served = {name: hb.recipes.qat(activations=name).fprop for name in ("static", "per-token", "none")}
    rows = dataclasses.replace(ROW, outer="row")
    assert {name: gemm.a for name, gemm in served.items()} == {"static": ROW, "per-token": rows, "none": None}
    assert all(gemm.b == ROW for gemm in served.values())
    assert hb.recipes.qat() == hb.recipes.nvfp4_forward(backward="dequantized")
    with pytest.raises(ValueError, match="activations='dynamic': use one of 'static', 'per-token', 'none'"):
        hb.recipes.qat(activations="dynamic")


def test_quartet2_can_differentiate_the_original():
    assert hb.recipes.quartet2(backward="original") == dataclasses.replace(hb.recipes.quartet2(), backward="original")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_rl_takes_the_gradients_of_a_recipe(name):
    recipe = hb.recipes.rl(gradients=name)
    assert (recipe.dgrad, recipe.wgrad) == (hb.recipes.get(name).dgrad, hb.recipes.get(name).wgrad)
    assert recipe.fprop == hb.recipes.rl().fprop and recipe.backward == "dequantized"
    tiles = hb.recipes.rl(gradients=name, weight_block=(16, 16))
    assert changed(tiles, recipe) == {"fprop w"} and tiles.fprop.b.is_tile
    assert not any(spec.rotation for spec in hb.recipes.rl().specs) and not hb.recipes.rl().needs_rng


@pytest.mark.parametrize("scope", ["weights", "activations", "all"])
def test_row_scaled_operands_are_those_of_the_scope(scope):
    base = hb.recipes.nvfp4(weight_block=(1, 16))
    rows = {"weights": {"fprop w", "dgrad w"}, "activations": {"fprop x", "wgrad x"}, "all": set(operands(base))}[scope]
    recipe = hb.recipes.row_scaled(scope=scope)
    assert changed(recipe, base) == rows
    for name, spec in operands(recipe).items():
        assert spec == dataclasses.replace(operands(base)[name], outer="row" if name in rows else "tensor")


def test_row_scaled_keeps_what_has_no_amax_and_refuses_tiles():
    recipe = hb.recipes.row_scaled(base="nvfp4_mxfp8_bwd")
    assert changed(recipe, hb.recipes.nvfp4_mxfp8_bwd()) == {"fprop x", "fprop w"}
    with pytest.raises(ValueError, match=r"outer='row'.*use block=\(1, 16\)"):
        hb.recipes.row_scaled(base="nvfp4")
    with pytest.raises(ValueError, match="scope='tokens'"):
        hb.recipes.row_scaled(scope="tokens")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: hb.recipes.nvfp4(hadamard=64), "hadamard=64: use None or Hadamard"),
        (lambda: hb.recipes.nvfp4(fp4_max_gradient=0), "fp4_max_gradient=0: give a number"),
        (lambda: hb.recipes.nvfp4(activation_outer="rows"), "activation_outer='rows': use one of"),
        (lambda: hb.recipes.nvfp4(weight_block=(8, 8)), r"weight_block=\(8, 8\): use one of"),
        (
            lambda: hb.recipes.nvfp4(saved_rounding="toward_zero"),
            "saved_rounding='toward_zero': use one of 'nearest', 's",
        ),
        (lambda: hb.recipes.nvfp4_mxfp8_bwd(activation_outer="x"), "activation_outer='x'"),
        (lambda: hb.recipes.nvfp4_forward(activation_outer="x"), "activation_outer='x'"),
        (lambda: hb.recipes.quartet2(hadamard=3), "hadamard=3: use None or Hadamard"),
    ],
)
def test_refusals_name_the_argument_that_was_given(make, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        make()


def test_channels_are_treated_apart_in_one_way():
    """A base that does already keeps no part of it, and x in 8 bits has no channel with more."""
    hot, outlier = hb.recipes.hot_channels, hb.recipes.outlier_channels
    for make, base, has in (
        (hot, outlier(), "outlier_channels"),
        (outlier, hot(), "hot_channels"),
        (hot, hot(), "hot"),
    ):
        with pytest.raises(ValueError, match=f"^base=<.*>: it has {has}.* already"):
            make(base=base)
    for base in ("mxfp8", "bf16", hb.recipes.weight_only()):
        with pytest.raises(ValueError, match=r"^base=.*: it multiplies no x in 4 bits"):
            outlier(base=base)
    assert outlier(base="nvfp4_forward").channels == outlier(base="nvfp4_mxfp8_bwd").channels == outlier().channels


@pytest.mark.parametrize("recipe", (hb.recipes.nvfp4(activation_mean="split"), hb.recipes.hot_channels()))
def test_rl_refuses_gradients_that_need_a_forward_of_their_own(recipe):
    with pytest.raises(ValueError, match=r"gradients=.*rl has its own; use dataclasses.replace"):
        hb.recipes.rl(gradients=recipe)
    plain = dataclasses.replace(recipe, activation_mean="kept", channels=None)
    assert hb.recipes.rl(gradients=plain).wgrad == plain.wgrad


def test_mxfp8_element_is_that_of_the_gradients():
    recipe = hb.recipes.nvfp4_mxfp8_bwd(element="e5m2")
    assert changed(recipe, hb.recipes.nvfp4_mxfp8_bwd()) == {"dgrad dy", "wgrad dy"}


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_the_element_of_mxfp8_reaches_both_gradient_gemms(element):
    gradient = hb.MXFP8(element=element)
    gemms = {"fprop": (E4M3, E4M3), "dgrad": (gradient, E4M3), "wgrad": (gradient, E4M3)}
    for name, (a, b) in gemms.items():
        assert getattr(hb.recipes.mxfp8(element=element), name) == hb.GemmSpec(a=a, b=b), name
    assert hb.recipes.nvfp4_mxfp8_bwd(element=element).wgrad == hb.GemmSpec(a=gradient, b=E4M3)


@pytest.mark.parametrize("outer", ["tensor", "row"])
def test_row_scaled_activations_leave_the_weights_alone(outer):
    """A weight with an amax per row could not share one with its siblings."""
    recipe = hb.recipes.nvfp4_forward(activation_outer=outer)
    assert recipe == hb.Recipe(fprop=hb.GemmSpec(a=hb.NVFP4(outer=outer), b=hb.NVFP4(outer="tensor")))
    eight = hb.recipes.nvfp4_mxfp8_bwd(activation_outer=outer, backward="dequantized")
    assert eight == dataclasses.replace(hb.recipes.mxfp8(), fprop=recipe.fprop, backward="dequantized")


def test_dequantized_backward_is_an_option_of_the_forward_recipe():
    recipe = hb.recipes.nvfp4_forward(backward="dequantized", activation_outer="row")
    assert recipe.backward == "dequantized" and recipe.fprop.a.outer == "row"
    assert recipe.dgrad is None and recipe.wgrad is None


def test_replace_makes_the_schedule_of_the_papers():
    recipe = hb.recipes.nvfp4()
    assert changed(dataclasses.replace(recipe, fprop=None), recipe) == {"fprop x", "fprop w"}
    mixed = dataclasses.replace(recipe, dgrad=hb.recipes.mxfp8().dgrad, wgrad=hb.recipes.mxfp8().wgrad)
    assert changed(mixed, recipe) == {"dgrad dy", "dgrad w", "wgrad dy", "wgrad x"}


def test_the_control_truncates_every_gradient():
    recipe = hb.recipes.naive_fp4()
    assert recipe.dgrad.a.rounding == recipe.wgrad.a.rounding == "toward_zero"
    assert not any(spec.rotation for spec in recipe.specs)
