"""What is static about a call of linear layers, and its checks, which are made once for calls that look alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.functional.checks import check_devices, check_main_grad
from halfbyte.functional.foreign import refuse_foreign
from halfbyte.functional.split import LayerSplit, Part, maker
from halfbyte.functional.tokens import Tokens
from halfbyte.functional.weights import CachedWeight, Layout, check_cached, covers
from halfbyte.rng import Draw
from halfbyte.spec import Recipe
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.tensor.quant_tensor import check_value_dtype


@dataclass(frozen=True)
class Request:
    """What is static about calls that differ in tensors and streams alone.

    base_of, shards: the place of every weight, then that of the signs of all: which base is its own, and which part of
        an operand it quantizes, as Draw says.
    amax_of: for every weight, which of the amaxes is its own.
    save: whether gradients are recorded.
    cached: for every weight, which operands of it come along quantized.
    splits: for every weight, how ranks share the layer; None where no rank shares anything.
    tokens: how ranks share the tokens of x or of y, which travel as codes; None where each has all or sums its own.
    amaxes_of_parts: the shared amaxes of weights are those of the parts that are here.
    """

    recipe: Recipe
    count: int
    base_of: tuple[int, ...]
    amax_of: tuple[int, ...]
    shards: tuple[tuple[int, int | None] | None, ...]
    out_dtype: torch.dtype
    save: bool
    cached: tuple[Layout, ...]
    splits: tuple[LayerSplit | None, ...] | None = None
    tokens: Tokens | None = None
    amaxes_of_parts: bool = False

    def __hash__(self) -> int:
        return self._hash

    def maker(self, index: int, letters: str, moved: bool = False) -> Any:
        """Return what makes operands of a tensor of one layer; see `split.maker`."""
        if self.tokens is not None and not moved and letters == {"x": "MK", "y": "MN"}[self.tokens.of]:
            return self.tokens.maker()
        split = None if self.splits is None else self.splits[index]
        return maker(split, letters, moved and split is not None and split.dim == "K")

    def part(self, index: int, letters: str) -> Part | None:
        """Return which part of a tensor of one layer is here, None where all of it is."""
        return part_of(None if self.splits is None else self.splits[index], self.tokens, letters)

    def adds_bias(self, index: int) -> bool:
        """Whether this rank adds the bias of a layer: of partial sums the first rank alone."""
        split = None if self.splits is None else self.splits[index]
        return split is None or split.dim != "K" or split.rank == 0

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))


def part_of(split: LayerSplit | None, tokens: Tokens | None, letters: str) -> Part | None:
    """Return which part of a tensor is here, None where all of it is.

    Args:
        split, tokens: of the layer.
        letters: "MK" of x, "MN" of dy.
    """
    if tokens is not None and letters == {"x": "MK", "y": "MN"}[tokens.of]:
        return Part(tokens.split, 0, tokens.split.borders)
    if split is None or split.dim not in letters:
        return None
    return Part(split, letters.index(split.dim), split.borders)


class Call(NamedTuple):
    """One call: its request, and the stream of every weight, then that of the signs.

    late: for every weight, its CachedWeight if dgrad's operand is made before the backward, else None; empty: none is.
    earlier: how many of its tensors, the last ones, are those of GradientAmaxes.
    """

    request: Request
    streams: tuple[int, ...]
    late: tuple[CachedWeight | None, ...] = ()
    earlier: int = 0


def draws_of(request: Request, bases: Sequence[Tensor | None], streams: Sequence[int]) -> list[Draw | None]:
    """Return where every weight draws, then where the signs of all are drawn."""
    own = [bases[i] for i in request.base_of]
    return [
        None if base is None or shard is None else Draw(base, stream, *shard)
        for base, stream, shard in zip(own, streams, request.shards, strict=True)
    ]


_MAX_CHECKED = 4096


_CHECKED: dict[tuple, Request] = {}
"""Calls whose shapes, dtypes and options were found right: the latest."""


def checked(static: tuple, x: Tensor, given: tuple, out_dtype: torch.dtype | None) -> Request:
    """Check a call, unless one that looks the same to the checks has passed them; return the request that passed.

    Args:
        static: the fields of its request, in order.
        given: weights, biases, weight_amaxes, main_grads, cached_weights.
        out_dtype: as the caller gave it.
    """
    weights, biases, amaxes, grads, cached = given
    key = None
    if not torch.compiler.is_compiling():
        looks = [looks_of(t) for t in (x, *weights, *biases, *amaxes, *grads)]
        looks += [t.stride() for t in grads if isinstance(t, Tensor)]
        looks += [None if c is None else (c.dtype, *[t.device for t in c.tensors]) for c in cached]
        key = (static[0].key, *static[1:], out_dtype, *looks)  # comparing strings is what costs least
        passed = _CHECKED.get(key)
        if passed is not None:
            return passed
    request = Request(*static)
    refuse_foreign((("x", x), *(("w", w) for w in weights), *(("bias", bias) for bias in biases)))
    check_call(x, weights, biases, request.recipe, grads, cached)
    _check_options(out_dtype, amaxes, x.device)
    if key is not None:
        if len(_CHECKED) >= _MAX_CHECKED:
            _CHECKED.clear()
        _CHECKED[key] = request
    return request


def looks_of(tensor: Any) -> tuple | None:
    """Return what of a tensor the checks ask about."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        return (type(tensor),)
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


def _check_options(out_dtype: torch.dtype | None, amaxes: Sequence[Tensor | None], device: torch.device) -> None:
    if out_dtype is not None:
        check_value_dtype("out_dtype", out_dtype, "name one of these and convert the result")
    for amax in amaxes:
        if amax is not None and not (isinstance(amax, Tensor) and amax.dtype == torch.float32 and amax.dim() == 0):
            raise TypeError(
                f"weight_amax={amax!r}: give a float32 tensor of shape [], such as w.detach().abs().max().float()"
            )
        check_devices(device, (("weight_amax", amax),))


def check_call(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence, recipe: Recipe, grads: Sequence, cached: Sequence
) -> None:
    """Raise ValueError or TypeError where shapes, dtypes or devices of a call do not fit; after autocast's casts."""
    if not weights:
        raise ValueError("weights=[]: give at least one weight")
    if x.dim() == 0:
        raise ValueError("x.shape=(): give at least one dimension, in_features")
    if isinstance(x, QuantTensor):
        raise TypeError("x is a QuantTensor: linear quantizes it itself; pass x.dequantize() or use gemm_nt")
    for w, bias, grad, one in zip(weights, biases, grads, cached, strict=True):
        check_cached(one, recipe, x.dtype, x.device, primary=isinstance(w, PrimaryWeight))
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ValueError(f"w.shape={tuple(w.shape)}: x.shape={tuple(x.shape)} needs [out_features, {x.shape[-1]}]")
        check_devices(x.device, (("w", w), ("bias", bias)))
        if w.dtype != x.dtype and not covers(one, recipe):
            raise TypeError(f"w.dtype={w.dtype}, x.dtype={x.dtype}: cast one of them, or use torch.autocast")
        if bias is not None and tuple(bias.shape) != (w.shape[0],):
            raise ValueError(f"bias.shape={tuple(bias.shape)}: w needs ({w.shape[0]},)")
        if bias is not None and not bias.is_floating_point():
            raise TypeError(f"bias.dtype={bias.dtype}: give a float dtype, such as {x.dtype}")
        if grad is not None:
            check_main_grad(grad, w.shape, x.device)
