"""cast_master_weights_to_nvfp4 and post_all_gather_processing: for optimizers that keep fp32 masters in shards.

What a call needs beyond its tensors' values (who has which elements, tables of addresses, buffers) is prepared by the
first call with these tensors and kept on the first weight; later calls launch kernels and collectives only. Where only
the memory of masters is another, a rank prepares alone what depends on it: other ranks need not notice. Where its
shares are others, the rank tells so in the messages of the cast that the others may have begun, since a border between
two ranks is no news to a third; then all compare notes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed.agree import WeakGroup, current_group, exchange_notes, rank_and_size
from halfbyte.distributed.cast import Cast, CastLayout, Share
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import SWIZZLED_32_4_4, Blocks
from halfbyte.ops.primary import WeightStages, primary_stages
from halfbyte.pieces import CastTarget, Piece, code_bytes
from halfbyte.spec import NVFP4
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.primary import PrimaryWeight, check_primary_spec
from halfbyte.tensor.quant_tensor import VALUE_DTYPES

CALL = "cast_master_weights_to_nvfp4"


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[QuantTensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None,
    fsdp_shard_model_weights: Sequence[Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = True,
) -> None:
    """Quantize weights from the shards of their masters that the ranks of `group` hold (docs/numerics.md section 9).

    Afterwards every rank has the block scales and amax of all weights, and the codes of its own shards: exactly its own
    nibbles, and the whole byte where two shards meet within one. Together the codes are the bytes of `hb.quantize` of
    the whole master, rounded to the weight's dtype first. Weights whose `amax` is one tensor share it. The first call
    with given tensors compares weights and shards between the ranks, and so does one to which some rank comes with
    other shards; the rest wait for no more than the message of the amaxes.

    Args:
        model_weights: 2-D QuantTensors in 16x16 tiles, filled in place; the same list on every rank.
        master_weights: for each weight this rank's shard, fp32, bf16 or fp16, flat and contiguous; None or empty if
            it has none. The shards of a weight do not overlap and cover it.
        start_offsets: for each shard the number of its first element in the flat weight; None where there is none.
        group: the ranks that hold shards; None is the default group.
        fsdp_shard_model_weights: for each weight None, or uint8 that takes the codes instead of the weight: the bytes
            of its flat `qdata` that hold elements of the shard.
        manual_post_all_gather_processing: False also calls `post_all_gather_processing`, which is possible only for a
            group of one rank: the codes of others arrive by an all-gather that the caller runs later.

    Raises:
        ValueError: on every rank: arguments do not fit together, or differ between ranks.
        RuntimeError: some rank does not make the call within `agree.AGREE_TIMEOUT`.
    """
    shards = fsdp_shard_model_weights
    lists = {"model_weights": model_weights, "master_weights": master_weights, "start_offsets": start_offsets}
    for name, values in (lists | {"fsdp_shard_model_weights": () if shards is None else shards}).items():
        if not isinstance(values, Sequence):
            problem = f"{name} is {type(values).__name__}: give a list with an entry for each weight"
            _join(_known(model_weights), group)
            _agree(((), (), (), ()), problem, group, manual_post_all_gather_processing)
    shards = [None] * len(model_weights) if shards is None else shards
    agreed_on = _agreed_on(model_weights, master_weights, start_offsets, (group, manual_post_all_gather_processing))
    memory = _memory(model_weights, master_weights, shards)
    known, arguments = _known(model_weights), (model_weights, master_weights, start_offsets, shards)
    if known is None or (known.agreed_on, known.memory) != (agreed_on, memory):
        problem = _problem(*arguments)
        if problem is None and known is not None and known.agreed_on == agreed_on:
            shares = known.shares
        else:
            _join(known, group)
            shares = _agree(arguments, problem, group, manual_post_all_gather_processing)
        known = _prepared(arguments, shares, agreed_on, memory)
    while known is not None and not known.cast.run():  # once: then all ranks have prepared it
        shares = _agree(arguments, None, group, manual_post_all_gather_processing)
        known = _prepared(arguments, shares, agreed_on, memory)
    if known is None:
        return
    for weight in model_weights:
        if isinstance(weight, PrimaryWeight):
            weight.is_stale = True
    if not manual_post_all_gather_processing:
        post_all_gather_processing(model_weights)


def post_all_gather_processing(model_weights: Sequence[QuantTensor]) -> None:
    """Make what follows from complete codes and scales: the other orientation of every PrimaryWeight.

    Args:
        model_weights: the weights, their codes gathered from all ranks.
    """
    weights = [weight for weight in model_weights if isinstance(weight, PrimaryWeight)]
    if not weights:
        return
    turned = [weight.allocate_turned() for weight in weights]
    key = tuple((*_identity(weight), id(own.qdata)) for weight, own in zip(weights, turned, strict=True))
    known: _PreparedTranspose | None = getattr(weights[0], "_prepared_transpose", None)
    if known is None or known.key != key:
        targets, first_tile = [], 0
        for weight, own in zip(weights, turned, strict=True):
            targets.append(cast_target_of(weight, first_tile, 0, turned=own))
            first_tile += targets[-1].tile_count
        _, finisher = primary_stages((), targets, first_tile, weights[0].device)
        known = _PreparedTranspose(key, finisher, [weight.block_scale for weight in weights])
        vars(weights[0])["_prepared_transpose"] = known
    known.finisher.transpose()
    for weight in weights:
        weight.is_stale = False


def cast_target_of(weight: QuantTensor, first_tile: int, slot: int, *, turned: Blocks | None = None) -> CastTarget:
    """Return a weight as the stages of a cast see it; turned: its other orientation if a stage fills it."""
    rows, cols = weight.shape
    swizzled, spec = weight.scale_layout == SWIZZLED_32_4_4, weight.spec
    assert isinstance(spec, NVFP4), "only NVFP4 is cast from masters"
    return CastTarget(rows, cols, spec, weight.dtype, weight.blocks, swizzled, first_tile, slot, turned)


class _PreparedTranspose(NamedTuple):
    """A transpose and what it was prepared for; held: scales, so that no later ones have their ids."""

    key: tuple
    finisher: WeightStages
    held: list[Tensor]

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied weight prepares its own."""


