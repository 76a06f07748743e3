"""fsdp_gather_nvfp4_: FSDP2 gathers weights as NVFP4 codes and scales, which are the operands of the GEMMs.

`fully_shard` leaves every rank some rows of each weight, and gathers the whole weight before the forward and again
before the backward of the module that it wrapped. Here the ranks quantize their rows once after the weights changed,
with one message for the amaxes of the whole model, and what FSDP2 gathers are codes and scale bytes: 0.252 of the bytes
of bf16. Nothing is quantized again where they arrive, and the bytes are those of the whole weight's quantization.

The weights know that they changed by the version counters of their shards, and by a hook on every optimizer's step,
since fused optimizers leave the counters as they are. What sends codes hangs on the shards' tensors, which `.to()`,
`load_state_dict(assign=True)` and others replace: it is put there again before every forward, and a layer refuses any
other weight than one that arrived as codes.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfbyte.distributed.agree import members_of
from halfbyte.distributed.fsdp_arrival import Arrival, Orders
from halfbyte.distributed.fsdp_cast import ShardCast
from halfbyte.distributed.fsdp_choice import (
    CALL,
    Home,
    gathered_together,
    group_of,
    holders_of,
    homes_of,
    is_exchanged,
    is_wrapped,
    param_dtype_of,
    reason_against,
    shards_of,
    wrapping_problem,
)
from halfbyte.distributed.fsdp_experts import ExpertCast, GatheredExperts
from halfbyte.distributed.fsdp_phase import BACKWARD, FORWARD, Mode, Phase, refuse_capture
from halfbyte.distributed.fsdp_reading import Reading, reading_of
from halfbyte.distributed.fsdp_report import GatherReport, GatherRow
from halfbyte.distributed.fsdp_rows import RowCast
from halfbyte.distributed.fsdp_weight import GatheredWeight, Precision
from halfbyte.distributed.same import agree_on_parameters
from halfbyte.functional.foreign import is_sharded
from halfbyte.nn.grouped import GroupedLinear
from halfbyte.nn.linear import LinearLayer
from halfbyte.tensor.quant_tensor import check_value_dtype


def fsdp_gather_nvfp4_(model: nn.Module, *, dtype: torch.dtype | None = None) -> WeightGather:
    """Let FSDP2 gather the weights of quantized layers as NVFP4 codes, in place; their bytes are as without.

    Call it after `hb.quantize_` and `torch.distributed.fsdp.fully_shard`, before the first forward, on every rank. It
    takes weights in 16x16 tiles or 1x16 blocks, rounded to nearest, that forward and backward read in that one form;
    all others are gathered in their values as before, and a warning and the report say why. `state_dict` stays plain,
    optimizers go on stepping the sharded parameters, and gradients are reduced as FSDP2 does. A forward under
    `hb.high_precision` also gathers the values, layer by layer.

    Args:
        model: converted and wrapped; itself, or blocks in it.
        dtype: what weights are rounded to before they are quantized, where forwards compute in another dtype than FSDP2
            gathers: that of `torch.autocast`. None: what it gathers in, `MixedPrecisionPolicy.param_dtype` or the
            parameters' own.

    Returns:
        A handle with the `report`, the `traffic` and `mark_changed()`; the model keeps it alive.

    Raises:
        ValueError: on every rank: fully_shard wrapped nothing of it, no weight can be gathered so, it has run already,
            FSDP2 offloads to the CPU or reshards to an integer, or gathers in another dtype below fp32 than `dtype`, or
            ranks differ in shapes, recipes or `dtype`. Forwards raise it where a CUDA graph is captured.
        RuntimeError: some rank does not make the call within `agree.AGREE_TIMEOUT`.
        TypeError: it is no module, or dtype none of these.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module that fully_shard wrapped")
    if dtype is not None:
        check_value_dtype("dtype", dtype, "name that of autocast, or leave it out")
    homes = homes_of(model)
    chosen, reasons = _choose(model, homes)
    problem = _problem(model, chosen, reasons) or _twice_rounded(homes, dtype)
    agree_on_parameters(CALL, members_of(None), problem, _facts(homes, chosen, reasons, dtype))
    gather = WeightGather(model, homes, GatherChoice(chosen, reasons, dtype))
    report = gather.report
    for what, kept in (("values", report.kept), ("values for the backward", report.kept_in_backward)):
        if kept:
            texts = sorted({f"{name}: {reason}" for name, reason in kept.items()})
            rest = f" and {len(texts) - 1} more (see the report)" if len(texts) > 1 else ""
            warnings.warn(f"{CALL}: gathered in their {what}: {texts[0]}{rest}")
    larger = [row for row in report.rows if row.backward_sent > row.values]
    if larger:
        row = max(larger, key=lambda row: row.backward_sent / row.values)
        warnings.warn(
            f"{CALL}: {row.name} takes {row.backward_sent / row.values:.1f} times the bytes of its values before the "
            f"backward, as {row.backward}: its ranks hold fewer rows than a block of w.T has, and messages have room "
            "for a block each; share it among fewer ranks (HSDP), or use a recipe in 16x16 tiles"
        )
    return gather


