"""Presets: functions that return a Recipe value. `dataclasses.replace` makes any other.

| preset          | fprop x, w  | dgrad dy, w          | wgrad dy, x           | source                       |
|-----------------|-------------|----------------------|-----------------------|------------------------------|
| nvfp4           | 1x16, 16x16 | 1x16 SR, 16x16       | 1x16 SR RHT, 1x16 RHT | NVIDIA, arXiv 2509.25149     |
| nvfp4_mxfp8_bwd | 1x16, 1x16  | MXFP8, MXFP8         | MXFP8, MXFP8          | forward 4 bits, backward 8   |
| four_over_six   | as nvfp4, with 4over6 on weights, activations or both      | arXiv 2512.02010             |
| quartet2        | 1x16 4over6 | 1x16 EDEN RHT        | 1x16 EDEN RHT         | Quartet II, arXiv 2601.22813 |
| rl              | 1x16 4over6 | bf16                 | bf16                  | what rollout engines compute |
| mxfp8           | MXFP8       | MXFP8                | MXFP8                 | OCP MX v1.0                  |
| nvfp4_forward   | 1x16, 1x16  | bf16                 | bf16                  | NVFP4 in the forward alone   |
| bf16            | bf16        | bf16                 | bf16                  |                              |
| qat             | 1x16, 1x16  | bf16, w as in fprop  | bf16, x as in fprop   | for serving in NVFP4         |
| naive_fp4       | 1x16, 1x16  | 1x16 truncated, 1x16 | 1x16 truncated, 1x16  | a control that should fail   |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from halfbyte.channels import Channels
from halfbyte.delayed import Delayed, delay_problem
from halfbyte.spec import MXFP8, NVFP4, Eden, FourOverSix, GemmSpec, Hadamard, Recipe, Spec, parse_recipe
from halfbyte.te import from_te as from_te
from halfbyte.values import called, check_choice

Scope = Literal["weights", "activations", "all"]
SCOPES = ("weights", "activations", "all")
ROLES = (
    ("fprop", "activations", "weights"),
    ("dgrad", "gradients", "weights"),
    ("wgrad", "gradients", "activations"),
)
Activations = Literal["static", "per-token", "none"]
ACTIVATIONS = ("static", "per-token", "none")
FOUR_OVER_SIX_E4M3_MAX = 256.0  # arXiv 2512.02010: leaves room for a scale 1.5 times the standard one
EDEN_FP4_MAX = 6 / (17 / 16 * 0.93)  # Quartet II's code: the block maximum that gives MS-EDEN the least error
EDEN_E4M3_MAX = 255.99  # likewise: leaves room for scales that the correction makes larger


def bf16() -> Recipe:
    """Every GEMM in high precision: identical to `torch.nn.Linear`."""
    return Recipe()


def nvfp4(
    *,
    stochastic_rounding: bool = True,
    hadamard: Hadamard | None = Hadamard(size=16),
    weight_block: tuple[int, int] = (16, 16),
    activation_outer: Literal["tensor", "row"] = "tensor",
    fp4_max_gradient: float = 6.0,
    activation_mean: Literal["kept", "split"] = "kept",
    saved_rounding: Literal["nearest", "stochastic"] = "nearest",
) -> Recipe:
    """NVIDIA's NVFP4 pretraining recipe (arXiv 2509.25149).

    Args:
        stochastic_rounding: round the gradient operands stochastically; False rounds them to nearest.
        hadamard: the rotation of the two wgrad operands; None leaves it out.
        weight_block: (16, 16) shares one quantized weight between forward and backward; (1, 16) quantizes it twice.
        activation_outer: "row" gives every token of fprop's activations its own fp32 amax.
        fp4_max_gradient: what the block maximum of a gradient maps to; 6 * 16 / 17 leaves headroom for SR.
        activation_mean: "split" quantizes x without its mean over tokens (Averis, arXiv 2603.10444), see Recipe.
        saved_rounding: of the x that is saved for wgrad.
    """
    if not isinstance(stochastic_rounding, bool):
        raise TypeError(f"stochastic_rounding={stochastic_rounding!r}: give True or False")
    check_choice("saved_rounding", saved_rounding, ("nearest", "stochastic"))
    with called(outer="activation_outer", block="weight_block", fp4_max="fp4_max_gradient", rotation="hadamard"):
        activation = NVFP4(outer=activation_outer)
        weight = NVFP4(block=weight_block)
        gradient = NVFP4(rounding="stochastic" if stochastic_rounding else "nearest", fp4_max=fp4_max_gradient)
        turned = dataclasses.replace(gradient, rotation=hadamard)
        saved = NVFP4(rotation=hadamard, rounding=saved_rounding)
    return Recipe(
        fprop=GemmSpec(a=activation, b=weight),
        dgrad=GemmSpec(a=gradient, b=weight),
        wgrad=GemmSpec(a=turned, b=saved),
        activation_mean=activation_mean,
    )


def nvfp4_mxfp8_bwd(
    *,
    element: Literal["e4m3", "e5m2"] = "e4m3",
    activation_outer: Literal["tensor", "row"] = "tensor",
    backward: Literal["original", "dequantized"] = "original",
) -> Recipe:
    """NVFP4 forward, MXFP8 backward.

    Args:
        element: the MXFP8 element of the gradients; weights and activations use e4m3.
        activation_outer: "row" gives every token of fprop's activations its own fp32 amax.
        backward: "dequantized" quantizes in 8 bits what the forward multiplied; "original" x and w, see Recipe.
    """
    operand, gradient = MXFP8(), MXFP8(element=element)
    with called(outer="activation_outer"):
        activation = NVFP4(outer=activation_outer)
    return Recipe(
        fprop=GemmSpec(a=activation, b=NVFP4()),
        dgrad=GemmSpec(a=gradient, b=operand),
        wgrad=GemmSpec(a=gradient, b=operand),
        backward=backward,
    )


def four_over_six(
    *,
    scope: Scope = "all",
    error: Literal["mae", "mse"] = "mae",
    e4m3_max: float = FOUR_OVER_SIX_E4M3_MAX,
    e4m3_max_scope: Scope = "all",
    error_math: Literal["exact", "scaled"] = "exact",
    candidates: tuple[float, ...] = (1.0, 1.5),
    base: Recipe | str | None = None,
) -> Recipe:
    """A recipe with 4over6 on weights, activations or both; never on an operand whose rounding or scale is drawn.

    Args:
        scope: which operands choose between candidate scales: "weights", "activations" or "all".
        error: "mae" or "mse", what a candidate is judged by.
        e4m3_max: the scale magnitude of the tensor maximum, 256 as published or 448, where candidates are tried; all
            other operands keep theirs.
        e4m3_max_scope: which of the operands that try candidates use `e4m3_max`; "all" by default. With 256 this is
            TransformerEngine's choice of operands that use 256; its "none" is `e4m3_max=448`.
        error_math: "exact" or "scaled".
        candidates: multiples of the standard block scale.
        base: the recipe to change, or a preset's name; `nvfp4()` by default.

    Raises:
        ValueError: no operand of the base would change.
    """
    _check_scope("scope", scope)
    _check_scope("e4m3_max_scope", e4m3_max_scope)
    scaling = FourOverSix(error=error, error_math=error_math, candidates=candidates)

    def change(spec, role: str):
        if not isinstance(spec, NVFP4) or spec.rounding != "nearest" or scope not in (role, "all"):
            return spec
        if isinstance(spec.scaling, Eden):  # its correction makes up for the rounding that a choice would bias
            return spec
        maximum = e4m3_max if e4m3_max_scope in (role, "all") else spec.e4m3_max
        return dataclasses.replace(spec, scaling=scaling, e4m3_max=maximum)

    recipe = nvfp4() if base is None else resolve(base)
    _check_operands(base, recipe, scope, lambda spec: spec.rounding == "nearest" and not isinstance(spec.scaling, Eden))
    return _changed(recipe, change)


def weight_only(*, base: Recipe | str | None = None) -> Recipe:
    """A recipe that quantizes weights alone, with x and gradients in high precision: W4A16, for frozen weights.

    Args:
        base: the recipe whose weights are quantized as there, or a preset's name; `nvfp4()` by default. A weight that
            it rotates along with the other operand stays in high precision.

    Raises:
        ValueError: the base quantizes no weight.
    """

    def change(spec, role: str):
        return spec if role == "weights" and spec is not None and spec.rotation is None else None

    recipe = nvfp4() if base is None else resolve(base)
    made = _changed(dataclasses.replace(recipe, activation_mean="kept", channels=None, amax=None), change)
    if not made.specs:
        raise ValueError(f"base={_named(base)}: it quantizes no weight; give a base that does, such as 'nvfp4'")
    return made


def _named(base: Recipe | str | None) -> str:
    """Return a base as a message shows it."""
    return repr(base) if base is None or isinstance(base, str) else f"<{base.key}>"


def _check_operands(base: Recipe | str | None, recipe: Recipe, scope: Scope, applies: Callable[[NVFP4], bool]) -> None:
    """Raise ValueError where a change of NVFP4 operands of a scope would leave the recipe as it is."""
    there = (
        (spec, role)
        for name, *roles in ROLES
        if (gemm := getattr(recipe, name)) is not None
        for spec, role in zip((gemm.a, gemm.b), roles, strict=True)
    )
    if not any(isinstance(spec, NVFP4) and scope in (role, "all") and applies(spec) for spec, role in there):
        raise ValueError(
            f"base={_named(base)}, scope={scope!r}: it has no NVFP4 operand there that this changes, and would stay as "
            "it is; give a base that has one, such as 'nvfp4'"
        )


def _changed(recipe: Recipe, change: Callable[[Spec | None, str], Spec | None]) -> Recipe:
    """Return a recipe with change(spec, role) in the place of every operand; gradients belong to "all" alone."""
    gemms: dict[str, Any] = {}
    for name, role_a, role_b in ROLES:
        gemm = getattr(recipe, name)
        if gemm is not None:
            a, b = change(gemm.a, role_a), change(gemm.b, role_b)
            keeps = gemm.batch_invariant and a is not None and b is not None
            gemms[name] = GemmSpec(a=a, b=b, batch_invariant=keeps)
    return dataclasses.replace(recipe, **gemms)


def row_scaled(*, scope: Scope = "all", base: Recipe | str | None = None) -> Recipe:
    """A recipe whose NVFP4 operands have an fp32 amax per row: per token, or per feature where tokens are summed over.

    Args:
        scope: "weights", "activations" (x in fprop and wgrad), or "all" six operands.
        base: the recipe to change, or a preset's name; by default `nvfp4(weight_block=(1, 16))`, for tiles span rows.

    Raises:
        ValueError: no operand of the base would change.
    """
    _check_scope("scope", scope)

    def change(spec, role: str):
        return dataclasses.replace(spec, outer="row") if isinstance(spec, NVFP4) and scope in (role, "all") else spec

    recipe = nvfp4(weight_block=(1, 16)) if base is None else resolve(base)
    _check_operands(base, recipe, scope, lambda spec: True)
    return _changed(recipe, change)


def outlier_channels(*, share: float = 0.05, base: Recipe | str | None = None) -> Recipe:
    """A recipe that multiplies the channels of x with the largest norm in MXFP8 (after TetraJet-v2, arXiv 2510.27527).

    They are chosen anew from every x; the authors fix them after some steps.

    Args:
        share: of the channels, rounded up to whole groups of 32.
        base: the recipe to change, or a preset's name; `nvfp4()` by default.

    Raises:
        ValueError: the base treats channels apart already, or multiplies no x in NVFP4.
    """
    recipe = _without_channels(base)
    forward, of_weight = recipe.fprop, recipe.wgrad
    if not any(isinstance(spec, NVFP4) for spec in (forward and forward.a, of_weight and of_weight.b)):
        raise ValueError(
            f"base={_named(base)}: it multiplies no x in 4 bits, so that no channel would get more; give a base that "
            "does, such as 'nvfp4'"
        )
    return dataclasses.replace(recipe, channels=Channels(kind="mxfp8", share=share))


def _without_channels(base: Recipe | str | None) -> Recipe:
    """Return a base whose channels are all treated alike; raise ValueError if they are not."""
    recipe = nvfp4() if base is None else resolve(base)
    if recipe.channels is not None:
        kinds = {"mxfp8": "outlier_channels", "patch": "hot_channels"}
        raise ValueError(
            f"base={_named(base)}: it has {kinds[recipe.channels.kind]} already, and a recipe treats channels apart in "
            "one way; give the base without them"
        )
    return recipe


def hot_channels(*, share: float = 0.05, base: Recipe | str | None = None) -> Recipe:
    """A recipe whose forward makes up for rounding errors where they are largest (after CHON, arXiv 2602.02047).

    Args:
        share: of the channels, rounded up to whole groups of 32; chosen anew from every x and w.
        base: the recipe to change, or a preset's name; `nvfp4()` by default.

    Raises:
        ValueError: the base treats channels apart already.
    """
    return dataclasses.replace(_without_channels(base), channels=Channels(kind="patch", share=share))


def delayed_amax(*, every: int = 1, margin: float = 1.0, base: Recipe | str | None = None) -> Recipe:
    """A recipe that quantizes x and gradients with their amax of an earlier step; weights keep their own.

    Every optimizer step begins with `begin_step(model)` of the RunState, which hands the amaxes on.

    Args:
        every: they are measured in one step of so many.
        margin: what they are multiplied by, 1 or more: room for values that grow.
        base: the recipe to change, or a preset's name; `nvfp4()` by default.
    """
    recipe = nvfp4() if base is None else resolve(base)
    return dataclasses.replace(recipe, amax=Delayed(every=every, margin=margin))


def quartet2(
    *,
    hadamard: Hadamard | None = Hadamard(size=128, signs="fresh"),
    backward: Literal["original", "dequantized"] = "dequantized",
) -> Recipe:
    """Quartet II (arXiv 2601.22813): 4over6 by MSE in the forward, MS-EDEN on all four operands of the backward.

    Args:
        backward: "dequantized", as published, quantizes what the forward multiplied; "original" x and w, see Recipe.
        hadamard: the rotation of the operands of dgrad and wgrad, without which MS-EDEN is biased; None leaves it out.
    """
    operand = NVFP4(scaling=FourOverSix(error="mse"), e4m3_max=FOUR_OVER_SIX_E4M3_MAX)
    with called(rotation="hadamard"):
        rotated = NVFP4(rotation=hadamard, scaling=Eden(), fp4_max=EDEN_FP4_MAX, e4m3_max=EDEN_E4M3_MAX)
    both = GemmSpec(a=rotated, b=rotated)
    return Recipe(fprop=GemmSpec(a=operand, b=operand), dgrad=both, wgrad=both, backward=backward)


def rl(
    *,
    gradients: Recipe | str | None = None,
    weight_block: tuple[int, int] = (1, 16),
    batch_invariant: bool = True,
) -> Recipe:
    """The forward that rollout engines compute, for training on what they generate, and a backward from its operands.

    Every token has an amax of its own and nothing is rotated or random, so a token's operands do not depend on others,
    and its output does not either.

    Args:
        gradients: the recipe, or a preset's name, whose dgrad and wgrad quantize gradients and, again, what fprop
            multiplied: "mxfp8" in 8 bits; None leaves the backward in high precision.
        weight_block: (1, 16), or (16, 16).
        batch_invariant: whether the order of the forward's sums is that of every batch; False is as fast as others.

    Raises:
        ValueError: gradients of a recipe that splits a mean off or takes channels apart, which its own forward needs.
    """
    scaling = FourOverSix()
    activation = NVFP4(outer="row", scaling=scaling, e4m3_max=FOUR_OVER_SIX_E4M3_MAX)
    weight = NVFP4(block=weight_block, scaling=scaling, e4m3_max=FOUR_OVER_SIX_E4M3_MAX)
    rest = bf16() if gradients is None else resolve(gradients)
    if rest.splits_mean or rest.channels is not None:
        raise ValueError(
            f"gradients={gradients!r}: a mean that is split off and channels that are taken apart are of a forward, "
            "and rl has its own; use dataclasses.replace(gradients, activation_mean='kept', channels=None)"
        )
    fprop = GemmSpec(a=activation, b=weight, batch_invariant=batch_invariant)
    made = Recipe(fprop=fprop, dgrad=rest.dgrad, wgrad=rest.wgrad, backward="dequantized")
    return made if rest.amax is None or delay_problem(made) else dataclasses.replace(made, amax=rest.amax)


def mxfp8(*, element: Literal["e4m3", "e5m2"] = "e4m3") -> Recipe:
    """MXFP8 in all three GEMMs; `element` is that of the gradients."""
    operand, gradient = MXFP8(), MXFP8(element=element)
    return Recipe(
        fprop=GemmSpec(a=operand, b=operand),
        dgrad=GemmSpec(a=gradient, b=operand),
        wgrad=GemmSpec(a=gradient, b=operand),
    )


def nvfp4_forward(
    *,
    activation_outer: Literal["tensor", "row"] = "tensor",
    backward: Literal["original", "dequantized"] = "original",
) -> Recipe:
    """NVFP4 in the forward only, for quantization-aware training; the backward is bf16.

    Args:
        activation_outer: "row" gives every token its own fp32 amax.
        backward: "original" or "dequantized", see Recipe.
    """
    with called(outer="activation_outer"):
        activation = NVFP4(outer=activation_outer)
    return Recipe(fprop=GemmSpec(a=activation, b=NVFP4()), backward=backward)


def qat(*, activations: Activations = "static") -> Recipe:
    """Quantization-aware training: the forward that engines serve, the backward in high precision through its operands.

    Rounding passes gradients on as they are (straight-through), so dgrad multiplies by the weight that was served and
    wgrad by the activations that it met.

    Args:
        activations: as hb.export.save names what is served: "static" has one amax for all tokens of a call, which an
            export fixes by calibration; "per-token" one for every token; "none" leaves activations in high precision.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r}: use one of {', '.join(map(repr, ACTIVATIONS))}")
    x = None if activations == "none" else NVFP4(outer="row" if activations == "per-token" else "tensor")
    return Recipe(fprop=GemmSpec(a=x, b=NVFP4()), backward="dequantized")


