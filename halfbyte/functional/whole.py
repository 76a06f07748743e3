"""A pass of linear layers as one op, which is what compiled code calls.

A compiled block would call an op for each quantization and each GEMM: sixteen for a layer's forward and backward, whose
dispatch costs the host more than their launches. Where everything that the backward needs is made in the forward, the
pass is one op, repeated from the same record as in eager code (`ops.run`); so it is where a weight comes as codes of
which fprop and dgrad both read these alone. Elsewhere (other weights that come quantized, main_grads, plain operands
that the backward reads, shards, layers that ranks share) `fits` says no, and compiled code calls the ops inside.

An op takes tensors, numbers and a text, so what is static about a call travels as the text that `request_text` writes.
Its outputs alias nothing: an amax that was given comes back empty, codes do not come back, and `saved` puts the given
ones in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from halfbyte.functional.operands import BF16_GEMM, Saved
from halfbyte.functional.request import Request
from halfbyte.functional.weights import Layout, takes_amax
from halfbyte.layout import LINEAR
from halfbyte.spec import Recipe, Spec, parse_recipe

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", None: "-"}
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
_NOTHING = Layout(None, None)
_WHOLE = (None, (0, None))
"""Shards that are all of their tensor."""


def kept_specs(request: Request, needs: Sequence[bool]) -> list[Spec | None]:
    """Return how the backward's operands of x and of each weight are quantized, None where it needs none.

    Args:
        request: of the call.
        needs: whether x and each weight need gradients.
    """
    x, w = _backward_specs(request.recipe)
    need_dx, *need_dw = [request.save and need for need in needs]
    return [x if any(need_dw) else None, *[w if need_dx else None] * request.count]


def _backward_specs(recipe: Recipe) -> tuple[Spec | None, Spec | None]:
    fprop, dgrad, wgrad = (gemm or BF16_GEMM for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    return (fprop.a, fprop.b) if recipe.backward == "dequantized" else (wgrad.b, dgrad.b)


def fits(request: Request, needs: Sequence[bool], main_grads: Sequence[Tensor | None]) -> bool:
    """Whether a call is one op each way in compiled code; arguments as for `kept_specs`."""
    if not torch.compiler.is_compiling() or any(grad is not None for grad in main_grads):
        return False
    if request.splits is not None or request.tokens is not None or request.recipe.channels is not None:
        return False
    if not all(cached == _NOTHING or _is_all_that_is_read(cached, request.recipe) for cached in request.cached):
        return False
    if any(shard not in _WHOLE for shard in request.shards):
        return False
    x, w = _backward_specs(request.recipe)
    needs_x, *needs_w = needs
    return not request.save or ((x is not None or not any(needs_w)) and (w is not None or not needs_x))


def _is_all_that_is_read(cached: Layout, recipe: Recipe) -> bool:
    """Whether a weight comes as codes in which fprop and the backward both read it, as they lie or turned."""
    if not cached.is_frozen or cached.row is None or recipe.fprop is None or recipe.fprop.b is None:
        return False
    spec, _, scale_layout = cached.row
    in_one = recipe.backward == "dequantized" or (spec.is_tile and _backward_specs(recipe)[1] == spec)
    return in_one and spec == recipe.fprop.b and scale_layout == LINEAR


def made_of(request: Request, outputs: Sequence[Tensor | None], tensors: Sequence[Any]) -> list[Tensor | None]:
    """Return what a pass returned, with None for codes that came with its tensors; its op returns what it made."""
    codes = {id(t) for t in tensors[5 * request.count + 4 :]}
    return [None if id(t) in codes else t for t in outputs] if codes else list(outputs)


def saved(request: Request, needs: Sequence[bool], made: Sequence[Tensor], given: tuple) -> list[Tensor]:
    """Return what the forward's op made for the backward, with the amaxes and the codes that the caller gave.

    Args:
        request, needs: of the call.
        made: three tensors of each operand that is kept and was made.
        given: the amax of each weight, then the amaxes of x in both orientations, then the tensors of codes.
    """
    amaxes, (row_amax, col_amax), codes = given
    tensors, place, left = list(made), 2, list(codes)
    tiles = _shares_an_amax(request.recipe)
    x_amax = row_amax if request.recipe.backward == "dequantized" or tiles else col_amax
    owners = [x_amax, *[amaxes[i] for i in request.amax_of]]
    for i, (spec, amax) in enumerate(zip(kept_specs(request, needs), owners, strict=True)):
        own = [left.pop(0) for _ in range(3)] if i and request.cached[i - 1].is_frozen else []
        if spec is None:
            continue
        if own:
            tensors[place - 2 : place - 2] = own
            place += 3
            continue
        if amax is not None and (i == 0 or takes_amax(spec)):
            tensors[place] = amax
        place += 3
    return tensors


def _shares_an_amax(recipe: Recipe) -> bool:
    """Whether x has one amax for both orientations: that of its rows."""
    row, col = (recipe.fprop or BF16_GEMM).a, (recipe.wgrad or BF16_GEMM).b
    return row is not None and row == col and col is not None and col.is_tile


def request_text(request: Request, flags: Sequence[bool], *more: str, with_codes: bool = True) -> str:
    """Return what is static about a call as a text, for `parse_request`; with_codes: of weights that come as such."""
    numbers = [_numbers(request.base_of), _numbers(request.amax_of), _numbers([s is not None for s in request.shards])]
    numbers.append(_numbers([0 if c.row is None or not with_codes else 1 + c.row[1] for c in request.cached]))
    parts = [request.recipe.key, *numbers, _DTYPES[request.out_dtype], _numbers([request.save]), _numbers(flags)]
    return " ".join([*parts, *more])


def dtypes_text(dtypes: tuple) -> str:
    """Return the dtypes of `note` as a text."""
    x, weights, biases = dtypes
    return ",".join([_DTYPES[dtype] for dtype in (x, *weights, *biases)])


@lru_cache(maxsize=4096)
def parse_request(text: str) -> tuple[Request, tuple[bool, ...], list[str]]:
    """Return the request, the flags and the other parts of a text."""
    key, bases, amaxes, draws, codes, out_dtype, save, flags, *more = text.split(" ")
    base_of, amax_of = tuple(map(int, bases.split(","))), tuple(map(int, amaxes.split(",")))
    count = len(amax_of)
    shards = tuple([(0, None) if draw == "1" else None for draw in draws.split(",")])
    recipe, dtype = parse_recipe(key), _NAMED[out_dtype]
    assert dtype is not None, "an output has a dtype"
    layouts = tuple([_as_codes(recipe, int(cols) - 1) if cols != "0" else _NOTHING for cols in codes.split(",")])
    request = Request(recipe, count, base_of, amax_of, shards, dtype, save == "1", layouts)
    return request, tuple([flag == "1" for flag in flags.split(",")]), more


def _as_codes(recipe: Recipe, cols: int) -> Layout:
    """Return that of a weight of so many columns of which fprop's operand is all that there is."""
    return Layout(((recipe.fprop or BF16_GEMM).b, cols, LINEAR), None, is_frozen=True)


