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
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.derivatives import LINEAR, first_order, refuse_transforms
from halfbyte.functional.foreign import refuse_foreign
from halfbyte.functional.places import (
    DGRAD_SIGNS,
    DY,
    FPROP_SIGNS,
    WGRAD_SIGNS,
    W,
    X,
    at_stream,
    distinct,
    places_of,
    snapshot,
)
from halfbyte.functional.primary import primary_operands, runs_eagerly
from halfbyte.functional.weights import CachedWeight, Layout, check_cached, covers, flatten, takes_amax, unflatten
from halfbyte.layout import Blocks, from_rows, matrix_shape
from halfbyte.recipes import resolve
from halfbyte.rng import AnyPhilox, Draw
from halfbyte.spec import GemmSpec, Recipe, Spec
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.tensor.quant_tensor import check_value_dtype

_BF16_GEMM = GemmSpec()


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
        w: [N, K] of x's dtype; under autocast both are cast. A PrimaryWeight is used as it is.
        bias: [N] or None; its gradient is summed in fp32 and rounded once, to the bias's own dtype.
        recipe: how each operand is quantized; a Recipe or a preset's name.
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
    n, recipe = len(weights), resolve(recipe)
    given = (biases, weight_amaxes, main_grads, cached_weights)
    per_weight: list[list] = [[None] * n if t is None else list(t) for t in given]
    layers = Layers(list(weights), per_weight[0], per_weight[1], per_weight[2], per_weight[3], rng)
    return outputs_of(x, layers, recipe, out_dtype, x_amaxes)


class Layers(NamedTuple):
    """Linear layers that read one input: lists of one entry per layer, and the rng of `linear_shared`."""

    weights: list
    biases: list
    weight_amaxes: list
    main_grads: list
    cached_weights: list
    rng: AnyPhilox | Sequence[AnyPhilox] | None


def outputs_of(
    x: Tensor, layers: Layers, recipe: Recipe, out_dtype: torch.dtype | None, x_amaxes: ops.Amaxes | None
) -> tuple[Tensor, ...]:
    """Return what `linear_shared` does, of arguments in their places."""
    if runs_eagerly(layers.weights):
        from halfbyte.functional.eager import eagerly

        return eagerly(outputs_of, (x, layers, recipe, out_dtype, x_amaxes), {})
    call, tensors = prepare(x, layers, recipe, out_dtype, x_amaxes)
    if call is None:
        n = len(layers.weights)
        return tuple(F.linear(tensors[0], w, b) for w, b in zip(tensors[1 : n + 1], tensors[n + 1 :], strict=True))
    outputs = _SharedLinear.apply(call, *tensors)
    return outputs if x.dim() == 2 else tuple([from_rows(y, x.shape) for y in outputs])


def prepare(
    x: Tensor, layers: Layers, recipe: Recipe, out_dtype: torch.dtype | None, x_amaxes: ops.Amaxes | None
) -> tuple[Call | None, tuple]:
    """Return the static part of a call and its tensors: x first, as `run_forward` takes them.

    Returns None and (x, *weights, *biases) where everything stays in high precision.
    """
    weights, biases, amaxes, grads, cached, rng = layers
    n = len(weights)
    for i, w in enumerate(weights):
        if isinstance(w, PrimaryWeight):
            weights[i], cached[i] = primary_operands(w, recipe)
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, weights, biases = _autocast(dtype, x, weights, biases, [covers(c, recipe) for c in cached])
    if not recipe.specs and out_dtype in (None, x.dtype) and not any(g is not None for g in grads):
        _check(x, weights, biases, recipe, grads, cached)
        places_of(rng, n, recipe)
        return None, (x, *weights, *biases)
    refuse_transforms((x, *weights, *biases), LINEAR)
    draws = _draws(rng, n, recipe, x.device)
    # A tensor is passed once, however many weights share it: torch.compile refuses repeated inputs.
    bases, base_of = distinct([None if d is None else d.base for d in draws])
    amaxes, amax_of = distinct(amaxes)
    layouts, buffers = flatten(cached)
    shards = tuple([None if d is None else d[2:] for d in draws])
    request = Request(recipe, n, base_of, amax_of, shards, out_dtype or x.dtype, torch.is_grad_enabled(), layouts)
    request = _checked(request, x, (weights, biases, amaxes, grads, cached), out_dtype)
    call = Call(request, tuple([0 if d is None else d.stream for d in draws]))
    if request.save:
        bases = [snapshot(base) for base in bases]
    return call, (x, *weights, *biases, *amaxes, *grads, *bases, *(x_amaxes or _NO_AMAXES), *buffers)


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


