"""The linear layers of a mixture of experts: the essay of linear.py, once per group of tokens.

Tokens arrive sorted by expert; `offsets` says where each expert's group ends. Expert g computes

    fprop   y_g  = x_g @ w_g.T       2d-3d: groups along the rows of x, one weight matrix each
    dgrad   dx_g = dy_g @ w_g        2d-3d, with col(w_g)
    wgrad   dw_g = dy_g.T @ x_g      2d-2d: groups along the contraction, the tokens

and each GEMM of a recipe quantizes its operands group by group: every group has an amax, blocks, a rotation and random
bits of its own, so that the result is, bit for bit, that of `linear` on each group with seed + g * 0x9E3779B97F4A7C15.

Nothing here depends on the sizes of the groups but the contents of tensors: shapes follow from the number of tokens and
experts, and tokens behind the last group are padding with zero outputs and gradients.

Shape suffixes: M tokens, E experts, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.derivatives import EXPERTS, first_order, refuse_transforms
from halfbyte.functional.dispatch import check_row
from halfbyte.functional.earlier import ExpertAmaxes, GradientAmaxes, of_expert_gradients, refuse_delayed
from halfbyte.functional.foreign import refuse_foreign
from halfbyte.functional.gemm import check_operand, check_output
from halfbyte.functional.group import waited
from halfbyte.functional.group_bias import with_bias
from halfbyte.functional.grouped_checks import check_alike, refuse_what_is_no_tensor
from halfbyte.functional.grouped_split import both_of_part, part_of_experts
from halfbyte.functional.operands import Beside, Place, Saved, both, flatten_operands, unflatten_operands, with_late
from halfbyte.functional.places import DGRAD_SIGNS, DY, FPROP_SIGNS, WGRAD_SIGNS, W, X, bases_of_experts
from halfbyte.functional.primary import primary_experts, turned_experts
from halfbyte.functional.split import LayerSplit, Part
from halfbyte.functional.weights import CachedWeight, Layout, check_cached, covers, flatten, unflatten
from halfbyte.layout import Blocks, EndsOfGroups, as_offsets
from halfbyte.recipes import resolve
from halfbyte.rng import AnyPhilox, Draw
from halfbyte.sides import Side
from halfbyte.spec import GemmSpec, Recipe, Spec
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.primary import PrimaryWeight

_PLAIN_GEMM = GemmSpec()


def grouped_gemm_nt(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return a_g @ b_g.T of every group: each as `gemm_nt` computes it.

    Args:
        a: QuantTensor or plain tokens [M, K] in groups along M; or [R, M] with the groups along the contraction.
        b: QuantTensor or plain experts [E, N, K]; or [C, M] with the groups along the contraction.
        offsets: int32 [E], cumulative ends of the groups along M; tokens behind the last one are padding.
        out_dtype: bf16 (default), fp16 or fp32; `out` decides if given.
        out: [M, N] or [E, R, C] to write into.
        accumulate: add to what `out` holds.
        backend: "reference", "triton", "native", "portable" on an AMD GPU, or None to choose.

    Returns:
        [M, N], padding rows zero; or [E, R, C], zero for a group without tokens.

    Raises:
        ValueError: shapes, groups, rotations or block lengths of the operands do not meet.
        TypeError: offsets is no integer tensor, or an operand or the output has another dtype than bf16, fp16 or fp32.
    """
    check_operand("a", a)
    check_operand("b", b)
    ops.check_offsets(offsets, a)
    contraction = b.dim() == 2
    if a.dim() != 2 or b.dim() not in (2, 3):
        raise ValueError(
            f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: give [M, K] and [E, N, K], or two matrices"
        )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: the last dimensions must be equal")
    groups = offsets.shape[0]
    if not contraction and b.shape[0] != groups:
        raise ValueError(f"b.shape={tuple(b.shape)}: offsets has {groups} groups; give one matrix per group")
    for name, operand, split_columns in (("a", a, contraction), ("b", b, contraction)):
        _check_groups(name, operand, groups, split_columns)
    shape = (groups, a.shape[0], b.shape[0]) if contraction else (a.shape[0], b.shape[1])
    check_output(shape, out_dtype, out, accumulate)
    for name, other in (("b", b), ("out", out)):
        if other is not None and other.device != a.device:
            raise ValueError(f"{name}.device={other.device}, a.device={a.device}: move one of them")
    # Refuses NVFP4 against MXFP8 and unequal rotations, naming the remedy.
    GemmSpec(a=getattr(a, "spec", None), b=getattr(b, "spec", None))
    options = {"out_dtype": out_dtype or torch.bfloat16, "out": out, "accumulate": accumulate, "backend": backend}
    with torch.no_grad():
        return ops.grouped_gemm_nt(_operand(a), _operand(b), offsets, **options)