class _Prepared(NamedTuple):
    """A cast and what it was prepared for.

    shares: for each weight, that of every rank.
    scales: those of the weights, kept so that no later ones have their ids; the cast keeps the other tensors.
    """

    agreed_on: tuple
    memory: tuple
    shares: list[list[Share | None]]
    cast: Cast
    scales: list[Tensor]

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied weight prepares its own: a process group cannot be copied."""


def _agreed_on(weights, masters, starts, call) -> tuple:
    """Return what ranks have to agree on, as far as this one knows; quickly, since every call of a step asks."""
    group, manual = call
    identities: tuple = ()
    if set(map(type, weights)) <= {PrimaryWeight, QuantTensor}:
        identities = (*map(id, weights), *map(id, map(attrgetter("amax"), weights)))
    else:
        identities = tuple((id(w), id(w.amax)) if isinstance(w, QuantTensor) else None for w in weights)
    if set(map(type, masters)) == {Tensor}:
        sizes = tuple(map(Tensor.numel, masters))
    else:
        sizes = tuple(m.numel() if isinstance(m, Tensor) else 0 for m in masters)
    return (
        WeakGroup.of(current_group(group)),
        manual,
        identities,
        sizes,
        tuple(starts),
    )  # not the group's id, which a later one may have


def _identity(weight: QuantTensor) -> tuple:
    return id(weight), weight.qdata.data_ptr(), id(weight.block_scale), id(weight.amax)


def _memory(weights, masters, shards) -> tuple:
    """Return where this rank's masters, codes and scales lie, no concern of others; the cast keeps them alive."""
    own: tuple
    if set(map(type, masters)) == {Tensor}:
        layout = all(map(Tensor.is_contiguous, masters))
        own = (*map(Tensor.data_ptr, masters), *map(attrgetter("dtype"), masters), layout)
    else:
        own = tuple((m.data_ptr(), m.dtype, m.is_contiguous()) if isinstance(m, Tensor) else id(m) for m in masters)
    if set(map(type, weights)) <= {PrimaryWeight, QuantTensor}:
        codes, scales = (map(attrgetter(name), weights) for name in ("qdata", "block_scale"))
        own = (*own, *map(Tensor.data_ptr, codes), *map(id, scales))
    else:
        own = (*own, *(_identity(weight) if isinstance(weight, QuantTensor) else None for weight in weights))
    if set(map(type, shards)) == {type(None)}:
        return (own,)
    return own, tuple((s.data_ptr(), s.numel(), s.stride()) if isinstance(s, Tensor) else id(s) for s in shards)