@dataclass(frozen=True)
class Request:
    """What is static about calls that differ in tensors and streams alone.

    base_of, shards: the place of every weight, then that of the signs of all: which base is its own, and which part of
        an operand it quantizes, as Draw says.
    amax_of: for every weight, which of the amaxes is its own.
    save: whether gradients are recorded.
    cached: for every weight, which operands of it come along quantized.
    """

    recipe: Recipe
    count: int
    base_of: tuple[int, ...]
    amax_of: tuple[int, ...]
    shards: tuple[tuple[int, int | None] | None, ...]
    out_dtype: torch.dtype
    save: bool
    cached: tuple[Layout, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))


class Call(NamedTuple):
    """One call: its request, and the stream of every weight, then that of the signs."""

    request: Request
    streams: tuple[int, ...]


class _SharedLinear(torch.autograd.Function):
    """x [..., K] and n weights in, n outputs [M, N_i] out: a view from here would refuse changes in place.

    `tensors` is n each of weights, biases, amaxes, main_grads, n + 1 rng bases, the last of the signs, then two amaxes
    of x, then the tensors of cached weights.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        if not torch.compiler.is_compiling():  # compiled backward passes see zeros
            ctx.set_materialize_grads(False)  # of an output that nobody used, a weight has no gradient
        note(ctx, call, x, tensors)
        needs = ctx.needs_input_grad[1 : 2 + call.request.count]
        made, ctx.layout = ops.run(forward_pass, (call.request, needs), (x, *tensors), call.streams)
        n = call.request.count
        ctx.save_for_backward(*made[n:], *bases_of(call, tensors))
        return made[:n]

    @staticmethod
    @first_order(LINEAR)
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        static = ctx.call.request, ctx.layout, ctx.needs_input_grad[1:], ctx.dtypes
        given = *ctx.saved_tensors, *dys, *ctx.main_grads
        gradients, _ = ops.run(backward_pass, static, given, ctx.call.streams)
        return as_gradients(ctx, gradients)


def note(ctx: Any, call: Call, x: Tensor, tensors: Sequence[Any]) -> None:
    """Note on ctx what the backward needs beside saved tensors."""
    n = call.request.count
    ctx.call, ctx.x_shape, ctx.main_grads = call, x.shape, tensors[3 * n : 4 * n]
    biases = tuple([None if b is None else b.dtype for b in tensors[n : 2 * n]])
    ctx.dtypes = x.dtype, tuple([w.dtype for w in tensors[:n]]), biases


def as_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return what `gradients_of` returned as an autograd function returns it."""
    dx, *others = gradients
    dx = None if dx is None else dx.view(ctx.x_shape)
    return None, dx, *others, *[None] * (len(ctx.needs_input_grad) - 2 - len(others))


