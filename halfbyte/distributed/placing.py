"""Data-parallel ranks draw random bits of their own: every RunState of a model learns which rank it is on.

Ranks that see other data must round with other bits, or their errors do not average out in the mean gradient; ranks
that hold parts of one tensor must agree. All have one seed, one position and the same layers (docs/numerics.md section
4), which they compare here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from halfbyte.distributed.agree import AGREE_TIMEOUT, exchange_among, members_of, rank_and_size
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.state import RunState

CALL = "place_ranks_"

TENSOR_DIMS = ("tp", "etp")
"""Names of mesh dimensions whose ranks hold parts of one tensor, as torchtitan calls them."""

STAGE_DIM = "pp"
"""The name of the mesh dimension whose ranks hold other layers."""


class Note(NamedTuple):
    """What ranks compare of one RunState.

    is_private: its seed was chosen by nobody, so that of the first rank counts.
    """

    is_private: bool
    seed: int
    position: int
    streams: int
    rank: int


def place_ranks_(
    model: nn.Module | RunState,
    ranks: dist.ProcessGroup | dist.DeviceMesh | None = None,
    *,
    dims: Sequence[str | int] | None = None,
    timeout: timedelta = AGREE_TIMEOUT,
) -> int:
    """Let every data-parallel rank draw random bits of its own, in place; all ranks must call it.

    Call it once, after `hb.quantize_` and before the first forward, before or after DDP or `fully_shard` wrap the
    model, before or after a checkpoint is loaded. Fresh Hadamard signs stay equal on all ranks.

    Args:
        model: converted by `hb.quantize_` or built of hb.nn layers; or a RunState.
        ranks: the data-parallel ranks as a process group or a DeviceMesh of any dimensions; None is the default group,
            or one process alone.
        dims: names or numbers of the mesh's dimensions whose ranks see other data. None: all but "tp" and "etp". Ranks
            that differ in the others alone draw alike.
        timeout: how long to wait for the other ranks.

    Returns:
        The rank that this process draws with.

    Raises:
        ValueError: on every rank: ranks differ in seed, position or layers, or one of them has no RunState. On this
            one: it is not among `ranks`, or `dims` are not dimensions of the mesh.
        TypeError: an argument is of another type.
        RuntimeError: some rank made no such call within `timeout`.
    """
    if not isinstance(model, nn.Module | RunState):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module or a RunState")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r}: give a datetime.timedelta, such as timedelta(seconds=60)")
    rank, members = _where(ranks, dims)
    states = states_of(model)
    problem = None
    if not states:
        problem = f"model={type(model).__name__}: no layer has a RunState; call hb.quantize_(model, recipe) first"
    notes = _exchange(problem, [_note(state, rank) for state in states], members, CALL, timeout)
    _check_same(notes, members, same_layers=True)
    _place(states, [rank] * len(states), notes)
    return rank


def place_in_group(
    model: nn.Module, group: dist.ProcessGroup | None, timeout: timedelta, *, call: str, same_layers: bool = True
) -> None:
    """Give RunStates without a rank that in `group`; the others keep theirs, which must differ.

    Args:
        model: one without RunStates stays as it is.
        group: the data-parallel ranks.
        timeout: how long to wait for them.
        call: the function in whose name they meet.
        same_layers: whether all ranks hold the same layers; they may hold other experts.

    Raises:
        ValueError: on every rank: ranks differ in seed, position or layers, or two of them have one rank.
    """
    index, _ = rank_and_size(group)
    states, members = states_of(model), members_of(group)
    wanted = [state.rank if state.is_placed else index for state in states]
    notes = _exchange(None, [_note(*pair) for pair in zip(states, wanted, strict=True)], members, call, timeout)
    _check_same(notes, members, same_layers)
    _check_distinct(notes, members)
    _place(states, wanted, notes)


def states_of(model: nn.Module | RunState) -> list[RunState]:
    """Return the RunStates that layers draw from, in the order of modules."""
    if isinstance(model, RunState):
        return [model]
    layers = [module for module in model.modules() if isinstance(module, FollowsRecipe)]
    return list({id(layer.run_state): layer.run_state for layer in layers if layer.run_state is not None}.values())


def _note(state: RunState, rank: int) -> Note:
    saved = state.state_dict()
    return Note(state.is_private, state.seed, saved["position"], saved["streams"], rank)


def _exchange(
    problem: str | None, own: list[Note], members: Sequence[int], call: str, timeout: timedelta
) -> list[list[Note]]:
    """Return the notes of all ranks; raise on all of them if one has a problem."""
    answers = exchange_among(members, [problem, own], call, timeout)
    for member, (text, _) in zip(members, answers, strict=True):
        if text is not None:
            raise ValueError(text if len(members) == 1 else f"rank {member}: {text}")
    return [[Note(*note) for note in notes] for _, notes in answers]


def _where(ranks: Any, dims: Sequence[str | int] | None) -> tuple[int, list[int]]:
    """Return the rank that this process draws with, and the global ranks to compare with."""
    if dist.is_available() and isinstance(ranks, dist.DeviceMesh):
        return _where_in_mesh(ranks, dims)
    if dist.is_available() and ranks is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to other processes
        raise ValueError("ranks: this process is not in the group; call only on its ranks")
    if ranks is not None and not (dist.is_available() and isinstance(ranks, dist.ProcessGroup)):
        raise TypeError(f"ranks={ranks!r}: give a process group, a DeviceMesh, or None for the default group")
    if dims is not None:
        raise ValueError(f"dims={dims!r}: they name dimensions of a mesh; give the DeviceMesh as ranks=")
    return rank_and_size(ranks)[0], members_of(ranks)


def _where_in_mesh(mesh: dist.DeviceMesh, dims: Sequence[str | int] | None) -> tuple[int, list[int]]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("ranks: this process is not in the mesh; call only on its ranks")
    rank = 0
    for dim in _data_dims(mesh, dims):
        rank = rank * mesh.size(dim) + coordinate[dim]
    members, names = mesh.mesh, mesh.mesh_dim_names or ()
    if STAGE_DIM in names:  # other stages have other layers
        dim = names.index(STAGE_DIM)
        members = members.select(dim, coordinate[dim])
    return rank, members.flatten().tolist()


def _data_dims(mesh: dist.DeviceMesh, dims: Sequence[str | int] | None) -> list[int]:
    """Return the numbers of the dimensions whose ranks see other data, in the order of the mesh."""
    names, count = mesh.mesh_dim_names or (), mesh.ndim
    if dims is None:
        if not names and count > 1:
            raise ValueError(
                f"ranks: the mesh has {count} dimensions without names; say which of them hold data-parallel ranks, "
                "such as dims=(0,)"
            )
        return [dim for dim in range(count) if not names or names[dim] not in TENSOR_DIMS]
    if isinstance(dims, str) or not isinstance(dims, Sequence):
        raise TypeError(f"dims={dims!r}: give a tuple of names or numbers, such as ('dp',)")
    known = (*names, *range(count))
    for dim in dims:
        if isinstance(dim, bool) or dim not in known:
            raise ValueError(f"dims: {dim!r} is no dimension of the mesh; use some of {', '.join(map(repr, known))}")
    return sorted({dim if isinstance(dim, int) else names.index(dim) for dim in dims})


def _check_same(notes: list[list[Note]], members: Sequence[int], same_layers: bool) -> None:
    """Raise ValueError, naming the first two ranks that differ and in what."""
    first = notes[0]
    for member, theirs in zip(members, notes, strict=True):
        differing = [("their number", len(first), len(theirs), "build and convert the model alike on all ranks")]
        if not same_layers:
            differing = []
        for a, b in zip(first, theirs, strict=False):
            differing += _differing(a, b, same_layers)
        for what, ours, other, remedy in differing:
            if ours != other:
                raise ValueError(
                    f"RunState: ranks differ in {what}: {ours} on rank {members[0]}, {other} on rank {member}; {remedy}"
                )


def _differing(a: Note, b: Note, same_layers: bool) -> list[tuple[str, Any, Any, str]]:
    """Return what to compare of one RunState on two ranks: its name, both values, a remedy."""
    seeds = ["none given" if note.is_private else note.seed for note in (a, b)]
    found: list[tuple[str, Any, Any, str]] = [
        ("seed", seeds[0], seeds[1], "use one, hb.RunState(seed): ranks draw other bits all the same"),
        ("position", a.position, b.position, "load the same checkpoint on all of them, or on none, before this call"),
    ]
    if same_layers:
        remedy = "convert the model with the same recipe, rules and keep on all ranks"
        found.append(("streams", a.streams, b.streams, remedy))
    return found


def _check_distinct(notes: list[list[Note]], members: Sequence[int]) -> None:
    """Raise ValueError if two ranks of a data-parallel group draw the same bits."""
    for index in range(min(map(len, notes))):
        seen: dict[int, int] = {}
        for member, theirs in zip(members, notes, strict=True):
            rank = theirs[index].rank
            if rank in seen:
                raise ValueError(
                    f"RunState: rank={rank} on ranks {seen[rank]} and {member}, which see other data and would round "
                    "with the same bits; leave rank= out, or give each its own"
                )
            seen[rank] = member


def _place(states: list[RunState], ranks: list[int], notes: list[list[Note]]) -> None:
    for state, rank, first in zip(states, ranks, [*notes[0], *[None] * len(states)], strict=False):
        if first is not None and state.is_private:
            state.seed = first.seed
        state.set_rank(rank)