def _check_groups(name: str, operand: Tensor, groups: int, split_columns: bool) -> None:
    if not isinstance(operand, QuantTensor):
        return
    own = operand.group_offsets
    if own is None or own.shape[0] != groups or operand.splits_columns != split_columns:
        has = "no groups" if own is None else f"{own.shape[0]} groups along dimension {int(operand.splits_columns)}"
        raise ValueError(
            f"{name} has {has}: this product needs {groups} along dimension {int(split_columns)}; "
            "quantize it with hb.grouped_quantize_row_col"
        )


def _operand(x: Tensor) -> Tensor | ops.Operand:
    if not isinstance(x, QuantTensor):
        return x
    blocks = x.blocks
    if x.dim() == 3:  # the op takes one matrix per expert
        qdata, block_scale = (t.unflatten(0, (x.shape[0], -1)) for t in blocks[:2])
        amax = blocks.amax if blocks.amax.numel() in (0, x.shape[0]) else blocks.amax.unflatten(0, (x.shape[0], -1))
        blocks = blocks._replace(qdata=qdata, block_scale=block_scale, amax=amax)
    return ops.Operand(blocks, x.spec, x.shape[-1], x.scale_layout)


def grouped_linear(
    x: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    recipe: Recipe | str = Recipe(),  # noqa: B008  a frozen value
    *,
    bias_EN: Tensor | None = None,
    rng: AnyPhilox | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad: Tensor | None = None,
    cached_weight: CachedWeight | None = None,
    x_row: QuantTensor | None = None,
    split: LayerSplit | None = None,
    earlier: ExpertAmaxes | None = None,
) -> Tensor:
    """Return x_g @ w_g.T + bias_g of every group of tokens with the three GEMMs of `recipe`.

    Args:
        x: bf16, fp16 or fp32 [M, K], sorted by expert.
        w_ENK: [E, N, K] of x's dtype; under autocast both are cast.
        offsets: int32 [E] on x's device, cumulative ends of the groups; tokens behind the last one are padding.
        recipe: how each operand is quantized; a Recipe or a preset's name. One that delays its amaxes takes `earlier`.
        bias_EN: [E, N] or None; added in fp32 before the product is rounded. Its gradient is the sum of dy over each
            group's tokens in fp32, zero for a group without, rounded once to the bias's own dtype.
        rng: the place in the random stream; needed if the recipe draws. It uses 16 offsets from there on.
        out_dtype: dtype of the result, by default x's.
        main_grad: fp32 [E, N, K]; the weight gradient is added to it in fp32 and autograd receives none for w.
        cached_weight: w_ENK quantized before, as `hb.cache_weights` keeps it; it is then only differentiated.
        x_row: x quantized along its rows before, each with its own amax, as tokens arrive that travelled as codes;
            fprop reads it, and x is what it stands for.
        split: how ranks share every expert, as styles of hb.distributed have it; tensors are then what is here of them.
        earlier: what a layer does with the amaxes of earlier steps that it keeps, as hb.nn.GroupedLinear does.

    Returns:
        out_dtype [M, N]; rows of padding are zero, and so are their gradients.

    Raises:
        ValueError: shapes do not fit, the recipe draws and rng is None, or it delays its amaxes and nobody keeps them.
        TypeError: dtypes do not fit.
    """
    refuse_what_is_no_tensor(x, w_ENK)
    if torch.compiler.is_compiling() and isinstance(w_ENK, PrimaryWeight):
        from halfbyte.functional.eager import eagerly

        more = {"bias_EN": bias_EN, "rng": rng, "out_dtype": out_dtype, "main_grad": main_grad, "x_row": x_row}
        return eagerly(grouped_linear, (x, w_ENK, offsets, recipe), {**more, "split": split, "earlier": earlier})
    recipe = _followed(recipe, earlier)
    if isinstance(w_ENK, PrimaryWeight):
        w_ENK, cached_weight = primary_experts(w_ENK, recipe)
    is_primary = isinstance(w_ENK, PrimaryWeight)
    refuse_transforms((x, w_ENK, bias_EN), EXPERTS)
    is_covered = is_primary or covers(cached_weight, recipe)
    if (dtype := autocast_dtype(x.device)) is not None:
        refuse_foreign((("x", x), ("w_ENK", w_ENK), ("bias_EN", bias_EN)))
        x, w_ENK, bias_EN = _cast(dtype, x, w_ENK, bias_EN, is_covered)
    tensors = x, w_ENK, bias_EN, offsets, main_grad
    check_alike(tensors, out_dtype, is_covered)
    _check_cached(cached_weight, recipe, x, is_primary)
    operands = check_row(x_row, x, recipe), cached_weight, split, _NO_AMAXES if earlier is None else earlier
    return _outputs(recipe, out_dtype or x.dtype, rng, tensors, operands)


