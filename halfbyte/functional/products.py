"""The three products of linear layers that read one input, and their operands: what a pass of either kind computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from halfbyte import ops
from halfbyte.functional.channels import Apart, kept_for_backward, outliers_apart, product_with_channels, with_outliers
from halfbyte.functional.frozen import frozen_right
from halfbyte.functional.group import waited
from halfbyte.functional.mean import amaxes_with_product, bias_with_mean, both_with_sum, both_without_mean
from halfbyte.functional.meeting import Asked, whole_amaxes
from halfbyte.functional.operands import (
    BF16_GEMM,
    Place,
    add_dx,
    for_all,
    gradient_specs,
    missing_specs,
    right_operand,
    shared_amaxes,
    weight_gradient,
    weight_operands,
)
from halfbyte.functional.places import (
    DGRAD_SIGNS,
    DY,
    FPROP_SIGNS,
    WGRAD_SIGNS,
    W,
    X,
)
from halfbyte.functional.request import Request, draws_of
from halfbyte.functional.tokens import added, arrived_sum, received, sent, token_sum
from halfbyte.functional.weights import unflatten
from halfbyte.layout import matrix_shape


def multiply(
    request: Request, needs: Sequence[bool], tensors: Sequence[Any], streams: Sequence[int]
) -> tuple[list[Tensor], list]:
    """Return the outputs [M, N_i], and what the backward needs of x, of each weight, of x's mean and of channels.

    Arguments are those of `forward_pass`.
    """
    n, recipe = request.count, request.recipe
    x, *tensors = tensors
    weights, biases, amaxes = (tensors[i * n : (i + 1) * n] for i in range(3))
    need_dx, *need_dw = [request.save and need for need in needs]
    fprop, dgrad, wgrad = (gemm or BF16_GEMM for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    dequantized = recipe.backward == "dequantized"
    cached = unflatten(request.cached, tensors[5 * n + 3 :])
    x_MK = waited(x).reshape(matrix_shape(x.shape))
    *draws, signs = draws_of(request, tensors[4 * n : 5 * n + 1], streams)
    keep_x = any(need_dw)
    x_col_spec = wgrad.b if keep_x and not dequantized else None
    is_transient = not dequantized and recipe.channels is None
    place = Place(draws[0], signs, X, (FPROP_SIGNS, WGRAD_SIGNS), (is_transient, False))
    needed = fprop.b, dgrad.b if need_dx and not dequantized else None
    w_places = [Place(draw, signs, W, (FPROP_SIGNS, DGRAD_SIGNS), (is_transient, False)) for draw in draws]
    x_amaxes = ops.Amaxes(*tensors[5 * n + 1 : 5 * n + 3])
    w_amaxes = [shared_amaxes(missing_specs(needed, cached[i]), amaxes[request.amax_of[i]]) for i in range(n)]
    if request.splits is not None or request.tokens is not None:
        of_x = Asked(request.part(0, "MK"), x_MK, (fprop.a, x_col_spec), place, x_amaxes)
        x_amaxes, w_amaxes = _whole(request, of_x, (weights, amaxes), (needed, cached, w_places))
    mean, apart = None, Apart()
    if recipe.splits_mean:
        row, col, mean = both_without_mean(x_MK, (fprop.a, x_col_spec), place, request.maker(0, "MK"))
    elif recipe.channels is not None and recipe.channels.kind == "mxfp8":
        row, col, apart = outliers_apart(x_MK, recipe.channels, (fprop.a, x_col_spec), place)
    else:
        row, col = request.maker(0, "MK")(x_MK, fprop.a, x_col_spec, place, x_amaxes)
    kept_x = (row if dequantized else col) if keep_x else None
    row, outputs, kept_w = sent(request.tokens, "x", row, 0), [], []
    for i, w in enumerate(weights):
        (w_row, w_col), v = cached[i], None
        bias = biases[i] if request.adds_bias(i) else None
        apart_mean = mean if fprop.a is not None else None
        if _is_quantized(request, i, w):
            make = request.maker(i, "NK")
            if apart_mean is not None:
                missing = missing_specs(needed, cached[i])
                w_amaxes[i], v = amaxes_with_product(w, (apart_mean, bias), missing, w_amaxes[i], make)
            w_row, w_col = weight_operands(w, needed, cached[i], w_places[i], w_amaxes[i], make)
        if apart_mean is not None:
            bias = bias_with_mean(bias, apart_mean, w_row if w is None else w, x.dtype) if v is None else v
        row = received(row)
        y = added(request.tokens, "y", _product(request, (x_MK, row, apart), (w, w_row), bias))
        outputs.append(y if request.tokens is None else arrived_sum(y))
        is_fprops = dequantized or request.cached[i].is_frozen
        kept_w.append((w_row if is_fprops else w_col) if need_dx else None)
    return outputs, [kept_x, *kept_w, mean if x_col_spec else None, *kept_for_backward(apart)]


def _is_quantized(request: Request, index: int, w: Tensor | None) -> bool:
    """Whether a forward makes operands of a weight."""
    return w is not None and not (request.cached[index].is_frozen or request.cached[index].is_late)


def _whole(
    request: Request, of_x: Asked, of_w: tuple[Sequence[Any], Sequence[Any]], how: tuple
) -> tuple[ops.Amaxes, list]:
    """Return the amaxes of x and of each weight of which ranks hold parts, as far as they have to meet for them.

    Args:
        of_x: how x is quantized.
        of_w: the weights, and the amaxes that siblings share.
        how: the specs of a weight's operands, then for each weight those that it has, and its place.

    Returns:
        Those of x, and a pair for each weight.
    """
    (weights, shared), (specs, cached, places), asked = of_w, how, [of_x]
    if request.recipe.splits_mean:  # what is left of x is quantized
        asked = [of_x._replace(part=None)]
    missing = [missing_specs(specs, one) for one in cached]
    for i, w in enumerate(weights):
        part = request.part(i, "NK") if _is_quantized(request, i, w) else None
        known = shared_amaxes(missing[i], shared[request.amax_of[i]])
        asked.append(Asked(part, of_x.t if w is None else w, missing[i], places[i], known))
    own = [amax for amax in shared if amax is not None] if request.amaxes_of_parts else []
    (x_amaxes, *w_amaxes), whole = whole_amaxes(asked, own)
    if own:
        found = iter(whole)
        shared = [None if amax is None else next(found) for amax in shared]
        known = [shared_amaxes(missing[i], shared[request.amax_of[i]]) for i in range(len(weights))]
        w_amaxes = [
            ops.Amaxes(*(measured if one is None else one for one, measured in zip(*pairs, strict=True)))
            for pairs in zip(known, w_amaxes, strict=True)
        ]
    return x_amaxes, w_amaxes


def _product(request: Request, x: tuple, w: tuple, bias: Tensor | None) -> Tensor:
    """Return fprop's output of x, its operand and what is apart of it, and of a weight and its operand."""
    recipe = request.recipe
    if recipe.channels is not None:
        return product_with_channels(x, w, recipe, bias, request.out_dtype)
    batch_invariant = recipe.fprop is not None and recipe.fprop.batch_invariant
    product = ops.gemm_nt_batch_invariant if batch_invariant else ops.gemm_nt
    return product(x[1], w[1], out_dtype=request.out_dtype, bias=bias)


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
    n, ((x_col, *w_cols, mean, index, x_I), (*draws, signs), main_grads) = request.count, state
    needs, (x_dtype, w_dtypes, b_dtypes) = wanted
    dgrad, wgrad = (gemm or BF16_GEMM for gemm in (request.recipe.dgrad, request.recipe.wgrad))
    need_dx, need_dw, need_db = needs[0], needs[1 : 1 + n], needs[1 + n : 1 + 2 * n]
    dx: Tensor | None = None
    dws: list[Tensor | None] = [None] * n
    dbs: list[Tensor | None] = [None] * n
    tokens, dequantized = request.tokens, request.recipe.backward == "dequantized"
    x_right, x_col = None, sent(tokens, "x", x_col, 0 if dequantized else 1)
    matrices = {i: waited(dy).reshape(matrix_shape(dy.shape)) for i, dy in enumerate(dys) if dy is not None}
    asked = {i: _asked_of_dy(request, i, dy_MN, (draws[i], signs, amaxes[i], needs)) for i, dy_MN in matrices.items()}
    used = list(matrices)
    dy_amaxes = dict(zip(asked, whole_amaxes(list(asked.values()))[0], strict=True))
    for i, dy_MN in matrices.items():
        (row_spec, col_spec), place = asked[i].specs, asked[i].place
        outer, make = None, request.maker(i, "MN")
        if mean is None or not need_dw[i]:
            row, col = make(dy_MN, row_spec, col_spec, place, dy_amaxes[i])
        else:
            row, col, s_N = both_with_sum(dy_MN, (row_spec, col_spec), place, dy_amaxes[i], make)
            outer = s_N, mean
        row, col = sent(tokens, "y", row if need_dx else None, 0), sent(tokens, "y", col if need_dw[i] else None, 1)
        if need_dx:
            place = Place(draws[i], signs, W, (FPROP_SIGNS, DGRAD_SIGNS), (False, True))
            if request.cached[i].is_frozen:
                right = frozen_right(w_cols[i], request.recipe, dgrad.b, place, x_dtype)
            else:
                make = request.maker(i, "NK", moved=True)
                right = right_operand(w_cols[i], request.recipe, dgrad.b, place, x_dtype, make)
            dx = add_dx(dx, received(row), right, last=i == used[-1], dtype=x_dtype)
            dx = added(tokens, "x", dx) if i == used[-1] else dx
        if need_dw[i]:
            if x_right is None:
                place = Place(draws[0], signs, X, (FPROP_SIGNS, WGRAD_SIGNS), (False, True))
                make = request.maker(0, "MK", moved=True)
                right = right_operand(received(x_col), request.recipe, wgrad.b, place, x_dtype, make)
                x_right = for_all(right, sum(need_dw[j] for j in matrices))
            dw = weight_gradient(received(col), x_right, (x_dtype, w_dtypes[i]), main_grads[i], outer)
            dws[i] = with_outliers(dw, dy_MN, (index, x_I), x_dtype, main_grads[i])
        if need_db[i]:
            s_N = token_sum(tokens, dy_MN) if outer is None else outer[0]
            dbs[i] = s_N.to(b_dtypes[i])
    return (dx if dx is None or tokens is None else arrived_sum(dx)), *dws, *dbs


def _asked_of_dy(request: Request, index: int, dy_MN: Tensor, how: tuple) -> Asked:
    """Return how the gradient of one output is quantized.

    Args:
        how: where the layer draws, where the signs of all are drawn, known amaxes, and what needs gradients.
    """
    draw, signs, amaxes, needs = how
    specs = gradient_specs(request.recipe, needs[0], needs[1 + index])
    place = Place(draw, signs, DY, (DGRAD_SIGNS, WGRAD_SIGNS), (True, True))
    return Asked(request.part(index, "MN"), dy_MN, specs, place, amaxes)