def bases_of(call: Call, tensors: Sequence[Any]) -> Sequence[Tensor | None]:
    """Return the bases among the tensors of a call."""
    return tensors[4 * call.request.count : 5 * call.request.count + 1]


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
        tensors: what was saved, the bases, dy of each weight, main_grad of each weight.
        streams: of the call.
    """
    request, layout, needs, dtypes = static
    n = request.count
    kept, rest = unflatten_operands(layout, tensors)
    bases, dys, grads = rest[: n + 1], rest[n + 1 : 2 * n + 1], rest[2 * n + 1 :]
    draws = draws_of(request, bases, streams)
    return gradients_of(request, (kept, draws, grads), dys, [ops.Amaxes()] * n, (needs, dtypes)), None


def multiply(
    request: Request, needs: Sequence[bool], tensors: Sequence[Any], streams: Sequence[int]
) -> tuple[list[Tensor], list]:
    """Return the outputs [M, N_i] and what the backward needs of x and of each weight; arguments as `forward_pass`."""
    n, recipe = request.count, request.recipe
    x, *tensors = tensors
    weights, biases, amaxes = (tensors[i * n : (i + 1) * n] for i in range(3))
    need_dx, *need_dw = [request.save and need for need in needs]
    fprop, dgrad, wgrad = (gemm or _BF16_GEMM for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    dequantized = recipe.backward == "dequantized"
    cached = unflatten(request.cached, tensors[5 * n + 3 :])
    x_MK = x.reshape(matrix_shape(x.shape))
    *draws, signs = draws_of(request, tensors[4 * n : 5 * n + 1], streams)
    keep_x = any(need_dw)
    x_col_spec = wgrad.b if keep_x and not dequantized else None
    place = _Place(draws[0], signs, X, (FPROP_SIGNS, WGRAD_SIGNS), (not dequantized, False))
    row, col = _both(x_MK, fprop.a, x_col_spec, place, ops.Amaxes(*tensors[5 * n + 1 : 5 * n + 3]))
    kept_x = (row if dequantized else col) if keep_x else None
    outputs, kept_w = [], []
    for i, w in enumerate(weights):
        needed = fprop.b, dgrad.b if need_dx and not dequantized else None
        place = _Place(draws[i], signs, W, (FPROP_SIGNS, DGRAD_SIGNS), (not dequantized, False))
        w_row, w_col = _weight(w, needed, cached[i], place, amaxes[request.amax_of[i]])
        outputs.append(ops.gemm_nt(row, w_row, out_dtype=request.out_dtype, bias=biases[i]))
        kept_w.append((w_row if dequantized else w_col) if need_dx else None)
    return outputs, [kept_x, *kept_w]


def gradients_of(
    request: Request,
    state: tuple[list, list, Sequence[Tensor | None]],
    dys: Sequence[Tensor | None],
    amaxes: Sequence[ops.Amaxes],
    wanted: tuple[Sequence[bool], tuple],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x [M, K], of each weight and of each bias.

    Args:
        request: of the call.
        state: what `multiply` kept, the draws, the main_grads.
        dys: of each output, or None.
        amaxes: of each dy, or None, as far as known.
        wanted: which of x, weights and biases need gradients, and the dtypes of `note`.
    """
    n, ((x_col, *w_cols), (*draws, signs), main_grads) = request.count, state
    needs, (x_dtype, w_dtypes, b_dtypes) = wanted
    need_dx, need_dw, need_db = needs[0], needs[1 : 1 + n], needs[1 + n : 1 + 2 * n]
    dx: Tensor | None = None
    dws: list[Tensor | None] = [None] * n
    dbs: list[Tensor | None] = [None] * n
    used = [i for i, dy in enumerate(dys) if dy is not None]
    for i, dy in enumerate(dys):
        if dy is None:
            continue
        dy_MN = dy.reshape(matrix_shape(dy.shape))
        row_spec, col_spec = gradient_specs(request.recipe, need_dx, need_dw[i])
        place = _Place(draws[i], signs, DY, (DGRAD_SIGNS, WGRAD_SIGNS), (True, True))
        row, col = _both(dy_MN, row_spec, col_spec, place, amaxes[i])
        if need_dx:
            dx = _add_dx(dx, row, _right(w_cols[i], request.recipe, x_dtype), last=i == used[-1], dtype=x_dtype)
        if need_dw[i]:
            right = _right(x_col, request.recipe, x_dtype)
            dws[i] = _weight_gradient(col, right, (x_dtype, w_dtypes[i]), main_grads[i])
        if need_db[i]:
            dbs[i] = dy_MN.sum(0, dtype=torch.float32).to(b_dtypes[i])
    return dx, *dws, *dbs


def gradient_specs(recipe: Recipe, need_dx: bool, need_dw: bool) -> tuple[Spec | None, Spec | None]:
    """Return how row(dy) and col(dy) are quantized, for the GEMMs that will run."""
    dgrad, wgrad = (gemm or _BF16_GEMM for gemm in (recipe.dgrad, recipe.wgrad))
    return dgrad.a if need_dx else None, wgrad.a if need_dw else None


class _Place(NamedTuple):
    """Where a tensor draws (its linear's stream, the first linear's signs, offsets within them) and what is kept.

    transient: whether row and col serve one GEMM at once, so that a backend may hand over decoded values.
    """

    own: Draw | None
    signs: Draw | None
    stream: int
    sign_streams: tuple[int, int]
    transient: tuple[bool, bool]


