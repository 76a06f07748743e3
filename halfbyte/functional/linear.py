"""The linear layer whose three GEMMs are quantized operand by operand.

A training step of `y = x @ w.T` is three matrix products. Each contracts another dimension, and blocks of 16 values
must lie along the contraction, so every tensor is needed in two orientations, each quantized from the original:

    fprop   y_MN  = x_MK @ w_NK.T      contracts K:  row(x)  with row(w)
    dgrad   dx_MK = dy_MN @ w_NK       contracts N:  row(dy) with col(w)    col(t) = quantize(t.T)
    wgrad   dw_NK = dy_MN.T @ x_MK     contracts M:  col(dy) with col(x)

So the whole layer is `quantize_row_col` of x, w and dy and three calls of `gemm_nt`, which is what the code below does.
A recipe names the spec of each of the six operands; None leaves that operand in high precision.

- The weight in 16x16 tiles has equal bytes in both orientations: forward and backward see the same weight.
- wgrad sums over tokens, where outliers sit; rotating both its operands with a random Hadamard transform spreads them,
  and the rotation cancels in the product.
- Rounding a gradient to nearest biases the sum over many steps; stochastic rounding is right on average. Its bits are
  keyed by (seed, offset, position), so a recomputed forward draws the same ones.

Between forward and backward only operands of the backward are kept, as plain tensors, so that hooks on saved tensors
(offloading, checkpointing) move the small bytes. Per element of x, and of w: NVFP4 0.5625 bytes (half a byte of code,
a sixteenth of a scale byte), MXFP8 1.03125, high precision that of its dtype; nothing for an operand no gradient needs.

Shape suffixes: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from halfbyte import ops
from halfbyte.functional import whole
from halfbyte.functional.autocast import autocast_dtype, cast_inputs
from halfbyte.functional.derivatives import LINEAR, first_order, refuse_transforms
from halfbyte.functional.earlier import GradientAmaxes, in_pairs, of_gradients
from halfbyte.functional.foreign import PLAIN, is_sharded
from halfbyte.functional.frozen import frozen_operands
from halfbyte.functional.group import waited
from halfbyte.functional.operands import (
    Beside,
    Saved,
    flatten_operands,
    unflatten_operands,
    with_late,
)
from halfbyte.functional.places import (
    distinct,
    places_of,
    snapshot,
)
from halfbyte.functional.primary import primary_operands, runs_eagerly
from halfbyte.functional.products import gradients_of, multiply
from halfbyte.functional.request import Call, Request, check_call, checked, draws_of
from halfbyte.functional.split import LayerSplit
from halfbyte.functional.tokens import Tokens
from halfbyte.functional.weights import CachedWeight, covers, flatten
from halfbyte.layout import from_rows
from halfbyte.recipes import resolve
from halfbyte.rng import AnyPhilox, Draw
from halfbyte.spec import Recipe
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.tensor.quant_tensor import QuantTensor


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | str = Recipe(),  # noqa: B008  a frozen value
    *,
    rng: AnyPhilox | None = None,
    out_dtype: torch.dtype | None = None,
    weight_amax: Tensor | None = None,
    main_grad: Tensor | None = None,
    cached_weight: CachedWeight | None = None,
) -> Tensor:
    """Return x @ w.T + bias with the three GEMMs of `recipe`.

    Args:
        x: bf16, fp16 or fp32 [..., K].
        w: [N, K] of x's dtype; under autocast both are cast. A QuantTensor is used as it is: fprop multiplies by its
            codes, dgrad by what they stand for, and it has no gradient, unless it is a PrimaryWeight.
        bias: [N] or None; its gradient is summed in fp32 and rounded once, to the bias's own dtype.
        recipe: how each operand is quantized; a Recipe or a preset's name. Amaxes of earlier steps are kept for layers
            (`hb.nn.Linear`): here x and gradients are quantized with their own, whatever `recipe.amax` says.
        rng: the place in the random stream; needed if the recipe draws. It uses 16 offsets from there on.
        out_dtype: dtype of the result, by default x's.
        weight_amax: fp32 [] shared by sibling weights, used where w is NVFP4 with one amax per tensor, unrotated.
        main_grad: fp32 [N, K]; the weight gradient is added to it in fp32 and autograd receives none for w.
        cached_weight: w quantized before, as `hb.cache_weights` keeps it; w is then only differentiated.

    Returns:
        out_dtype [..., N].

    Raises:
        ValueError: shapes do not fit, or the recipe draws and rng is None.
        TypeError: dtypes do not fit.
    """
    return linear_shared(
        x,
        [w],
        [bias],
        recipe,
        rng=None if rng is None else [rng],
        out_dtype=out_dtype,
        weight_amaxes=None if weight_amax is None else [weight_amax],
        main_grads=None if main_grad is None else [main_grad],
        cached_weights=None if cached_weight is None else [cached_weight],
    )[0]


def linear_shared(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    recipe: Recipe | str = Recipe(),  # noqa: B008
    *,
    rng: AnyPhilox | Sequence[AnyPhilox] | None = None,
    out_dtype: torch.dtype | None = None,
    weight_amaxes: Sequence[Tensor | None] | None = None,
    main_grads: Sequence[Tensor | None] | None = None,
    cached_weights: Sequence[CachedWeight | None] | None = None,
    x_amaxes: ops.Amaxes | None = None,
) -> tuple[Tensor, ...]:
    """Return x @ w.T + bias for several weights that share one quantization of x: q/k/v, gate/up.

    Args:
        x: [..., K].
        weights: [N_i, K] each.
        biases: [N_i] or None each; None for no bias at all.
        recipe, out_dtype: as for `linear`.
        rng: one place per weight, or one for all, 16 offsets apart. x and the signs of rotations draw from the first.
        weight_amaxes, main_grads, cached_weights: one or None per weight.
        x_amaxes: those of x, as the norm or activation that made x returned them.

    Returns:
        one out_dtype [..., N_i] per weight.

    Raises:
        ValueError, TypeError: as for `linear`.
    """
    for w in weights:
        if not isinstance(w, Tensor):
            raise TypeError(f"w={w!r}: give a tensor [out_features, in_features]")
    n, recipe = len(weights), resolve(recipe)
    given = (biases, weight_amaxes, main_grads, cached_weights)
    per_weight: list[list] = [[None] * n if t is None else list(t) for t in given]
    layers = Layers(list(weights), per_weight[0], per_weight[1], per_weight[2], per_weight[3], rng)
    return outputs_of(x, layers, recipe, out_dtype, x_amaxes)


class Layers(NamedTuple):
    """Linear layers that read one input: lists of one entry per layer, and the rng of `linear_shared`.

    dy_amaxes, x_amaxes: what layers do with amaxes of earlier steps of their gradients; and of an x that ranks share.
    amaxes_of_parts: weight_amaxes are those of the parts that are here; the ranks meet for them in the pass.
    """

    weights: list
    biases: list
    weight_amaxes: list
    main_grads: list
    cached_weights: list
    rng: AnyPhilox | Sequence[AnyPhilox] | None
    dy_amaxes: Sequence[GradientAmaxes | None] = ()
    x_amaxes: GradientAmaxes | None = None
    amaxes_of_parts: bool = False


def outputs_of(
    x: Tensor, layers: Layers, recipe: Recipe, out_dtype: torch.dtype | None, x_amaxes: ops.Amaxes | None
) -> tuple[Tensor, ...]:
    """Return what `linear_shared` does, of arguments in their places."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x={x!r}: give a tensor [..., in_features]")
    if runs_eagerly(x, layers.weights, recipe):
        from halfbyte.functional.eager import eagerly

        return eagerly(outputs_of, (x, layers, recipe, out_dtype, x_amaxes), {})
    if is_sharded(x) and recipe.specs:
        from halfbyte.functional.sharded import run_parts

        return run_parts(x, layers, recipe, out_dtype)
    call, tensors = prepare(x, layers, recipe, out_dtype, x_amaxes)
    return run_call(call, tensors, x.shape, len(layers.weights))