def reason_for_values(model: nn.Module) -> str | None:
    """Return why nothing of a model that fully_shard wrapped can be gathered as NVFP4; None if some weight can."""
    chosen, reasons = _choose(model, homes_of(model))
    return None if chosen else _first_reason(reasons)


class GatherChoice(NamedTuple):
    """How weights that travel as codes are read, why others of quantized layers do not, what forwards compute in."""

    readings: dict[str, Reading]
    reasons: dict[str, str]
    dtype: torch.dtype | None


class WeightGather:
    """What `fsdp_gather_nvfp4_` arranged in a model, which keeps it alive.

    report: what travels, parameter by parameter.
    ran: ids of the wrapped modules that ran since a forward of the model began; before the first, of all.
    """

    def __init__(self, model: nn.Module, homes: list[Home], choice: GatherChoice) -> None:
        self._mode = Mode()
        self._casts, wrapped = self._arrange(homes, choice)
        self.ran = set(map(id, wrapped))
        self.weights = [weight for cast in self._casts for weight in cast.weights]
        self.report = _report(homes, {weight.name: weight for weight in self.weights}, choice.reasons)
        for weight in self.weights:
            weight.layer.weight_to_read = weight.to_read
        for module in dict.fromkeys((*wrapped, model)):
            own = wrapped.get(module, [])
            # Of the model all at once: the codes of one forward are of one time.
            looked_at = self.weights if module is model else own
            # FSDP2's own hook is the first; before it, every shard must have its message.
            hook = partial(_before_forward, self, looked_at, own)
            module.register_forward_pre_hook(_uncompiled(hook), prepend=True)
        for weight in self.weights:
            weight.look()  # of unshard() before any forward
        handle = register_optimizer_step_post_hook(partial(_after_step, weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def _arrange(
        self, homes: list[Home], choice: GatherChoice
    ) -> tuple[list[ShardCast | RowCast | ExpertCast], dict[nn.Module, list[GatheredWeight]]]:
        """Return casts for each group of ranks, of tiles and of 1x16 blocks, and the weights of each wrapped module."""
        groups: dict[dist.ProcessGroup, list[GatheredWeight]] = {}
        slots: dict[dist.ProcessGroup, dict[int, int]] = {}
        wrapped: dict[nn.Module, list[GatheredWeight]] = {}
        refresh = partial(_refresh, weakref.ref(self))
        for home in homes:
            if home.name not in choice.readings:
                continue
            layer: Any = home.module
            group = group_of(home)
            own = slots.setdefault(group, {})
            siblings = getattr(layer, "amax_group", ())
            slot = own.setdefault(id(siblings[0]) if siblings else id(layer), len(own))
            precision = Precision(param_dtype_of(home), choice.dtype)
            reading = choice.readings[home.name]
            about = reading, shards_of(home, reading.spec), precision, slot
            kind = GatheredExperts if home.param.dim() == 3 else GatheredWeight
            weight = kind(home.name, layer, *about, refresh)
            groups.setdefault(group, []).append(weight)
            if home.wrapped is not None:
                wrapped.setdefault(home.wrapped, []).append(weight)
        orders: Orders = {}
        everything = [weight for weights in groups.values() for weight in weights]
        for fsdp_group, together in gathered_together([home.wrapped for home in homes], everything):
            Arrival(together, orders, Phase(fsdp_group, (together[0].layer, "weight"), self._mode))
        kinds = [
            (kind(own, group))
            for group, weights in groups.items()
            for kind in (ShardCast, RowCast, ExpertCast)
            if (own := [weight for weight in weights if _cast_of(weight) is kind])
        ]
        return kinds, wrapped

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes of codes and scales that have come so far, this rank's own included; gathers of weights; casts.

        values: bytes of values that came beside them, for forwards in high precision.
        """
        gathered = sum(weight.bytes_gathered for weight in self.weights)
        calls = sum(weight.gathers for weight in self.weights)
        values = sum(weight.bytes_of_values for weight in self.weights)
        casts = max(cast.runs for cast in self._casts)
        return {"gathered": gathered, "gathers": calls, "casts": casts, "values": values}

    @property
    def why_eager(self) -> str:
        """Why a compiled block would leave its graph, with the weight; "" if none does."""
        return next((f"{weight.name}: {weight.why_eager}" for weight in self.weights if weight.why_eager), "")

    def mark_changed(self, params: Iterable[Tensor] | None = None) -> None:
        """Say that weights changed in a way that neither an optimizer's step nor a version counter tells.

        Call it on every rank. Such ways are writes through `param.data`, `torch._foreach_…` on parameters outside of an
        optimizer, and kernels of one's own.

        Args:
            params: sharded parameters; None for all.
        """
        ids = None if params is None else {id(param) for param in params}
        for weight in self.weights:
            if ids is None or id(weight.param) in ids:
                weight.is_dirty = True

    def refresh(self, weights: list[GatheredWeight]) -> None:
        """Look at the shards of some weights, and cast all if one of these has changed."""
        stale = [weight.look() for weight in weights]  # all: each shard is given its hooks
        if not any(stale):
            return
        if weights is not self.weights:
            for weight in self.weights:
                weight.look()
        if any(weight.is_absent for weight in self.weights):
            return  # on meta: FSDP2 refuses the forward
        with torch.inference_mode(False):
            for cast in self._casts:
                cast.run()

    def __reduce__(self) -> tuple:
        """Leave copies of the model without it: a process group cannot be copied."""
        return type(None), ()


def _cast_of(weight: GatheredWeight) -> type:
    """Return what casts a weight."""
    if isinstance(weight, GatheredExperts):
        return ExpertCast
    return ShardCast if weight.spec.is_tile else RowCast


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile of the module leaves alone, as it does those of FSDP2."""

    @torch.compiler.disable(reason="halfbyte: weights are quantized anew before FSDP2's hooks")
    def uncompiled(*arguments: Any) -> None:
        hook(*arguments)

    return uncompiled


def _before_forward(
    gather: WeightGather, weights: list[GatheredWeight], own: list[GatheredWeight], module: nn.Module, arguments: Any
) -> None:
    is_model = weights is gather.weights
    if is_model or id(module) in gather.ran:  # it runs without the model, or again: what is within it was asked there
        refuse_capture(CALL)
    if is_model:
        gather.ran.clear()
    gather.ran.add(id(module))
    gather._mode.has_gradients = torch.is_grad_enabled()
    gather.refresh(weights)
    if module._compiled_call_impl is not None and not gather._mode.has_gradients:
        _bring_values(module, own)


def _bring_values(module: nn.Module, weights: list[GatheredWeight]) -> None:
    """Gather the values of layers that are in high precision before a compiled forward, whose graph cannot."""
    layers = []
    for weight in weights:
        if not weight.layer.recipe.specs and not weight.why_eager:
            weight.layer.values_to_read = weight.values()
            layers.append(weight.layer)
    if not layers:
        return

    def let_go(*arguments: Any) -> None:
        handle.remove()
        for layer in layers:
            layer.values_to_read = None

    handle = module.register_forward_hook(_uncompiled(let_go), always_call=True)


def _refresh(gather: weakref.ref[WeightGather]) -> None:
    alive = gather()
    assert alive is not None, "the model's hooks keep it"
    alive.refresh(alive.weights)


def _after_step(gather: weakref.ref[WeightGather], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    alive = gather()
    if alive is not None:
        alive.mark_changed(param for group in optimizer.param_groups for param in group["params"])


def _choose(model: nn.Module, homes: list[Home]) -> tuple[dict[str, Reading], dict[str, str]]:
    """Return how each weight that is gathered as codes is read, and why those of other quantized layers are not."""
    holders = holders_of(model)
    against = {home.name: reason_against(home, holders[id(home.param)]) for home in homes}
    of = {home.module: home for home in homes if against[home.name] is None}
    for home in list(of.values()):
        siblings = getattr(home.module, "amax_group", ())
        if any(sibling not in of or group_of(of[sibling]) is not group_of(home) for sibling in siblings):
            against[home.name] = "a weight that shares its amax is not gathered as codes, or by other ranks"
    readings: dict[str, Reading] = {}
    for home in homes:
        if against[home.name] is None:
            assert isinstance(home.module, LinearLayer | GroupedLinear), "reason_against chose it"
            reading = reading_of(home.module.recipe)
            assert isinstance(reading, Reading), "reason_against chose it"
            readings[home.name] = reading
    return readings, {name: reason for name, reason in against.items() if reason}


def _facts(
    homes: list[Home], chosen: dict[str, Reading], reasons: dict[str, str], dtype: torch.dtype | None
) -> list[tuple[str, str]]:
    """Return what ranks compare: of every parameter its shape, and how it travels."""
    found = []
    for home in homes:
        reading, values = chosen.get(home.name), f"{param_dtype_of(home) or home.param.dtype}"
        forms = (values,) if reading is None else _forms(reading, "values")[0]
        form = values if reading is None else f"{' and '.join(dict.fromkeys(forms))} of {dtype}"
        found.append((home.name, f"{tuple(home.param.shape)} as {form}, {reasons.get(home.name, '')}".rstrip(", ")))
    return found


def _twice_rounded(homes: list[Home], dtype: torch.dtype | None) -> str | None:
    """Return why weights cannot be quantized from `dtype`; without codes they are first rounded to param_dtype."""
    for home in homes:
        gathered = param_dtype_of(home)
        if dtype is not None and gathered not in (None, torch.float32, dtype):
            return (
                f"dtype={dtype}: FSDP2 gathers {home.name} in {gathered}, as its MixedPrecisionPolicy says; leave out "
                "dtype, or param_dtype"
            )
    return None


def _problem(model: nn.Module, chosen: dict[str, Reading], reasons: dict[str, str]) -> str | None:
    wrapped = [module for module in model.modules() if is_wrapped(module)]
    if not wrapped:
        return "model: fully_shard has wrapped nothing of it; call torch.distributed.fsdp.fully_shard first"
    if any(
        getattr(module, "weight_to_read", None) is not None for module in model.modules() if not is_exchanged(module)
    ):
        return f"model: its weights are gathered as codes already; call {CALL} once"
    problem = wrapping_problem(wrapped)
    if problem is not None:
        return f"model: {problem}"
    if not chosen:
        return (
            f"model: none of its weights can be gathered as NVFP4; {_first_reason(reasons)}. Convert it with "
            "hb.quantize_(model, 'nvfp4')"
        )
    return None


def _first_reason(reasons: dict[str, str]) -> str:
    return next((f"{name}: {reason}" for name, reason in reasons.items()), "none of its layers has a recipe")


def _report(homes: list[Home], weights: dict[str, GatheredWeight], reasons: dict[str, str]) -> GatherReport:
    rows = []
    for home in homes:
        if not is_sharded(home.param):
            continue
        dtype = param_dtype_of(home) or home.param.dtype
        mesh = home.param.device_mesh
        first = home.param.shape[0] if home.param.dim() else 1
        world = mesh.size(mesh.ndim - 1)
        values = -(-first // world) * world * (home.param.numel() // max(1, first)) * dtype.itemsize
        weight = weights.get(home.name)
        form = str(dtype).removeprefix("torch.")
        if weight is None:
            forms, sent, reason = (form, form), (values, values), ""
        else:
            sent = [world * weight.message_bytes(frozenset((what,))) for what in (FORWARD, BACKWARD)]
            forms, reason = _forms(weight.reading, str(weight.values_dtype).removeprefix("torch."))
        rows.append(
            GatherRow(
                name=home.name,
                form=forms[0],
                reason=reasons.get(home.name, ""),
                sent=sent[0],
                values=values,
                backward=forms[1],
                backward_sent=sent[1],
                backward_reason=reason,
            )
        )
    return GatherReport(rows=tuple(rows))


def _forms(reading: Reading, values: str) -> tuple[tuple[str, str], str]:
    """Return how a weight is gathered for forward and backward, and why in its values for the backward, or "".

    values: their dtype.
    """
    key = reading.spec.key
    if reading.is_one:
        return (key, key), ""
    if reading.columns is not None:
        return (key, reading.columns.key), ""
    return (key, values), f"backward reads it in high precision, not as forward's {key}"