def naive_fp4() -> Recipe:
    """A control that should fail: NVFP4 with gradients rounded toward zero and no rotation."""
    operand, gradient = NVFP4(), NVFP4(rounding="toward_zero")
    return Recipe(
        fprop=GemmSpec(a=operand, b=operand),
        dgrad=GemmSpec(a=gradient, b=operand),
        wgrad=GemmSpec(a=gradient, b=operand),
    )


PRESETS: dict[str, Callable[..., Recipe]] = {
    function.__name__: function
    for function in (bf16, nvfp4, nvfp4_mxfp8_bwd, four_over_six, quartet2, rl, mxfp8, nvfp4_forward, qat, naive_fp4)
}


def mixed(forward: Recipe | str, backward: Recipe | str) -> Recipe:
    """Return the forward GEMM of one recipe with the backward GEMMs of another: what a run's last steps may want.

    The backward is from what the forward multiplied if one of the two says so; behind a forward in high precision
    there is nothing to dequantize, and it reads x and w themselves. Amaxes are delayed if one of the two delays them,
    as the backward says if both do. The mean of x is split off if the recipe does so whose GEMM quantizes x here.

    Raises:
        ValueError: both GEMMs quantize x and one recipe splits its mean off, the other does not; or the forward's
            recipe has a dequantized backward, which would lack what that of the other takes apart.
    """
    first, rest = resolve(forward), resolve(backward)
    channels = rest.channels if rest.channels is not None and rest.channels.kind == "mxfp8" else None
    if channels is None and first.channels is not None and first.channels.kind == "patch":
        channels = first.channels  # which the forward alone has
    mean = _mixed_mean(first, rest)
    mode = _mixed_backward(first, rest, "channels" if channels else "activation_mean" if mean == "split" else None)
    made = dataclasses.replace(
        rest, fprop=first.fprop, backward=mode, activation_mean=mean, channels=channels, amax=None
    )
    amax = rest.amax or first.amax
    return made if amax is None or delay_problem(made) else dataclasses.replace(made, amax=amax)