def _agree(
    arguments: tuple, problem: str | None, group: dist.ProcessGroup | None, manual: bool
) -> list[list[Share | None]]:
    """Compare arguments between ranks and return the shares of each weight."""
    weights, masters, starts, codes = arguments
    _, size = rank_and_size(group)
    if problem is None and not manual and size > 1:
        problem = (
            f"manual_post_all_gather_processing=False: the group has {size} ranks, whose codes meet only in your "
            "all-gather; call post_all_gather_processing(model_weights) after it"
        )
    if problem is None and not manual and any(shard is not None for shard in codes):
        problem = (
            "manual_post_all_gather_processing=False: codes go to fsdp_shard_model_weights, and reach the weights only "
            "when you gather them; call post_all_gather_processing(model_weights) after that"
        )
    slots: dict[int, int] = {}
    note = {"problem": problem, "weights": [], "shares": []}
    if problem is None:
        for weight, master, start in zip(weights, masters, starts, strict=True):
            slot = slots.setdefault(weight.amax.data_ptr(), len(slots))
            identity = [list(weight.shape), weight.spec.key, str(weight.dtype), weight.scale_layout, slot]
            note["weights"].append(identity)
            n = 0 if master is None else master.numel()
            note["shares"].append([start, start + n] if n else None)
    notes = exchange_notes(note, group, CALL)
    _compare(notes)
    shares = [
        [None if s is None else Share(*s) for s in column] for column in zip(*(n["shares"] for n in notes), strict=True)
    ]
    _check_cover([(i, weights[i], own) for i, own in enumerate(shares) if any(share is not None for share in own)])
    return shares


def _known(model_weights: Any) -> _Prepared | None:
    """Return what a call with this first weight has prepared."""
    return (
        getattr(model_weights[0], "_prepared_cast", None)
        if isinstance(model_weights, Sequence) and model_weights
        else None
    )


def _join(known: _Prepared | None, group: dist.ProcessGroup | None) -> None:
    """Take part in the cast that other ranks of the group run if nothing has changed for them, and call it void."""
    if known is not None and known.agreed_on[0] == WeakGroup.of(current_group(group)) and not known.cast.is_alone:
        known.cast.decline()


def _prepared(arguments: tuple, shares: list[list[Share | None]], agreed_on: tuple, memory: tuple) -> _Prepared | None:
    """Prepare a cast and keep it on the first weight; None if there is nothing to do."""
    weights = arguments[0]
    cast = _prepare(arguments, shares, agreed_on[0].group)
    if cast is None:
        return None
    vars(weights[0])["_prepared_cast"] = _Prepared(agreed_on, memory, shares, cast, [w.block_scale for w in weights])
    return vars(weights[0])["_prepared_cast"]


def _prepare(arguments: tuple, shares: list[list[Share | None]], group: dist.ProcessGroup | None) -> Cast | None:
    """Return the cast, None if there is nothing to do."""
    weights, masters, _, shards = arguments
    rank, size = rank_and_size(group)
    held = [any(share is not None for share in own) for own in shares]
    if not any(held):
        return None
    targets, pieces, first_tile = [], [], 0
    slots: dict[int, int] = {}
    for i, weight in enumerate(weights):
        if not held[i]:
            continue
        target = cast_target_of(weight, first_tile, slots.setdefault(weight.amax.data_ptr(), len(slots)))
        targets.append(target)
        first_tile += target.tile_count
        own = shares[i][rank]
        if own is not None:
            _clear_padding(weight, shards[i])
            codes, first_byte = weight.qdata.view(-1), 0
            if shards[i] is not None:
                codes, first_byte = shards[i], code_bytes(target.cols, target.cols, *own)[0]
            pieces.append(Piece(target, masters[i].detach().view(-1), own.start, target.cols, codes, first_byte))
    shares = [own for own, any_share in zip(shares, held, strict=True) if any_share]
    layout = CastLayout(targets, [target.cols for target in targets], shares, len(slots))
    return Cast(layout, pieces, group if size > 1 else None, local_scales=False, device=weights[0].device)


