"""Recipes with options in one word: `nvfp4(rht=64,sr=off)`, `four_over_six(scope=weights,base=nvfp4(tiles=1x16))`.

A word is the name of a function of `halfbyte.recipes`, with options in parentheses, or two of them with a slash
between, the forward of one with the backward of the other. Options are the function's own parameters, most with a short
name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from halfbyte import recipes
from halfbyte.delayed import Delayed
from halfbyte.spec import Hadamard, Recipe, Spec
from halfbyte.values import split_outside

MORE: dict[str, Callable[..., Recipe]] = {
    function.__name__: function
    for function in (
        recipes.row_scaled,
        recipes.outlier_channels,
        recipes.hot_channels,
        recipes.delayed_amax,
        recipes.weight_only,
    )
}
"""Functions that are no presets, since they change another recipe."""
FUNCTIONS = recipes.PRESETS | MORE
HEADROOM = 6 * 16 / 17
"""What a block maximum maps to with room for stochastic rounding above it."""


class Option(NamedTuple):
    """A short name, how a value is written, and how it is read."""

    short: str
    written: str
    read: Callable[[str], Any]


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


def _hadamard(text: str) -> Hadamard | None:
    """Return the rotation of `64`, `fresh64`, `none`."""
    if text == "none":
        return None
    signs = text.rstrip("0123456789")
    return Hadamard(size=int(text[len(signs) :]), signs={"": "fixed", "plain": "none"}.get(signs, signs))


def _block(text: str) -> tuple[int, int]:
    rows, cols = map(int, text.split("x"))
    return rows, cols


def _recipe_or_none(text: str) -> Recipe | None:
    return None if text == "none" else _recipe(text)


def _recipe(text: str) -> Recipe:
    return read(text)


def _amax(text: str) -> Delayed | None:
    if text == "current":
        return None
    word, *numbers = text.split(":")
    if word != "delayed" or len(numbers) > 2:
        raise ValueError(text)
    every, margin = (*numbers, *("1", "1.0")[len(numbers) :])
    return Delayed(every=int(every), margin=float(margin))


OPTIONS: dict[str, Option] = {
    "stochastic_rounding": Option("sr", "on, off", _switch),
    "hadamard": Option("rht", "none, 16, 64, fresh64, …", _hadamard),
    "weight_block": Option("tiles", "16x16, 1x16", _block),
    "activation_outer": Option("outer", "tensor, row", str),
    "fp4_max_gradient": Option("headroom", "on, off", lambda text: HEADROOM if _switch(text) else 6.0),
    "activation_mean": Option("mean", "kept, split", str),
    "saved_rounding": Option("saved", "nearest, stochastic", str),
    "candidates": Option("candidates", "0.875:1:1.25:1.5", lambda text: tuple(map(float, text.split(":")))),
    "e4m3_max": Option("e4m3_max", "a number", float),
    "share": Option("share", "a number", float),
    "every": Option("every", "a number of steps", int),
    "margin": Option("margin", "a number", float),
    "batch_invariant": Option("batch_invariant", "on, off", _switch),
    "gradients": Option("gradients", "a recipe, none", _recipe_or_none),
    "base": Option("base", "a recipe", _recipe),
}
"""By parameter; others take their value as it is written."""

FIELDS: dict[str, Option] = {
    "amax": Option(
        "amax", "current, delayed, delayed:16 (measured in one step of 16), delayed:16:1.5 (a margin)", _amax
    ),
    "backward": Option("backward", "original, dequantized", str),
}
"""Fields of a recipe that are options of every word."""


@lru_cache(maxsize=1024)
def read(text: str) -> Recipe:
    """Return the recipe that a word stands for.

    Raises:
        ValueError: no function has that name, it has no such option, or the option no such value.
    """
    parts = split_outside(text, "/")
    if len(parts) == 2:
        return recipes.mixed(read(parts[0]), read(parts[1]))
    name, bracket, rest = text.partition("(")
    if name not in FUNCTIONS or len(parts) > 2:
        raise ValueError(f"recipe={text!r} is not a preset; use one of {', '.join(FUNCTIONS)}")
    if bracket and not rest.endswith(")"):
        raise ValueError(f"recipe={text!r}: the last ) is missing; write {name}(OPTION=VALUE,…)")
    given = split_outside(rest.removesuffix(")"), ",") if bracket else []
    pairs = [_option(text, name, one) for one in given if one]
    chosen = dict(pairs)
    if len(chosen) < len(pairs):
        raise ValueError(f"recipe={text!r}: it gives one option twice; keep one of them")
    fields = {field: chosen.pop(field) for field in FIELDS if field in chosen}
    recipe = FUNCTIONS[name](**chosen)
    try:
        return replace(recipe, **fields)
    except ValueError as error:
        raise ValueError(f"recipe={text!r}: {error}") from error


def read_operand(word: str) -> Spec | str | None:
    """Return the spec of an operand of a recipe with options, `nvfp4(rht=64).wgrad.a`; other words as they are.

    Raises:
        ValueError: the recipe is none, or no operand is named behind it.
    """
    if "(" not in word:
        return word
    recipe, *place = word.rsplit(".", 2)
    if len(place) < 2 or place[0] not in ("fprop", "dgrad", "wgrad") or place[1] not in ("a", "b"):
        raise ValueError(f"spec={word!r}: name an operand of the recipe, as in nvfp4(rht=64).wgrad.a")
    product = getattr(read(recipe), place[0])
    return product and getattr(product, place[1])


def _option(text: str, name: str, given: str) -> tuple[str, Any]:
    """Return parameter and value of `OPTION=VALUE`."""
    word, _, value = (part.strip() for part in given.partition("="))
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    shorts = {OPTIONS[parameter].short: parameter for parameter in parameters if parameter in OPTIONS}
    parameter = shorts.get(word, word)
    if parameter not in parameters and parameter not in FIELDS:
        own = [OPTIONS[one].short if one in OPTIONS else one for one in parameters]
        known = ", ".join(dict.fromkeys([*own, *FIELDS]))
        raise ValueError(f"recipe={text!r}: {name} has no option {word!r}; it has {known}")
    option = FIELDS.get(word) or OPTIONS.get(parameter, Option(parameter, "", str))
    try:
        return parameter, option.read(value)
    except (KeyError, ValueError) as error:
        if "recipe=" in str(error):
            raise
        raise ValueError(f"recipe={text!r}: {word}={value!r}; write {option.written}") from error