def _mixed_backward(first: Recipe, rest: Recipe, apart: str | None) -> Any:
    """Return `backward` of the forward of one recipe with the backward of another; apart: what takes x apart."""
    if first.fprop is None:
        return "original"
    if first.backward == "original":
        return rest.backward
    if apart is not None:
        none = "None" if apart == "channels" else "'kept'"
        raise ValueError(
            f"backward='dequantized' in the forward, {apart}={getattr(rest, apart)!r} in the backward: what the "
            "forward multiplied lacks it; give the forward's recipe backward='original' or the backward's "
            f"{apart}={none}"
        )
    return "dequantized"


def _mixed_mean(first: Recipe, rest: Recipe) -> Any:
    """Return `activation_mean` of the forward of one recipe with the backward of another: theirs that quantize x."""
    is_forward = first.fprop is not None and first.fprop.a is not None
    is_backward = rest.wgrad is not None and rest.wgrad.b is not None
    modes = {*([first.activation_mean] if is_forward else []), *([rest.activation_mean] if is_backward else [])}
    if len(modes) > 1:
        raise ValueError(
            f"activation_mean={first.activation_mean!r} in the forward, {rest.activation_mean!r} in the backward: x "
            "has one in both; give both recipes one, as in dataclasses.replace(recipe, activation_mean='split')"
        )
    return modes.pop() if modes else "kept"


