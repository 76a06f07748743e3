"""Linear layers on DTensors, as torch's ColwiseParallel and RowwiseParallel make them: local tensors in, DTensors out.

| x          | w         | dim in parts | y          | gradient of x | of w      | of the bias |
|------------|-----------|--------------|------------|---------------|-----------|-------------|
| Replicate  | Shard(0)  | N            | Shard(-1)  | Partial       | Shard(0)  | Shard(0)    |
| Shard(0..) | Shard(0)  | N, M of x    | Shard(-1)  | Shard(0..)    | Shard(0)  | Shard(0)    |
| Shard(-1)  | Shard(1)  | K            | Partial    | Shard(-1)     | Shard(1)  | Replicate   |
| Shard(0)   | Replicate | M            | Shard(0)   | Shard(0)      | Partial   | Partial     |
| Replicate  | Replicate | none         | Replicate  | Replicate     | Replicate | Replicate   |

What is partial is summed where torch does that for its own layers: where the placements change. Only code that has met
a DTensor imports this module: torch.distributed.tensor takes its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.earlier import of_shared_x
from halfbyte.functional.foreign import PLAIN
from halfbyte.functional.group import all_max, waited
from halfbyte.functional.linear import Layers, prepare, run_call
from halfbyte.functional.operands import BF16_GEMM
from halfbyte.functional.parts import Given, Lying, as_parts, run_on_parts, strides_of
from halfbyte.functional.places import places_of
from halfbyte.functional.request import Call, part_of
from halfbyte.functional.split import LayerSplit, chunks
from halfbyte.functional.tokens import Tokens, block_problem
from halfbyte.ops.backends import warn_once
from halfbyte.spec import Recipe

REMEDY = (
    "use torch.distributed.tensor.parallel's ColwiseParallel or RowwiseParallel for the layer, redistribute x first, "
    "or keep the layer in high precision (rules={glob: None} of hb.quantize_)"
)


class Shared(NamedTuple):
    """How one layer lies on a mesh of one dimension: placements of its tensors, and the dimension that is in parts."""

    dim: str | None
    y: Placement
    dx: Placement
    dw: Placement
    db: Placement


def run_parts(
    x: Any, layers: Layers, recipe: Recipe, out_dtype: torch.dtype | None, y_tokens: int | None = None
) -> tuple[Tensor, ...]:
    """Return what `outputs_of_parts` does, outside of compiled code, which would trace what ranks ask each other."""
    if torch.compiler.is_compiling():
        from halfbyte.functional.eager import eagerly

        return eagerly(outputs_of_parts, (x, layers, recipe, out_dtype, y_tokens), {})
    return outputs_of_parts(x, layers, recipe, out_dtype, y_tokens)


def outputs_of_parts(
    x: Any, layers: Layers, recipe: Recipe, out_dtype: torch.dtype | None, y_tokens: int | None = None
) -> tuple[Tensor, ...]:
    """Return what `linear.outputs_of` does, of DTensors.

    Args:
        x, layers, recipe, out_dtype: as for `linear.outputs_of`; an x whose tokens lie in parts before a weight whose
            rows do travels as codes.
        y_tokens: the dimension of y that is to lie in parts where x has its features in parts; the gradient of y then
            travels as codes. None: y is a partial sum.

    Raises:
        ValueError: the placements of x and of a weight do not go together, or something is not supported on DTensors.
    """
    shared = [_shared(x, w, bias) for w, bias in zip(layers.weights, layers.biases, strict=True)]
    _refuse_unsupported(layers, recipe, shared)
    mesh, last = x.device_mesh, x.dim() - 1
    tokens = _tokens(x, shared[0], y_tokens, recipe)
    if tokens is None and _has_tokens_in_parts(x, shared[0]) and mesh.size() > 1:
        x = x.redistribute(placements=(Replicate(),))
        shared = [one._replace(dx=Partial()) for one in shared]
    splits = tuple([_split(one.dim, x, w, recipe) for one, w in zip(shared, layers.weights, strict=True)])
    given_y = Shard(y_tokens) if tokens is not None and tokens.of == "y" and y_tokens is not None else None
    x_here, local = _parts(x, layers, shared, is_followed=not recipe.specs or autocast_dtype(x.device) is not None)
    lines = list(x_here.shape if tokens is None or tokens.of == "y" else x.shape)
    if tokens is not None and given_y is not None:
        lines[given_y.dim] //= tokens.world
    outputs = tuple(
        [
            (torch.Size((*x.shape[:-1], w.shape[0])), given_y or (Shard(last) if one.y == Shard(-1) else one.y))
            for w, one in zip(layers.weights, shared, strict=True)
        ]
    )
    inputs = shared[0].dx, *[one.dw for one in shared], *[one.db for one in shared]
    places, part = places_of(layers.rng, len(splits), recipe), part_of(splits[0], tokens, "MK")
    amaxes = of_shared_x(part, x_here, (recipe, None if places is None else places[0]), layers.x_amaxes)
    how = splits if any(splits) else None, tokens, layers.amaxes_of_parts
    call, tensors = prepare(x_here, local, recipe, out_dtype, amaxes, how)
    made: Any = _run(
        call, tensors, Lying(mesh, outputs, torch.Size(lines), inputs), (x, *layers.weights, *layers.biases)
    )
    if y_tokens is None or given_y is not None:
        return made
    return tuple([y.redistribute(placements=(Shard(y_tokens),)) for y in made])


def _parts(x: Any, layers: Layers, shared: Sequence[Shared], *, is_followed: bool) -> tuple[Tensor, Layers]:
    """Return what is here of x and of layers; autograd follows it where torch is to cast or multiply it."""
    if not is_followed:
        here = [[None if t is None else waited(_here(t)) for t in ts] for ts in (layers.weights, layers.biases)]
        return waited(_here(x)), layers._replace(weights=here[0], biases=here[1])
    weights = [w.to_local(grad_placements=(one.dw,)) for one, w in zip(shared, layers.weights, strict=True)]
    biases = [
        None if bias is None else bias.to_local(grad_placements=(one.db,))
        for one, bias in zip(shared, layers.biases, strict=True)
    ]
    return x.to_local(grad_placements=(shared[0].dx,)), layers._replace(weights=weights, biases=biases)


def _run(call: Call | None, tensors: tuple, places: Lying, inputs: tuple) -> tuple[Tensor, ...]:
    """Return the outputs as DTensors.

    Args:
        call, tensors: what `prepare` returned.
        places: of all tensors.
        inputs: x, weights and biases as DTensors.
    """
    if call is not None and call.request.save and autocast_dtype(tensors[0].device) is None:
        return run_on_parts(Given(call, tensors, places), inputs)
    outputs = run_call(call, tensors, places.lines, len(places.outputs))
    if not torch.is_grad_enabled():
        return as_parts(outputs, places)
    return tuple(
        [
            DTensor.from_local(y, places.mesh, (place,), run_check=False, shape=shape, stride=strides_of(shape))
            for y, (shape, place) in zip(outputs, places.outputs, strict=True)
        ]
    )


def _has_tokens_in_parts(x: Any, shared: Shared) -> bool:
    return shared.dim == "N" and type(x.placements[0]) is Shard


def _tokens(x: Any, shared: Shared, y_tokens: int | None, recipe: Recipe) -> Tokens | None:
    """Return how the tokens of x or y lie in parts, None where they do not or where they cannot travel as codes."""
    mesh = x.device_mesh
    if _has_tokens_in_parts(x, shared):
        of, axis = "x", x.placements[0].dim
        specs = (recipe.fprop or BF16_GEMM).a, (recipe.wgrad or BF16_GEMM).b
    elif shared.dim == "K" and y_tokens is not None:
        of, axis = "y", y_tokens
        specs = (recipe.dgrad or BF16_GEMM).a, (recipe.wgrad or BF16_GEMM).a
    else:
        return None
    if mesh.size() == 1:
        return None
    size, after = x.shape[axis], math.prod(x.shape[axis + 1 : -1])
    reason = f"{size} tokens on {mesh.size()} ranks are not equal parts" if size % mesh.size() else None
    each = size // mesh.size() * after
    reason = reason or block_problem(recipe, each, specs)
    reason = reason or (None if any(specs) else "the recipe quantizes no activation there")
    if reason is not None:
        what = "x" if of == "x" else "the gradient of y"
        warn_once(f"tokens in parts: {what} is gathered in its values, not as codes; {reason}")
        return None
    sequences, group = math.prod(x.shape[:axis]), mesh.get_group().group_name
    return Tokens(of=of, sequences=sequences, each=each, world=mesh.size(), rank=mesh.get_local_rank(), group=group)


def _shared(x: Any, w: Any, bias: Any) -> Shared:
    """Return how x and a weight lie; raise ValueError where no linear layer of torch's styles has them so."""
    for name, t in (("w", w), ("bias", bias)):
        if t is not None and not isinstance(t, DTensor):
            raise ValueError(f"{name} is a plain tensor and x a DTensor, {x.placements}: {REMEDY}")
        if t is not None and t.device_mesh != x.device_mesh:
            raise ValueError(f"{name} lies on {t.device_mesh}, x on {x.device_mesh}: give both one mesh")
    if x.device_mesh.ndim != 1:
        raise ValueError(
            f"x lies on a mesh of {x.device_mesh.ndim} dimensions, {x.device_mesh}: quantized layers share one "
            "dimension; use a slice of the mesh, such as mesh['tp'], for the plan of parallelize_module"
        )
    if w.dim() != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"w.shape={tuple(w.shape)}: x.shape={tuple(x.shape)} needs [out_features, {x.shape[-1]}]. Parts of unequal "
            "sizes must stay DTensors from layer to layer, or torch takes all for as large as this one: give the style "
            "before it use_local_output=False"
        )
    (of_x,), (of_w,) = x.placements, w.placements
    of_bias = None if bias is None else bias.placements[0]
    last = x.dim() - 1
    found = None
    if of_x == Replicate() and of_w == Shard(0) and of_bias in (None, Shard(0)):
        found = Shared("N", Shard(-1), Partial(), Shard(0), Shard(0))
    elif type(of_x) is Shard and of_x.dim < last and of_w == Shard(0) and of_bias in (None, Shard(0)):
        found = Shared("N", Shard(-1), of_x, Shard(0), Shard(0))
    elif of_x == Shard(last) and of_w == Shard(1) and of_bias in (None, Replicate()):
        found = Shared("K", Partial(), of_x, of_w, Replicate())
    elif of_w == Replicate() and of_bias in (None, Replicate()) and of_x == Replicate():
        found = Shared(None, of_x, of_x, of_w, Replicate())
    elif of_w == Replicate() and of_bias in (None, Replicate()) and type(of_x) is Shard and of_x.dim < last:
        before = math.prod(x.shape[: of_x.dim])
        if before != 1:
            raise ValueError(
                f"x is Shard({of_x.dim}) of shape {tuple(x.shape)} and w is whole: the tokens that a rank has are no "
                f"neighbours among all, as blocks of the sum over tokens want them; shard dimension 0, or {REMEDY}"
            )
        found = Shared("M", of_x, of_x, Partial(), Partial())
    if found is None:
        which = f"x {of_x}, w {of_w}" + ("" if of_bias is None else f", bias {of_bias}")
        raise ValueError(f"{which}: these placements do not make a linear layer; {REMEDY}")
    return found