def _both(
    t: Tensor, row_spec: Spec | None, col_spec: Spec | None, place: _Place, amaxes: ops.Amaxes
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    """Return t and t.T as GEMM operands, quantized where their spec is not None."""
    rows, cols = t.shape
    own = at_stream(place.own, place.stream)
    row_sign, col_sign = (at_stream(place.signs, stream) for stream in place.sign_streams)
    row_amax, col_amax = (amax if spec else None for amax, spec in zip(amaxes, (row_spec, col_spec), strict=True))
    options = {"draw": own, "transient": place.transient}
    if row_spec and col_spec and row_spec.needs_sign_rng and col_spec.needs_sign_rng:
        # Two GEMMs with signs of their own: two quantizations, at the offsets that one call would use.
        row, _ = ops.quantize_row_col(t, row_spec, None, sign_draw=row_sign, row_amax=row_amax, **options)
        _, col = ops.quantize_row_col(t, None, col_spec, sign_draw=col_sign, col_amax=col_amax, **options)
    else:
        sign = col_sign if col_spec and col_spec.needs_sign_rng else row_sign
        row, col = ops.quantize_row_col(
            t, row_spec, col_spec, sign_draw=sign, row_amax=row_amax, col_amax=col_amax, **options
        )
    return (
        t if row is None or row_spec is None else ops.Operand(row, row_spec, cols),
        t.T if col is None or col_spec is None else ops.Operand(col, col_spec, rows),
    )


def _weight(
    w: Tensor, specs: tuple[Spec | None, Spec | None], cached: tuple, place: _Place, amax: Tensor | None
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    """Return w and w.T as GEMM operands: those that were quantized before, and the others quantized now."""
    missing = [spec if operand is None else None for spec, operand in zip(specs, cached, strict=True)]
    amaxes = ops.Amaxes(*(amax if takes_amax(spec) else None for spec in missing))
    now = _both(w, missing[0], missing[1], place, amaxes) if missing != [None, None] else (w, w.T)
    row, col = (operand if kept is None else kept for kept, operand in zip(cached, now, strict=True))
    return row, col


def _right(operand: ops.Operand | Tensor, recipe: Recipe, dtype: torch.dtype) -> ops.Operand | Tensor:
    """Return the right operand of a backward GEMM; a dequantized backward transposes what fprop saved."""
    if recipe.backward == "original":
        return operand
    if isinstance(operand, ops.Operand):
        operand = ops.dequantize(operand.blocks, operand.spec, operand.cols, dtype, operand.scale_layout)
    return operand.T


def _add_dx(dx: Tensor | None, row: Any, right: Any, *, last: bool, dtype: torch.dtype) -> Tensor:
    """Add one weight's dgrad to dx, which stays fp32 until the last one."""
    if dx is None:
        return ops.gemm_nt(row, right, out_dtype=dtype if last else torch.float32)
    dx = ops.gemm_nt(row, right, out=dx, accumulate=True)
    return dx.to(dtype) if last else dx


def _weight_gradient(
    col: Any, right: Any, dtypes: tuple[torch.dtype, torch.dtype], main_grad: Tensor | None
) -> Tensor | None:
    """Return the gradient in the dtype of the GEMMs, then in that of the weight: they differ under autocast."""
    if main_grad is None:
        return ops.gemm_nt(col, right, out_dtype=dtypes[0]).to(dtypes[1])
    ops.gemm_nt(col, right, out=main_grad, accumulate=True)
    return None


Saved = tuple
"""How to rebuild operands from saved tensors: (spec, cols, layout) of each, True for a plain one, or None."""


def flatten_operands(operands: Sequence[Any]) -> tuple[list[Tensor], Saved]:
    """Return the plain tensors of operands, which hooks on saved tensors see, and how to rebuild them."""
    tensors, layout = [], []
    for operand in operands:
        if isinstance(operand, ops.Operand):
            layout.append(operand[1:])
            tensors.extend(operand.blocks)
        else:
            layout.append(None if operand is None else True)
            tensors.extend([] if operand is None else [operand])
    return tensors, tuple(layout)


def unflatten_operands(layout: Saved, saved: Sequence[Any]) -> tuple[list, list]:
    """Return the operands, and the tensors behind theirs."""
    operands, tensors = [], list(saved)
    for entry in layout:
        if entry is None or entry is True:
            operands.append(tensors.pop(0) if entry else None)
        else:
            operands.append(ops.Operand(Blocks(*(tensors.pop(0) for _ in range(3))), *entry))
    return operands, tensors


def draws_of(request: Request, bases: Sequence[Tensor | None], streams: Sequence[int]) -> list[Draw | None]:
    """Return where every weight draws, then where the signs of all are drawn."""
    own = [bases[i] for i in request.base_of]
    return [
        None if base is None or shard is None else Draw(base, stream, *shard)
        for base, stream, shard in zip(own, streams, request.shards, strict=True)
    ]


def _autocast(
    dtype: torch.dtype,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    covered: Sequence[bool],
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Cast what the GEMMs will read; of a covered weight they read nothing."""
    weights = [w if is_covered else w.to(dtype) for w, is_covered in zip(weights, covered, strict=True)]
    return x.to(dtype), weights, [None if b is None else b.to(dtype) for b in biases]


_MAX_CHECKED = 4096
_CHECKED: dict[tuple, Request] = {}
"""Calls whose shapes, dtypes and options were found right: the latest."""


def _checked(request: Request, x: Tensor, given: tuple, out_dtype: torch.dtype | None) -> Request:
    """Check a call, unless one that looks the same to the checks has passed them; return the request that passed.

    Args:
        given: weights, biases, weight_amaxes, main_grads, cached_weights.
        out_dtype: as the caller gave it.
    """
    weights, biases, amaxes, grads, cached = given
    key = None
    if not torch.compiler.is_compiling():
        looks = [_looks(t) for t in (x, *weights, *biases, *amaxes, *grads)]
        looks += [None if c is None else (c.dtype, *[t.device for t in c.tensors]) for c in cached]
        # Of the request's fields those that no tensor shows; comparing strings is what costs least.
        key = (request.recipe.key, request.out_dtype, out_dtype, request.save, request.base_of, request.amax_of)
        key = (*key, request.shards, request.cached, *looks)
        passed = _CHECKED.get(key)
        if passed is not None:
            return passed
    refuse_foreign((("x", x), *(("w", w) for w in weights), *(("bias", bias) for bias in biases)))
    _check(x, weights, biases, request.recipe, grads, cached)
    _check_options(out_dtype, amaxes)
    if key is not None:
        if len(_CHECKED) >= _MAX_CHECKED:
            _CHECKED.clear()
        _CHECKED[key] = request
    return request


def _looks(tensor: Any) -> tuple | None:
    """Return what of a tensor the checks ask about."""
    if not isinstance(tensor, Tensor):
        return None if tensor is None else (type(tensor),)
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


def _check_options(out_dtype: torch.dtype | None, amaxes: Sequence[Tensor | None]) -> None:
    if out_dtype is not None:
        check_value_dtype("out_dtype", out_dtype, "name one of these and convert the result")
    for amax in amaxes:
        if amax is not None and not (isinstance(amax, Tensor) and amax.dtype == torch.float32 and amax.dim() == 0):
            raise TypeError(
                f"weight_amax={amax!r}: give a float32 tensor of shape [], such as w.detach().abs().max().float()"
            )


def _check(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence, recipe: Recipe, grads: Sequence, cached: Sequence
) -> None:
    if not weights:
        raise ValueError("weights=[]: give at least one weight")
    if x.dim() == 0:
        raise ValueError("x.shape=(): give at least one dimension, in_features")
    for name, tensors in (("x", [x]), ("w", weights)):
        if any(isinstance(t, QuantTensor) and not (name == "w" and isinstance(t, PrimaryWeight)) for t in tensors):
            raise TypeError(
                f"{name} is a QuantTensor: linear quantizes it itself; pass {name}.dequantize() or use gemm_nt"
            )
    for w, bias, grad, one in zip(weights, biases, grads, cached, strict=True):
        check_cached(one, recipe, x.dtype, x.device, primary=isinstance(w, PrimaryWeight))
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ValueError(f"w.shape={tuple(w.shape)}: x.shape={tuple(x.shape)} needs [out_features, {x.shape[-1]}]")
        if w.device != x.device:
            raise ValueError(f"w.device={w.device}, x.device={x.device}: move one of them")
        if w.dtype != x.dtype and not covers(one, recipe):
            raise TypeError(f"w.dtype={w.dtype}, x.dtype={x.dtype}: cast one of them, or use torch.autocast")
        if bias is not None and tuple(bias.shape) != (w.shape[0],):
            raise ValueError(f"bias.shape={tuple(bias.shape)}: w needs ({w.shape[0]},)")
        if bias is not None and not bias.is_floating_point():
            raise TypeError(f"bias.dtype={bias.dtype}: give a float dtype, such as {x.dtype}")
        if grad is not None and (grad.dtype != torch.float32 or grad.shape != w.shape):
            raise ValueError(f"main_grad is {grad.dtype} {tuple(grad.shape)}: give float32 {tuple(w.shape)}")
