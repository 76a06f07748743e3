"""Whether ranks have the same parameters: those of a ZeroOptimizer, of a gather, and those that share experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from halfbyte.distributed.agree import exchange_among


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of a group; none for one process alone."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def check_globs(matched: list[dict[str, bool]]) -> None:
    """Raise ValueError if a glob of expert_groups matched on no rank at all; one alone may have no experts."""
    for glob in sorted({glob for ours in matched for glob in ours}):
        if not any(ours.get(glob) for ours in matched):
            raise ValueError(f"expert_groups: {glob!r} matches no parameter of the model")


def check_same_parameters(ours: list, theirs: list, what: str, ranks: tuple[int, int]) -> None:
    """Raise ValueError unless two ranks have the same parameters."""
    if ours != theirs:
        pairs = zip([*ours, "nothing"], [*theirs, "nothing"], strict=False)
        one, other = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"{what} differ: {one} on rank {ranks[0]}, {other} on rank {ranks[1]}; build the model with the same "
            "shapes, recipes and param_options everywhere"
        )


def check_same_experts(notes: list[dict[tuple[int, ...], list]], group: dist.ProcessGroup | None) -> None:
    """Raise unless the ranks of every expert group hold the same experts; notes: {members: parameters} of each rank."""
    ranks = ranks_of(group or dist.group.WORLD) if len(notes) > 1 else (0,)
    for rank, note in zip(ranks, notes, strict=True):
        for members, items in note.items():
            for other in members:
                theirs = notes[ranks.index(other)].get(members, []) if other in ranks else []
                check_same_parameters(
                    items, theirs, f"expert_groups: the parameters of ranks {list(members)}", (rank, other)
                )


def agree_on_parameters(
    call: str, members: Sequence[int], problem: str | None, facts: Sequence[tuple[str, str]]
) -> None:
    """Raise ValueError on every rank if one of them has a problem, or if they are about to do different things.

    Args:
        call: the function in whose name they meet.
        members: global ranks.
        problem: what is wrong on this rank, or None.
        facts: (name, what is done with it) of every parameter or option, in order.
    """
    notes = exchange_among(members, [problem, [list(fact) for fact in facts]], call)
    for rank, (text, _) in zip(members, notes, strict=True):
        if text is not None:
            raise ValueError(text if len(notes) == 1 else f"rank {rank}: {text}")
    for rank, (_, theirs) in zip(members, notes, strict=True):
        check_same_parameters(notes[0][1], theirs, f"{call}: the parameters", (members[0], rank))