def get(name: str) -> Recipe:
    """Return the preset called `name` with its default options, or of "A/B" the forward of A with the backward of B.

    Raises:
        ValueError: no preset has that name; the message lists those that exist.
    """
    forward, slash, backward = name.partition("/")
    if "/" in backward:
        raise ValueError(f"recipe={name!r}: name one forward and one backward, as in 'bf16/nvfp4'")
    if slash:
        return mixed(get(forward), get(backward))
    if name not in PRESETS:
        options = "; options are arguments of functions, as in hb.recipes.nvfp4(hadamard=None)" if "(" in name else ""
        raise ValueError(f"recipe={name!r} is not a preset; use one of {', '.join(PRESETS)}{options}")
    return _DEFAULTS[name]


def resolve(recipe: Recipe | str) -> Recipe:
    """Return a Recipe given itself or what `get` takes.

    Raises:
        ValueError: no preset has that name.
        TypeError: neither a Recipe nor a name.
    """
    if isinstance(recipe, str):
        return get(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={recipe!r}: give a Recipe, such as hb.recipes.nvfp4(), or the name of a preset")
    return recipe


def read_recipe(text: str) -> Recipe:
    """Return the recipe of a preset's name or of a key.

    Raises:
        ValueError: it is neither.
    """
    is_key = text.partition("=")[0].isidentifier() and "=" in text  # "nvfp4(rht=64)" is a word of commands, no key
    return parse_recipe(text) if is_key else resolve(text)


def _check_scope(field: str, value: str) -> None:
    if value not in SCOPES:
        raise ValueError(f"{field}={value!r}: use one of {', '.join(map(repr, SCOPES))}")


_DEFAULTS: dict[str, Recipe] = {name: function() for name, function in PRESETS.items()}
"""Built here: compiled code looks a name up, and could not build its recipe."""
