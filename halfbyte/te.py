"""TransformerEngine's NVFP4 options as a Recipe: each is mapped, or refused by name.

Read in TransformerEngine 2.20.2: `common/recipe` (NVFP4BlockScaling), `pytorch/quantization.py` (which operand gets
what) and `csrc/quantizer.cpp` (what its kernels refuse, and the two variables that no recipe holds).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from halfbyte.formats import E4M3
from halfbyte.spec import NVFP4, FourOverSix, GemmSpec, Hadamard, Recipe

_SCOPES = ("none", "weights", "activations", "all")
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "disable_rht": "NVTE_NVFP4_DISABLE_RHT",
        "disable_stochastic_rounding": "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        "disable_2d_quantization": "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        "row_scaled_activation": "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    }
)
_CHOICES: Mapping[str, tuple[str, str | None, tuple[str | None, ...]]] = MappingProxyType(
    {
        "nvfp4_4over6": ("NVTE_NVFP4_4OVER6", "none", _SCOPES),
        "nvfp4_4over6_e4m3_use_256": ("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all", _SCOPES),
        "nvfp4_4over6_err_mode": ("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE", ("MAE", "MSE")),
        "backward_override": ("NVTE_BACKWARD_OVERRIDE", None, (None, "high_precision", "dequantized")),
    }
)
_FAST_MATH = "NVTE_USE_FAST_MATH"
_FAST_ERROR = "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"
_FORMATS = MappingProxyType({"fp4_format": "E2M1", "fp8_format": "E4M3"})
_ATTENTION = ("fp8_dpa", "fp8_mha")
_ALWAYS = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")  # of every version with NVFP4
_E4M3_MAX = 256.0
"""Of 4over6 operands that use_256 names."""


def from_te(recipe: Any = None, *, env: Mapping[str, str] | None = None) -> Recipe:
    """Return the Recipe that TransformerEngine's options stand for.

    Args:
        recipe: its NVFP4BlockScaling, or anything with these attributes; None takes the options from `env`.
        env: variables as TransformerEngine reads them, `os.environ` or another mapping. Beside a recipe only the two
            that no recipe holds are read, for it has read the others when it was made.

    Returns:
        Recipe. NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH is `error_math="scaled"`.

    Raises:
        TypeError: recipe is another object, or env no mapping; the message says what to take.
        ValueError: neither is given, or an option is unknown, has a value that TransformerEngine does not know, or
            asks for what it or this library refuses.
    """
    if recipe is None and env is None:
        raise ValueError("from_te(): give TransformerEngine's recipe, or env=os.environ to read its variables")
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env={env!r}: give os.environ, or a dict of variables")
    variables = {} if env is None else env
    options = _from_env(variables) if recipe is None else _from_recipe(recipe)
    if _is_on(variables, _FAST_MATH):
        raise ValueError(f"{_FAST_MATH}='1': its approximate divisions have no defined bytes; unset it")
    is_scaled = _is_on(variables, _FAST_ERROR)
    _refuse_what_its_kernels_refuse(options)
    return _built(options, "scaled" if is_scaled else "exact")


def _is_on(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r}: TransformerEngine reads '1' as on; set '1' or '0'")
    return value == "1"


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    known = {*_FLAGS.values(), *(name for name, _, _ in _CHOICES.values()), _FAST_ERROR}
    unknown = sorted(name for name in env if name.startswith("NVTE_NVFP4_") and name not in known)
    if unknown:
        raise ValueError(f"{unknown[0]}={env[unknown[0]]!r}: no option of TransformerEngine 2.20; unset it")
    options: dict[str, Any] = {field: _is_on(env, name) for field, name in _FLAGS.items()}
    for field, (name, default, _) in _CHOICES.items():
        value = env.get(name, default)
        options[field] = value.upper() if field == "nvfp4_4over6_err_mode" and value is not None else value
        _check_choice(name, field, options[field])
    return options


def _check_choice(shown: str, field: str, value: Any) -> None:
    allowed = _CHOICES[field][2]
    if value not in allowed:
        raise ValueError(f"{shown}={value!r}: use one of {', '.join(map(repr, allowed))}")


def _from_recipe(recipe: Any) -> dict[str, Any]:
    """Read the attributes; those that older versions lack are what they did without them."""
    missing = [name for name in _ALWAYS if not hasattr(recipe, name)]
    if missing:
        raise TypeError(
            f"recipe={type(recipe).__name__}: has no {missing[0]}, so it is no NVFP4BlockScaling; for "
            "MXFP8BlockScaling take hb.recipes.mxfp8(), other recipes of TransformerEngine are not here"
        )
    options: dict[str, Any] = {name: getattr(recipe, name, False) for name in _FLAGS}
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: use True or False")
    for name, (_, default, _) in _CHOICES.items():
        options[name] = getattr(recipe, name, default)
        _check_choice(name, name, options[name])
    for name, only in _FORMATS.items():
        value = getattr(recipe, name, only)
        if getattr(value, "name", value) != only:
            raise ValueError(f"{name}={value!r}: NVFP4 has {only} alone; leave it at {only}")
    for name in _ATTENTION:
        if getattr(recipe, name, False):
            raise ValueError(f"{name}=True: attention is not quantized here; set it to False")
    _refuse_unknown_fields(recipe, {*_FLAGS, *_CHOICES, *_FORMATS, *_ATTENTION})
    _refuse_changed_operands(recipe, options)
    return options


def _refuse_unknown_fields(recipe: Any, known: set[str]) -> None:
    names = [field.name for field in dataclasses.fields(recipe)] if dataclasses.is_dataclass(recipe) else []
    for name in names:
        if name not in known:
            raise ValueError(
                f"{name}={getattr(recipe, name)!r}: no option of TransformerEngine 2.20; write the Recipe out"
            )


def _refuse_changed_operands(recipe: Any, options: Mapping[str, Any]) -> None:
    """Its QParams follow from the flags; somebody may have replaced them."""
    is_rotated, is_tiled = not options["disable_rht"], not options["disable_2d_quantization"]
    is_random = not options["disable_stochastic_rounding"]
    for name, rotated, random, tiled in (
        ("fp4_quant_fwd_inp", is_rotated, False, False),
        ("fp4_quant_fwd_weight", False, False, is_tiled),
        ("fp4_quant_bwd_grad", is_rotated, is_random, False),
    ):
        expected = {
            "random_hadamard_transform": rotated,
            "stochastic_rounding": random,
            "fp4_2d_quantization": tiled,
            "power_2_scale": False,
            "amax_epsilon": 0.0,
        }
        for field, value in expected.items():
            found = getattr(getattr(recipe, name, None), field, value)
            if found != value:
                raise ValueError(f"{name}.{field}={found!r}: its flags make it {value!r}; write the Recipe out instead")


def _refuse_what_its_kernels_refuse(options: Mapping[str, Any]) -> None:
    is_rotated = not options["disable_rht"]
    if options["row_scaled_activation"] and is_rotated:
        raise ValueError(
            "row_scaled_activation=True with disable_rht=False: TransformerEngine refuses it in the first forward; set "
            "disable_rht=True, or take hb.recipes.row_scaled(scope='activations', base='nvfp4')"
        )
    if options["nvfp4_4over6"] in ("activations", "all") and is_rotated:
        raise ValueError(
            f"nvfp4_4over6={options['nvfp4_4over6']!r} with disable_rht=False: TransformerEngine refuses it in the "
            "first forward; set disable_rht=True, or take hb.recipes.four_over_six()"
        )


def _built(options: Mapping[str, Any], error_math: Any) -> Recipe:
    rotation = None if options["disable_rht"] else Hadamard(size=16)
    scaling = FourOverSix(error=options["nvfp4_4over6_err_mode"].lower(), error_math=error_math)

    def operand(role: str, spec: NVFP4) -> NVFP4:
        if options["nvfp4_4over6"] not in (role, "all"):
            return spec
        has_256 = options["nvfp4_4over6_e4m3_use_256"] in (role, "all")
        return dataclasses.replace(spec, scaling=scaling, e4m3_max=_E4M3_MAX if has_256 else E4M3.max)

    x = operand("activations", NVFP4(outer="row" if options["row_scaled_activation"] else "tensor"))
    w = operand("weights", NVFP4(block=(1, 16) if options["disable_2d_quantization"] else (16, 16)))
    fprop = GemmSpec(a=x, b=w)
    if options["backward_override"] is not None:
        is_original = options["backward_override"] == "high_precision"
        return Recipe(fprop=fprop, backward="original" if is_original else "dequantized")
    dy = NVFP4(rounding="nearest" if options["disable_stochastic_rounding"] else "stochastic")
    rotated_dy, rotated_x = (dataclasses.replace(spec, rotation=rotation) for spec in (dy, x))
    return Recipe(fprop=fprop, dgrad=GemmSpec(a=dy, b=w), wgrad=GemmSpec(a=rotated_dy, b=rotated_x))