def run_call(call: Call | None, tensors: tuple, x_shape: torch.Size, n: int) -> tuple[Tensor, ...]:
    """Return the outputs of what `prepare` returned for x of this shape and n weights."""
    if call is None:
        return in_high_precision(tensors[0], tensors[1 : n + 1], tensors[n + 1 :])
    if torch.compiler.is_compiling():
        outputs = _SharedLinear.apply(call, *tensors)
    elif call.request.save:
        outputs = _SharedLinear.apply(call, *tensors[: 2 * n + 1], Beside(tensors[2 * n + 1 :]))
    else:  # nothing is differentiated, and an autograd function costs the host as much as three launches
        given = by_codes_alone(call.request, tensors)
        outputs = _run(forward_pass, (call.request, (False,) * (n + 1)), given, call.streams)[0][:n]
        outputs = _shaped(call.request, outputs, tensors[0].shape)
    if len(x_shape) == 2:
        return outputs
    return tuple([y if y.shape[:-1] == x_shape[:-1] else from_rows(y, x_shape) for y in outputs])


def in_high_precision(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return x @ w.T + bias for every weight, as torch does; a bias of another dtype is added in the wider one."""
    found = []
    for w, b in zip(weights, biases, strict=True):
        if b is None or b.dtype == x.dtype:
            found.append(F.linear(x, w, b))
        else:
            found.append((F.linear(x, w) + b).to(x.dtype))
    return tuple(found)


def _shaped(request: Request, outputs: tuple[Tensor, ...], x_shape: torch.Size) -> tuple[Tensor, ...]:
    """Return outputs [M, N_i] in the shape of x, where that is no view and all of them is here."""
    if len(x_shape) == 2 or request.splits is not None or request.tokens is not None:
        return outputs
    return ops.in_shape(outputs, tuple(x_shape[:-1]))


def by_codes_alone(request: Request, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors of a forward pass with None for weights of which it reads the codes alone.

    Such a tensor has a class of its own, which would keep the pass from being repeated.
    """
    end = 1 + request.count
    if not any(isinstance(w, PrimaryWeight) for w in tensors[1:end]) or _reads_values(request):
        return tensors
    return tensors[0], *[None if isinstance(w, PrimaryWeight) else w for w in tensors[1:end]], *tensors[end:]


def _reads_values(request: Request) -> bool:
    """Whether something of a forward pass reads the values of a weight beside its operands."""
    recipe = request.recipe
    return request.splits is not None or recipe.splits_mean or recipe.channels is not None


def _run(function: Any, static: tuple, tensors: Sequence[Any], streams: Sequence[int]) -> tuple[tuple, Any]:
    """Return what a pass returns; what ranks sent each other before is awaited: a record takes what is here."""
    if static[0].splits is not None or static[0].tokens is not None:
        tensors = [None if t is None else waited(t) for t in tensors]
    return ops.run(function, static, tensors, streams)


def prepare(
    x: Tensor,
    layers: Layers,
    recipe: Recipe,
    out_dtype: torch.dtype | None,
    x_amaxes: ops.Amaxes | None,
    shared: tuple[tuple[LayerSplit | None, ...] | None, Tokens | None, bool] = (None, None, False),
) -> tuple[Call | None, tuple]:
    """Return the static part of a call and its tensors: x first, as `_SharedLinear` takes them; no frozen weight.

    Returns None and (x, *weights, *biases) where everything stays in high precision.
    """
    weights, biases, amaxes, grads, cached, rng, dy_amaxes, *_ = layers
    n = len(weights)
    dtype, is_frozen = autocast_dtype(x.device), [False] * n
    for i, w in enumerate(weights):
        if type(w) in PLAIN:
            continue
        if isinstance(w, PrimaryWeight):
            weights[i], cached[i] = primary_operands(w, recipe)
        elif isinstance(w, QuantTensor):
            is_frozen[i], cached[i] = True, frozen_operands(w, recipe, dtype or x.dtype, cached[i])
    if dtype is not None:
        x, weights, biases = cast_inputs(dtype, x, weights, biases, [covers(c, recipe) for c in cached])
    if not recipe.specs and out_dtype in (None, x.dtype) and not any(is_frozen) and all(g is None for g in grads):
        check_call(x, weights, biases, recipe, grads, cached)
        places_of(rng, n, recipe)
        return None, (x, *weights, *biases)
    refuse_transforms((x, *weights, *biases), LINEAR)
    draws = _draws(rng, n, recipe, x.device)
    # A tensor is passed once, however many weights share it: torch.compile refuses repeated inputs.
    bases, base_of = distinct([None if d is None else d.base for d in draws])
    amaxes, amax_of = distinct(amaxes)
    layouts, buffers = flatten(cached)
    shards = tuple([None if d is None else d[2:] for d in draws])
    static = recipe, n, base_of, amax_of, shards, out_dtype or x.dtype, torch.is_grad_enabled(), layouts, *shared
    request = checked(static, x, (weights, biases, amaxes, grads, cached), out_dtype)
    late = tuple([None if c is None or c.before_backward is None else c for c in cached])
    earlier = [t for one in dy_amaxes for t in one or GradientAmaxes()] if request.save and any(dy_amaxes) else []
    call = Call(request, tuple([0 if d is None else d.stream for d in draws]), late if any(late) else (), len(earlier))
    if request.save:
        bases = [snapshot(base) for base in bases]
    if any(is_frozen):  # of which the codes are all that is read: such a tensor would keep a pass from being repeated
        weights = [None if frozen else w for w, frozen in zip(weights, is_frozen, strict=True)]
    return call, (x, *weights, *biases, *amaxes, *grads, *bases, *(x_amaxes or _NO_AMAXES), *buffers, *earlier)


_NO_AMAXES = ops.Amaxes()


def _draws(
    rng: AnyPhilox | Sequence[AnyPhilox] | None, n: int, recipe: Recipe, device: torch.device
) -> list[Draw | None]:
    """Return where every weight draws, then where the signs of all are drawn."""
    places = places_of(rng, n, recipe)
    if places is None:
        return [None] * (n + 1)
    signs = places[0].signs_on(device) if recipe.needs_sign_rng else None
    return [*[place.on(device) for place in places], signs]


class _SharedLinear(torch.autograd.Function):
    """x [..., K] and n weights in, n outputs [M, N_i] or [..., N_i] out, no views: these would refuse changes in place.

    `tensors` is n each of weights (None where frozen), biases, amaxes, main_grads, n + 1 rng bases, the last of the
    signs, then two amaxes of x, then the tensors of cached weights, then those of GradientAmaxes where there are any.
    What follows the biases may come in one `Beside`.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        is_eager = type(tensors[-1]) is Beside
        if is_eager:
            tensors = (*tensors[:-1], *tensors[-1])
        outputs, kept = run_forward(ctx, call, x, tensors)
        ctx.save_for_backward(*kept)
        return _shaped(call.request, outputs, x.shape) if is_eager else outputs

    @staticmethod
    @first_order(LINEAR)
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(ctx, ctx.saved_tensors, dys)


def run_forward(
    ctx: Any, call: Call, x: Tensor, tensors: Sequence[Any]
) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
    """Return the outputs [M, N_i] of an autograd function's forward, and what `run_backward` needs saved."""
    if not torch.compiler.is_compiling():  # compiled backward passes see zeros
        ctx.set_materialize_grads(False)  # of an output that nobody used, a weight has no gradient
    note(ctx, call, x, tensors)
    needs = ctx.needs_input_grad[1 : 2 + call.request.count]
    n = call.request.count
    tensors = tensors[: len(tensors) - call.earlier]
    if not call.earlier and whole.fits(call.request, needs, ctx.main_grads):
        made, ctx.layout = forward_op(call.request, needs, (x, *tensors), call.streams), None
    else:
        given = by_codes_alone(call.request, (x, *tensors))
        made, ctx.layout = _run(forward_pass, (call.request, needs), given, call.streams)
    return made[:n], (*made[n:], *bases_of(call, tensors))


def run_backward(ctx: Any, kept: Sequence[Tensor | None], dys: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of an autograd function whose forward called `run_forward` and saved `kept`."""
    if ctx.layout is None:
        return as_gradients(ctx, backward_op(_BACKWARD, ctx, kept, dys))
    layout, saved = ctx.layout, kept
    if ctx.call.late:
        layout, saved = with_late(ctx.call.late, layout, saved, ctx.needs_input_grad[1])
    request, n = ctx.call.request, ctx.call.request.count
    needs, amaxes = ctx.needs_input_grad[1 : 2 + 2 * n], []
    if ctx.earlier:
        amaxes = of_gradients(request, ctx.earlier, dys, needs, (saved[len(saved) - n - 1 :], ctx.call.streams))
    static = request, layout, needs, ctx.dtypes
    gradients, _ = _run(backward_pass, static, (*saved, *dys, *ctx.main_grads, *amaxes), ctx.call.streams)
    return as_gradients(ctx, gradients)


def note(ctx: Any, call: Call, x: Tensor, tensors: Sequence[Any]) -> None:
    """Note on ctx what the backward needs beside saved tensors."""
    n = call.request.count
    ctx.call, ctx.x_shape, ctx.main_grads = call, x.shape, tensors[3 * n : 4 * n]
    ctx.earlier = tensors[len(tensors) - call.earlier :]
    biases = tuple([None if b is None else b.dtype for b in tensors[n : 2 * n]])
    ctx.dtypes = x.dtype, tuple([None if w is None else w.dtype for w in tensors[:n]]), biases


def as_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return what `gradients_of` returned as an autograd function returns it."""
    dx, *others = gradients
    if dx is not None and len(ctx.x_shape) != 2:
        (shaped,) = ops.in_shape([dx], tuple(ctx.x_shape[:-1]))
        dx = shaped if shaped.shape == ctx.x_shape else dx.view(ctx.x_shape)
    return None, dx, *others, *[None] * (len(ctx.needs_input_grad) - 2 - len(others))


def bases_of(call: Call, tensors: Sequence[Any]) -> Sequence[Tensor | None]:
    """Return the bases among the tensors of a call."""
    return tensors[4 * call.request.count : 5 * call.request.count + 1]


def forward_op(request: Request, needs: Sequence[bool], tensors: Sequence[Any], streams: Sequence[int]) -> tuple:
    """Return the tensors that `forward_pass` returns, made by one op."""
    n = request.count
    outputs = _FORWARD(whole.request_text(request, needs), list(by_codes_alone(request, tensors)), [], list(streams))
    given = tensors[1 + 2 * n : 1 + 3 * n], tensors[5 * n + 2 : 5 * n + 4], tensors[5 * n + 4 :]
    return *outputs[:n], *whole.saved(request, needs, outputs[n:], given)


def backward_op(op: Any, ctx: Any, kept: Sequence[Tensor | None], dys: Sequence[Tensor | None], *more: str) -> list:
    """Return the gradients of x, of each weight and of each bias, made by one op.

    Args:
        op: the pass.
        ctx: of the autograd function; see `note`.
        kept: what was saved.
        dys: of each output, or what came instead.
        more: what else is static, as texts.
    """
    request, needs = ctx.call.request, ctx.needs_input_grad[1:]
    n = request.count
    needs = needs[: 1 + 2 * n]
    text = whole.request_text(request, needs, whole.dtypes_text(ctx.dtypes), *more)
    used = [dy is not None for dy in dys] if len(dys) == n else [True] * n
    wanted = [needs[0] and any(used), *[need and use for need, use in zip(needs[1:], used * 2, strict=True)]]
    return whole.present(op(text, [*kept, *dys], [ctx.x_shape[-1]], list(ctx.call.streams[: n + 1])), wanted)


def forward_pass(static: tuple, tensors: Sequence[Any], streams: Sequence[int]) -> tuple[tuple, Saved]:
    """Return the outputs, then the tensors of what the backward needs; and the layout of these.

    Args:
        static: the request, and whether x and each weight need gradients.
        tensors: x, and those of `_SharedLinear`.
        streams: of the call.
    """
    request, needs = static
    outputs, kept = multiply(request, needs, tensors, streams)
    flat, layout = flatten_operands(kept)
    return (*outputs, *flat), layout


def backward_pass(static: tuple, tensors: Sequence[Any], streams: Sequence[int]) -> tuple[tuple, None]:
    """Return the gradients of x, of each weight and of each bias.

    Args:
        static: the request, the layout of what was saved, which inputs need gradients, and the dtypes of `note`.
        tensors: what was saved, the bases, dy of each weight, main_grad of each weight, two amaxes of each dy or none.
        streams: of the call.
    """
    request, layout, needs, dtypes = static
    n = request.count
    kept, rest = unflatten_operands(layout, tensors)
    bases, dys, grads = rest[: n + 1], rest[n + 1 : 2 * n + 1], rest[2 * n + 1 : 3 * n + 1]
    draws, amaxes = draws_of(request, bases, streams), in_pairs(rest[3 * n + 1 :], n)
    return gradients_of(request, (kept, draws, grads), dys, amaxes, (needs, dtypes)), None


def _forward_whole(text: str, tensors: Sequence[Any], sizes: Sequence[int], streams: Sequence[int]) -> tuple:
    request, needs, _ = whole.parse_request(text)
    made, _ = forward_pass((request, needs), tensors, streams)
    return tuple(whole.made_of(request, made, tensors))


def _backward_whole(text: str, tensors: Sequence[Any], sizes: Sequence[int], streams: Sequence[int]) -> tuple:
    request, needs, (dtypes,) = whole.parse_request(text)
    n = request.count
    layout = whole.layout_of(request, needs[: 1 + n], tensors[-n:], sizes[0])
    static = request, layout, needs, whole.parse_dtypes(dtypes, n)
    gradients, _ = backward_pass(static, (*tensors, *[None] * n), streams)
    return gradients


_FORWARD = ops.define_pass("linear_forward", _forward_whole)
_BACKWARD = ops.define_pass("linear_backward", _backward_whole)