def parse_dtypes(text: str, count: int) -> tuple:
    """Return what `dtypes_text` wrote, of `count` weights."""
    x, *others = (_NAMED[name] for name in text.split(","))
    return x, tuple(others[:count]), tuple(others[count:])


def _numbers(values: Sequence[Any]) -> str:
    return ",".join([str(int(value)) for value in values])


def layout_of(request: Request, needs: Sequence[bool], dys: Sequence[Tensor | None], K: int) -> Saved:
    """Return how to rebuild the operands of the backward.

    Args:
        request, needs: of the call.
        dys: of each output, or None.
        K: columns of x and of the weights.
    """
    specs = kept_specs(request, needs)
    if request.recipe.backward == "dequantized":
        cols = [K] * len(specs)
    else:  # the operand of a weight whose dy is None is not read
        rows = next(dy.shape[0] for dy in dys if dy is not None)
        cols = [rows, *[0 if dy is None else dy.shape[1] for dy in dys]]
        cols[1:] = [K if own.is_frozen else n for own, n in zip(request.cached, cols[1:], strict=True)]
    operands = [None if spec is None else (spec, n, LINEAR) for spec, n in zip(specs, cols, strict=True)]
    has_mean = request.recipe.splits_mean and specs[0] is not None
    return *operands, True if has_mean else None, None, None


def present(gradients: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients that an op made, with None where none is wanted."""
    made = iter(gradients)
    return [next(made) if want else None for want in wanted]
