"""Which of several processes this is, as a launcher says: the one place that reads the environment, for its answer."""

from __future__ import annotations

import os
from dataclasses import dataclass

NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets beside WORLD_SIZE, and what other launchers have to."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """One of the processes that were started together.

    Args:
        rank: its number among all of them.
        size: how many there are.
        local_rank: its number on this machine, and that of its GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank <= self.rank):
            raise ValueError(
                f"RANK={self.rank}, LOCAL_RANK={self.local_rank}, WORLD_SIZE={self.size}: no rank of so many "
                "processes; start them with torchrun"
            )


def launched() -> ProcessPlace:
    """Return the place of this process; one that nobody launched is alone.

    Raises:
        ValueError: WORLD_SIZE is above 1 and the launcher does not say the rest, or says nonsense.
    """
    size = os.environ.get("WORLD_SIZE", "").strip()
    if not size.isdecimal() or int(size) < 2:
        return ProcessPlace()
    missing = [name for name in NEEDED if not os.environ.get(name, "").strip()]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={size} without {', '.join(missing)}: start processes with torchrun --nproc-per-node {size} "
            "-m halfbyte …, or let the launcher set these too (docs/distributed.md)"
        )
    numbers = {name: os.environ[name].strip() for name in NEEDED[:2]}
    for name, value in numbers.items():
        if not value.isdecimal():
            raise ValueError(f"{name}={value!r}: give the number of the process, as torchrun does")
    return ProcessPlace(rank=int(numbers["RANK"]), size=int(size), local_rank=int(numbers["LOCAL_RANK"]))