@torch.no_grad()
def _clear_padding(weight: QuantTensor, shard: Tensor | None) -> None:
    """Zero what no element is written to, behind the last column: the memory is the caller's."""
    cols = weight.shape[1]
    if cols % NVFP4_BLOCK and shard is not None:
        shard.zero_()  # every element in it is written
    elif cols % NVFP4_BLOCK:
        weight.qdata[:, cols // 2 : (cols + 1) // 2] &= 0x0F
        weight.qdata[:, (cols + 1) // 2 :] = 0


def _problem(weights: Any, masters: Any, starts: Any, shards: Any) -> str | None:
    """Return what is wrong with this rank's arguments."""
    for name, values in (("master_weights", masters), ("start_offsets", starts), ("fsdp_shard_model_weights", shards)):
        if len(values) != len(weights):
            return f"{name} has {len(values)} entries for {len(weights)} model_weights: give one each, or None"
    for i, (weight, master, start, shard) in enumerate(zip(weights, masters, starts, shards, strict=True)):
        text = _weight_problem(weight, weights[0]) or _shard_problem(weight, master, start, shard)
        if text is not None:
            return text.replace("[i]", f"[{i}]")
    seen: dict[int, int] = {}
    for i, weight in enumerate(weights):
        address = weight.qdata.data_ptr()
        other = seen.setdefault(address, i)
        if other != i and address:  # 0: empty, or its memory is released for now
            return f"model_weights[{i}] has the codes of model_weights[{other}]: give every weight once"
    return None


def _weight_problem(weight: Any, first: Any) -> str | None:
    if not isinstance(weight, QuantTensor) or weight.dim() != 2 or weight.group_offsets is not None:
        what = f"a QuantTensor {list(weight.shape)}" if isinstance(weight, QuantTensor) else type(weight).__name__
        return f"model_weights[i] is {what}: give 2-D QuantTensors, such as hb.tensor.PrimaryWeight.empty((N, K))"
    try:
        check_primary_spec(weight.spec)
    except ValueError as error:
        return f"model_weights[i]: {error}"
    if weight.header.borrowed or not weight.qdata.is_contiguous() or not weight.block_scale.is_contiguous():
        return "model_weights[i] is a view or transpose of another tensor: give the whole tensor, or clone() it"
    if weight.device != first.device:
        return f"model_weights[i] is on {weight.device}, the first on {first.device}: move one of them"
    return None


def _shard_problem(weight: QuantTensor, master: Any, start: Any, shard: Any) -> str | None:
    if master is None:
        return None
    if not isinstance(master, Tensor) or master.dtype not in VALUE_DTYPES or not master.is_contiguous():
        what = f"{master.dtype} with strides {master.stride()}" if isinstance(master, Tensor) else type(master).__name__
        return f"master_weights[i] is {what}: give a contiguous fp32, bf16 or fp16 tensor, or None"
    if master.numel() == 0:
        return None
    if master.device != weight.device:
        return f"master_weights[i] is on {master.device}, its weight on {weight.device}: move one of them"
    if isinstance(start, bool) or not isinstance(start, int):
        return f"start_offsets[i]={start!r}: give the number of the shard's first element, an int"
    stop = start + master.numel()
    if start < 0 or stop > weight.numel():
        return f"start_offsets[i]={start}: {master.numel()} elements from there do not lie in {list(weight.shape)}"
    if shard is not None:
        cols = weight.shape[1]
        first, last = code_bytes(cols, cols, start, stop)
        fits = isinstance(shard, Tensor) and shard.dtype == torch.uint8 and shard.is_contiguous()
        if not fits or shard.numel() != last - first or shard.device != weight.device:
            return f"fsdp_shard_model_weights[i]: give contiguous uint8 [{last - first}] on {weight.device}"
    return None


def _compare(notes: list[dict]) -> None:
    """Raise ValueError unless every rank has the same weights; every rank comes to the same result."""
    for rank, note in enumerate(notes):
        if note["problem"] is not None:
            raise ValueError(note["problem"] if len(notes) == 1 else f"rank {rank}: {note['problem']}")
    first = notes[0]["weights"]
    for rank, note in enumerate(notes):
        if len(note["weights"]) != len(first):
            raise ValueError(
                f"model_weights has {len(first)} weights on rank 0 and {len(note['weights'])} on rank {rank}: "
                "give the same list everywhere, with None for shards that a rank does not have"
            )
        for i, (ours, theirs) in enumerate(zip(first, note["weights"], strict=True)):
            if ours != theirs:
                raise ValueError(
                    f"model_weights[{i}] is {ours} on rank 0 and {theirs} on rank {rank} (shape, spec, dtype, scale "
                    "layout, amax shared with): build the model with the same recipe and shapes everywhere"
                )


def _check_cover(weights: list[tuple[int, QuantTensor, list[Share | None]]]) -> None:
    for i, weight, shares in weights:
        at = 0
        for share in sorted(share for share in shares if share is not None):
            if share.start != at:
                what = "two ranks hold" if share.start < at else "no rank holds"
                low, high = sorted((share.start, at))
                raise ValueError(
                    f"model_weights[{i}]: {what} the elements {low} to {high - 1}; check start_offsets and shards"
                )
            at = share.stop
        if at != weight.numel():
            raise ValueError(
                f"model_weights[{i}]: no rank holds the elements {at} to {weight.numel() - 1}; "
                "check start_offsets and shards"
            )
