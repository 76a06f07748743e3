"""Whether the ranks of a ZeroOptimizer have the same parameters, and those that share experts the same experts."""

from __future__ import annotations

import torch.distributed as dist


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
