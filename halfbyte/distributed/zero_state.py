"""Checkpoints of a ZeroOptimizer: whole tensors under the parameters' names, for any number of ranks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.distributed.agree import exchange_notes, refuse_together
from halfbyte.distributed.buckets import Bucket
from halfbyte.distributed.inner import is_elementwise, state_problem
from halfbyte.distributed.saved import VERSION, check_saved
from halfbyte.distributed.scales import all_gather
from halfbyte.optimizer_state import dtype_name

if TYPE_CHECKING:
    from halfbyte.distributed.zero import ZeroOptimizer

CALL = "ZeroOptimizer.state_dict"


def save_zero_state(zero: ZeroOptimizer) -> dict[str, Any]:
    """See ZeroOptimizer.state_dict."""
    # All or none: one rank alone would wait for ever.
    problem = state_problem(zero.inner.state, zero.masters())
    refuse_together(problem, zero.group, CALL, zero.config.timeout)
    masters: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {name: {} for name in zero.names}
    scalars: dict[str, str] = {}
    with torch.no_grad():
        for bucket in zero.buckets:
            masters.update(_whole(bucket, bucket.masters, zero))
            for (key, dtype), names in _elementwise_keys(zero, bucket).items():
                shard = torch.zeros_like(bucket.masters, dtype=getattr(torch, dtype))
                for fragment in bucket.fragments:
                    if fragment.place.item.name in names:
                        begin = _begin(bucket, fragment)
                        value = zero.inner.state[fragment.master][key]
                        shard[begin : begin + value.numel()] = value
                for name, whole in _whole(bucket, shard, zero).items():
                    if name in names:
                        state[name][key] = whole
            for name, values in _others(zero, bucket).items():
                state[name].update({key: value for key, (value, _) in values.items()})
                scalars.update({key: dtype for key, (_, dtype) in values.items() if dtype is not None})
    groups = [
        {key: _copy(value, "cpu") for key, value in group.items() if key != "params"}
        for group in zero.inner.param_groups
    ]
    keys = {
        name: {key: dtype_name(v) if isinstance(v, Tensor) else scalars.get(key) for key, v in values.items()}
        for name, values in state.items()
    }
    whole = {"masters": masters, "state": state, "groups": groups, "scalars": scalars, "keys": keys}
    return {"version": VERSION, **whole}


def _copy(value: Any, device: torch.device | str) -> Any:
    """Return an option that later changes of the first do not reach, such as a learning rate that is a tensor."""
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _begin(bucket: Bucket, fragment) -> int:
    return fragment.place.first + fragment.start - bucket.ranks.rank * bucket.plan.share


def _whole(bucket: Bucket, shard: Tensor, zero: ZeroOptimizer) -> dict[str, Tensor]:
    """Gather the shards of all ranks and return the parameters' parts on the CPU, in their shapes."""
    whole = shard
    if bucket.ranks.group is not None:
        whole = torch.empty(bucket.plan.numel, dtype=shard.dtype, device=shard.device)
        all_gather(whole.view(torch.uint8), shard.view(torch.uint8), group=bucket.ranks.group)
    return {
        place.item.name: bucket.matrix(whole, place).reshape(zero.names[place.item.name].shape).to("cpu", copy=True)
        for place in bucket.plan.places
    }


def _elementwise_keys(zero: ZeroOptimizer, bucket: Bucket) -> dict[tuple[str, str], set[str]]:
    """Return {(key, dtype): parameters} of state that has a number for each element.

    Ranks without a fragment learn them from others. Groups of parameters may have other options, and so other keys.
    """
    own = [
        (key, dtype_name(value), fragment.place.item.name)
        for fragment in bucket.fragments
        for key, value in zero.inner.state.get(fragment.master, {}).items()
        if is_elementwise(value, fragment.master)
    ]
    notes = exchange_notes(own, bucket.ranks.group, CALL, zero.config.timeout) if bucket.ranks.group else [own]
    found: dict[tuple[str, str], set[str]] = {}
    for key, dtype, name in sorted({tuple(entry) for note in notes for entry in note}):
        found.setdefault((key, dtype), set()).add(name)
    return found


def _others(zero: ZeroOptimizer, bucket: Bucket) -> dict[str, dict[str, tuple[Any, str | None]]]:
    """Return numbers such as the step, and their dtype if they are kept as tensors: of the lowest rank with a part."""
    own = {
        fragment.place.item.name: {
            key: (value.item(), dtype_name(value)) if isinstance(value, Tensor) else (value, None)
            for key, value in zero.inner.state.get(fragment.master, {}).items()
            if not is_elementwise(value, fragment.master)
        }
        for fragment in bucket.fragments
    }
    notes = exchange_notes(own, bucket.ranks.group, CALL, zero.config.timeout) if bucket.ranks.group else [own]
    out: dict[str, dict[str, tuple[Any, str | None]]] = {}
    for note in notes:
        for name, values in note.items():
            out.setdefault(name, values)
    return out


def load_zero_state(zero: ZeroOptimizer, state: Any) -> None:
    """See ZeroOptimizer.load_state_dict; checks all before it changes anything."""
    check_saved(zero, state)
    options = [{key: _copy(value, "cpu") for key, value in group.items()} for group in state["groups"]]
    zero.synchronize()
    scalars = state["scalars"]
    with torch.no_grad():
        for bucket in zero.buckets:
            for fragment in bucket.fragments:
                name, master = fragment.place.item.name, fragment.master
                master.copy_(_part(fragment, state["masters"][name]))
                values = {}
                for key, value in state["state"][name].items():
                    if isinstance(value, Tensor):  # `save` turns all others into numbers
                        values[key] = _part(fragment, value).to(master.device, copy=True)
                    else:
                        values[key] = _scalar(zero, master, value, scalars[key]) if key in scalars else value
                zero.inner.state[master] = values
    for ours, theirs in zip(zero.inner.param_groups, options, strict=True):
        old = {key: value.device for key, value in ours.items() if isinstance(value, Tensor)}
        ours.update(
            {
                key: value.to(old[key]) if key in old and isinstance(value, Tensor) else value
                for key, value in theirs.items()
            }
        )


def _part(fragment, whole: Tensor) -> Tensor:
    """Return the elements of a whole tensor that a fragment has, rows padded as in the bucket."""
    place = fragment.place
    padded = torch.zeros(place.item.rows, place.pitch, dtype=whole.dtype, device=whole.device)
    padded[:, : place.item.cols] = whole.reshape(place.item.rows, place.item.cols)
    return padded.view(-1)[fragment.start : fragment.start + fragment.master.numel()]


def _scalar(zero: ZeroOptimizer, master: Tensor, value: Any, dtype: str) -> Tensor:
    """Return a number as torch's optimizers keep it: a tensor, on the device if fused or capturable."""
    group = next(g for g in zero.inner.param_groups if any(p is master for p in g["params"]))
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(value, dtype=getattr(torch, dtype), device=master.device if on_device else "cpu")