def _split(dim: str | None, x: Any, w: Any, recipe: Recipe) -> LayerSplit | None:
    """Return what says which part of a layer is here."""
    mesh = x.device_mesh
    if dim is None or mesh.size() == 1:
        return None
    axis = x.placements[0].dim if dim == "M" else 0
    size = {"M": x.shape[axis], "N": w.shape[0], "K": w.shape[1]}[dim]
    times = math.prod(x.shape[axis + 1 : -1]) if dim == "M" else 1
    borders, rank = chunks(size, mesh.size(), times), mesh.get_local_rank()
    here = {"M": _here(x).shape[axis] * times, "N": _here(w).shape[0], "K": _here(w).shape[1]}[dim]
    if borders[rank + 1] - borders[rank] != here:
        raise ValueError(f"{dim} of {size} has {here} here, not {borders[rank + 1] - borders[rank]}: {REMEDY}")
    return LayerSplit.of(dim, borders, rank, mesh.get_group().group_name, recipe)


def _here(t: Any) -> Tensor:
    """Return what this rank holds, for a look: past autograd and dispatch, which `detach().to_local()` goes through."""
    return t._local_tensor


def _refuse_unsupported(layers: Layers, recipe: Recipe, shared: list[Shared]) -> None:
    """Raise ValueError for what linear layers do with plain tensors alone."""
    for w, grad, cached in zip(layers.weights, layers.main_grads, layers.cached_weights, strict=True):
        kind = type(_here(w))
        if kind not in PLAIN and not hasattr(kind, "trigger_wait"):
            raise ValueError(f"w is a DTensor of {kind.__name__}: shard weights in high precision")
        if grad is not None:
            raise ValueError("main_grad is given and w is a DTensor: leave it out, so that autograd receives a DTensor")
        if cached is not None:
            raise ValueError("cached_weight is given and w is a DTensor: do not cache weights that ranks share")
    if len({one.dim for one in shared}) > 1:
        raise ValueError("weights that share x lie in parts in different ways: give them equal placements")
    if recipe.channels is not None:
        raise ValueError(
            f"recipe.channels={recipe.channels} and layers that ranks share: which channels they are takes all of x "
            "and w; use dataclasses.replace(recipe, channels=None)"
        )
    if recipe.splits_mean and any(one.dim == "M" for one in shared):
        raise ValueError(
            "activation_mean='split' and tokens in parts: their mean takes all of them; redistribute x first"
        )


def whole_amax(weights: Sequence[Any], *, is_part: bool = False) -> Tensor:
    """Return the greatest magnitude in DTensors of one mesh, of which ranks hold parts, fp32 []: ranks meet once.

    Args:
        weights: on one mesh.
        is_part: return that of the parts which are here.
    """
    own = [waited(_here(weight)) for weight in weights]
    is_whole = is_part or all(weight.placements == (Replicate(),) for weight in weights)
    group = None if is_whole else weights[0].device_mesh.get_group().group_name
    (amax,), _ = ops.run(_greatest, (group,), own, ())
    return amax


def _greatest(static: tuple, parts: Sequence[Tensor], numbers: Sequence[int]) -> tuple[tuple[Tensor], None]:
    """Return the amax that tensors have together on all ranks of a group or, of none, here; as `ops.run` wants it."""
    own, (group,) = ops.amax_of_all([part.detach() for part in parts]), static
    return (own if group is None else all_max(own, group),), None