_NO_AMAXES = ExpertAmaxes()


def _cast(
    dtype: torch.dtype, x: Tensor, w: Tensor, bias: Tensor | None, is_covered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return them in autocast's dtype, the weight where it is read."""
    return x.to(dtype), w if is_covered else w.to(dtype), None if bias is None else bias.to(dtype)


def _followed(recipe: Recipe | str, earlier: ExpertAmaxes | None) -> Recipe:
    """Return the recipe, of what experts can follow without or with the amaxes that a layer keeps."""
    recipe = recipe_of_experts(recipe)
    if earlier is None:
        refuse_delayed(recipe, "experts whose amaxes no layer keeps")
    return recipe


def _outputs(
    recipe: Recipe,
    out_dtype: torch.dtype,
    rng: AnyPhilox | None,
    tensors: tuple,
    operands: tuple[ops.Operand | None, CachedWeight | None, LayerSplit | None, ExpertAmaxes],
) -> Tensor:
    """Return what `grouped_linear` does, of checked tensors, operands of x and w that came along, parts and amaxes."""
    row, cached, split, earlier = operands
    draw, signs = _places(recipe, rng, tensors[0].device)
    (layout,), buffers = flatten([cached])
    late = cached if layout.is_late else None
    buffers = [*(row.blocks if row else ()), *buffers]
    call = _Call(recipe, out_dtype, torch.is_grad_enabled(), layout, row and row[1:], split)
    if draw is not None and call.save and not torch.compiler.is_compiling():
        call = call._replace(copies=True)
    stream, bases = (0, (None, None)) if draw is None else (draw.stream, bases_of_experts(draw, signs, call.copies))
    how, rest = (call, stream, late, earlier.lacks), (*tensors[3:], *bases, *earlier.x, *earlier.dy, *buffers)
    if torch.compiler.is_compiling():
        return _GroupedLinear.apply(how, *tensors[:3], *rest)
    if call.save:
        return _GroupedLinear.apply(how, *tensors[:3], Beside(rest))
    return _run_forward(how, (False, False), tensors[:3], rest)[0]  # as layers of one weight do, without autograd


def recipe_of_experts(recipe: Recipe | str) -> Recipe:
    """Return the recipe, of what experts can follow.

    Raises:
        ValueError: it splits a mean off or takes channels apart.
    """
    recipe = resolve(recipe)
    if recipe.channels is not None:
        raise ValueError(
            f"recipe.channels={recipe.channels}: experts do not take channels apart; use dataclasses.replace(recipe, "
            "channels=None) for them, in hb.quantize_ by rules"
        )
    if recipe.splits_mean:
        raise ValueError(
            "recipe.activation_mean='split': experts do not split a mean off; use dataclasses.replace(recipe, "
            "activation_mean='kept') for them, in hb.quantize_ by rules"
        )
    return recipe


def _places(recipe: Recipe, rng: AnyPhilox | None, device: torch.device) -> tuple[Draw | None, Draw | None]:
    """Return where a layer draws rounding bits and where signs, as far as the recipe does."""
    if not recipe.needs_rng:
        return None, None
    if rng is None:
        raise ValueError(
            "rng=None: the recipe draws random bits; pass rng=hb.Philox(seed, offset) or a RunState's place"
        )
    draw = rng.on(device)
    if draw.first_block or draw.blocks_per_row is not None:
        raise ValueError(f"rng.first_block={draw.first_block}: tokens and experts are whole; leave it out")
    return draw, rng.signs_on(device) if recipe.needs_sign_rng else None


class _Call(NamedTuple):
    """What is static about one call: everything that is no tensor, but the stream.

    row: of an operand of x that came along, what follows its blocks; None where x is quantized here.
    split: how ranks share every expert; None where they share none.
    copies: whether the forward copies where bits are drawn: a RunState may advance before the backward.
    """

    recipe: Recipe
    out_dtype: torch.dtype
    save: bool
    cached: Layout
    row: tuple | None = None
    split: LayerSplit | None = None
    copies: bool = False

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the biases: of partial sums the first rank alone."""
        return self.split is None or self.split.dim != "K" or self.split.rank == 0

    def run(self, function: Any, static: tuple, tensors: Sequence[Any], stream: int) -> tuple[tuple, Any]:
        """Return what a pass returns; what ranks sent each other before is awaited."""
        if self.split is not None:
            tensors = [None if t is None else waited(t) for t in tensors]
        return ops.run(function, static, tensors, (stream,))


class _GroupedLinear(torch.autograd.Function):
    """x, w, bias, offsets, main_grad, the rng's base, that of its signs if another, amaxes of x, GradientAmaxes, then
    tensors of x_row and of a cached weight in, y out.
    """

    @staticmethod
    def forward(ctx: Any, how: tuple, x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        # torch.compile without gradients drops ctx where there are as many arguments as parameters; here, never.
        rest = tuple(rest[0]) if type(rest[0]) is Beside else rest
        offsets, main_grad, base, sign_base = rest[:4]
        call, ctx.stream, ctx.late, ctx.lacks = how
        needs = tuple([call.save and need for need in ctx.needs_input_grad[1:3]])
        y, (copied, copied_signs, *kept), ctx.layout = _run_forward(how, needs, (x, w, bias), rest)
        if call.copies:
            base, sign_base = copied, copied_signs
        ctx.earlier = GradientAmaxes(*rest[6:10]) if [t for t in rest[6:10] if t is not None] else None
        ctx.call, ctx.dtypes, ctx.main_grad = call, (x.dtype, w.dtype), main_grad
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*kept, offsets, base, sign_base)
        return y

    @staticmethod
    @first_order(EXPERTS)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layout, saved = ctx.layout, ctx.saved_tensors  # once: checkpointing refuses a second time
        if ctx.late is not None:
            entries, saved = with_late((ctx.late,), layout[0], saved, ctx.needs_input_grad[1])
            layout = entries, layout[1]
        static, amaxes = (ctx.call, layout, ctx.needs_input_grad[1:3], ctx.dtypes), ops.Amaxes()
        if ctx.earlier is not None:
            how, (offsets, base, sign_base) = (ctx.call.recipe, ctx.needs_input_grad[1:3], ctx.lacks), saved[-3:]
            amaxes = of_expert_gradients(how, ctx.earlier, dy, offsets, _draws(base, sign_base, ctx.stream)[1])
        given = *saved, dy, ctx.main_grad, *amaxes
        (dx, dw), _ = ctx.call.run(_backward_pass, static, given, ctx.stream)
        db = ops.grouped_token_sum(dy, saved[-3]).to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return None, dx, dw, db, *[None] * (len(ctx.needs_input_grad) - 4)


def _run_forward(
    how: tuple, needs: tuple[bool, ...], given: tuple[Tensor, Tensor, Tensor | None], rest: Sequence[Any]
) -> tuple[Tensor, Sequence[Tensor], tuple]:
    """Return y, the tensors of what the backward needs, and their layout; arguments are those of `_GroupedLinear`.

    The first two tensors are copies of the bases, where the call copies them.
    """
    (call, stream, *_), (x, w, bias) = how, given
    adds = bias is not None and call.adds_bias
    product = call if not adds else call._replace(out_dtype=torch.float32)  # rounded with its bias, once
    values = None if isinstance(w, PrimaryWeight) else w  # of whose class nothing is recorded
    (y, *kept), layout = call.run(_forward_pass, (product, needs), (x, values, *rest[:6], *rest[10:]), stream)
    return with_bias(y, bias, rest[0]).to(call.out_dtype) if adds else y, kept, layout


def _forward_pass(static: tuple, tensors: Sequence[Any], streams: Sequence[int]) -> tuple[tuple, tuple[Saved, bool]]:
    """Return y, copies of the bases or None, then the tensors of what the backward needs; and their layout, and whether
    tiles are shared.
    """
    call, (need_dx, need_dw) = static
    x, w, offsets, _, base, sign_base, *others = tensors
    recipe = call.recipe
    fprop, dgrad, wgrad = (gemm or _PLAIN_GEMM for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    draws, groups = _draws(base, sign_base, streams[0]), ops.in_one_pass(offsets, base if call.copies else None)
    transient = (recipe.backward == "original", False)
    keeps_col = recipe.backward == "original"
    amaxes = ops.Amaxes(*others[:2])
    given, buffers = _given_row(call.row, others[2:])
    specs = None if given else fprop.a, wgrad.b if need_dw and keeps_col else None
    place = Place(*draws, X, (FPROP_SIGNS, WGRAD_SIGNS), transient)
    x_row, x_col = _both(x, groups, specs, place, part_of_experts(call.split, "MK"), amaxes)
    x_row = given or x_row
    specs = fprop.b, dgrad.b if need_dx and keeps_col else None
    cached = unflatten([call.cached], buffers)[0]
    is_whole = call.split is None and cached[1] is None
    shares_tiles = is_whole and _shares_tiles(specs, x.device if w is not None else None)
    transient = (transient[0] and not shares_tiles, False)
    place = Place(*draws, W, (FPROP_SIGNS, DGRAD_SIGNS), transient)
    specs = (specs[0], None) if shares_tiles else specs
    w_row, w_col = cached if w is None else _weight(w, specs, cached, (place, part_of_experts(call.split, "NK")))
    product = ops.grouped_gemm_nt_batch_invariant if fprop.batch_invariant else ops.grouped_gemm_nt
    y = product(x_row, w_row, groups, out_dtype=call.out_dtype)
    kept = (
        (x_col if keeps_col else x_row) if need_dw else None,
        (w_col if keeps_col and not shares_tiles else w_row) if need_dx else None,
    )
    flat, layout = flatten_operands(kept)
    copied = ops.copied_base(groups, base) if call.copies else None
    copied_signs = sign_base.clone() if call.copies and sign_base is not None else None
    return (y, copied, copied_signs, *flat), (layout, shares_tiles)


def _given_row(static: tuple | None, buffers: Sequence[Tensor]) -> tuple[ops.Operand | None, Sequence[Tensor]]:
    """Return the operand of x that came along, or None, and the buffers behind its own."""
    return (None, buffers) if static is None else (ops.Operand(Blocks(*buffers[:3]), *static), buffers[3:])


def _backward_pass(static: tuple, tensors: Sequence[Any], streams: Sequence[int]) -> tuple[tuple, None]:
    """Return the gradients of x and w."""
    call, (layout, shares_tiles), (need_dx, need_dw), (x_dtype, w_dtype) = static
    recipe, split = call.recipe, call.split
    (x_col, w_col), (offsets, base, sign_base, dy, main_grad, *amaxes) = unflatten_operands(layout, tensors)
    assert offsets is not None, "offsets are always saved"
    dgrad, wgrad = (gemm or _PLAIN_GEMM for gemm in (recipe.dgrad, recipe.wgrad))
    draws, groups = _draws(base, sign_base, streams[0]), ops.in_one_pass(offsets)
    specs = dgrad.a if need_dx else None, wgrad.a if need_dw else None
    place = Place(*draws, DY, (DGRAD_SIGNS, WGRAD_SIGNS), (True, True))
    row, col = _both(dy, groups, specs, place, part_of_experts(split, "MN"), ops.Amaxes(*amaxes))
    dx = dw = None
    if need_dx:
        place = Place(*draws, W, (FPROP_SIGNS, DGRAD_SIGNS), (False, True))
        how = recipe, dgrad.b, x_dtype, part_of_experts(split, "NK", moved=True)
        right = _turned(w_col) if shares_tiles else _right(w_col, None, how, place)
        dx = ops.grouped_gemm_nt(row, right, groups, out_dtype=x_dtype)
    if need_dw:
        place = Place(*draws, X, (FPROP_SIGNS, WGRAD_SIGNS), (False, True))
        right = _right(x_col, offsets, (recipe, wgrad.b, x_dtype, part_of_experts(split, "MK", moved=True)), place)
        if main_grad is None:
            dw = ops.grouped_gemm_nt(col, right, groups, out_dtype=x_dtype).to(w_dtype)
        else:
            ops.grouped_gemm_nt(col, right, groups, out=main_grad, accumulate=True)
    return (dx, dw), None


def _draws(base: Tensor | None, sign_base: Tensor | None, stream: int) -> tuple[Draw | None, Draw | None]:
    """Return where a layer draws rounding bits and where signs."""
    if base is None:
        return None, None
    return Draw(base, stream), Draw(base if sign_base is None else sign_base, stream)


def _both(
    t: Tensor,
    groups: EndsOfGroups | None,
    specs: tuple[Spec | None, Spec | None],
    place: Place,
    part: Part | None = None,
    amaxes: ops.Amaxes = ops.Amaxes(),  # noqa: B008  a tuple
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    """Return t and, group by group, t.T as GEMM operands, quantized where their spec is not None.

    Args:
        part: which of the tensor this is; None for all of it.
        amaxes: to quantize with; of a part its own, which no layer keeps.
    """
    if part is not None:
        return both_of_part(part, t, None if groups is None else as_offsets(groups), specs, place)

    def quantize(t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
        return ops.grouped_quantize_row_col(t, groups, row, col)

    return both(t, *specs, place, amaxes, quantize)


def _weight(w: Tensor, specs: tuple[Spec | None, Spec | None], cached: tuple, how: tuple[Place, Part | None]) -> tuple:
    """Return w and w.mT as GEMM operands: those that were quantized before, and the others quantized now."""
    missing = [spec if operand is None else None for spec, operand in zip(specs, cached, strict=True)]
    now = _both(w, None, (missing[0], missing[1]), *how)
    return tuple(operand if kept is None else kept for kept, operand in zip(cached, now, strict=True))


def _shares_tiles(specs: tuple[Spec | None, Spec | None], device: torch.device | None) -> bool:
    """Whether one quantization of the experts serves both GEMMs: tiles whose decoded values an emulated GEMM reads
    in either orientation; or that is all there is of them, which `device=None` says.
    """
    spec = specs[0]
    return spec is not None and spec == specs[1] and spec.is_tile and (device is None or ops.emulates(device))


def _turned(operand: ops.Operand) -> ops.Operand:
    """Return row-oriented tiles of experts [E, N, K] as the operand [E, K, N] of dgrad."""
    if not ops.emulates(operand.blocks.qdata.device):
        return turned_experts(operand)
    decoded = ops.grouped_decode(operand)
    blocks = decoded.blocks
    return ops.Operand(blocks._replace(qdata=blocks.qdata.mT), operand.spec, blocks.qdata.shape[1])


def _right(
    operand: Any,
    offsets: Tensor | None,
    how: tuple[Recipe, Spec | None, torch.dtype, Part | None],
    place: Place,
) -> ops.Operand | Tensor:
    """Return the right operand of a backward GEMM, as `operands.right_operand`.

    Args:
        how: the recipe, how a dequantized backward quantizes the values again, the dtype of the values, and which part
            of a tensor they are.
    """
    recipe, spec, dtype, part = how
    if recipe.backward == "original":
        return operand
    if isinstance(operand, ops.Operand):
        operand = ops.grouped_dequantize(operand, offsets, dtype)
    return _both(operand, offsets, (None, spec), place, part)[1]


def _check_cached(cached: CachedWeight | None, recipe: Recipe, x: Tensor, is_primary: bool) -> None:
    if cached is not None and is_primary and cached.row is not None:  # `primary_experts` compared the specs
        cached = cached._replace(col=None, is_frozen=True)
    check_cached(cached, recipe, x.dtype, x.device, primary=is_primary)
