"""How many processes a launcher such as torchrun started: the one place that reads the environment, for its answer."""

from __future__ import annotations

import os


def refuse_many(command: str) -> None:
    """Raise if this is one of several processes; each of them would run the same training in the same folder.

    Args:
        command: its name, for the message.

    Raises:
        ValueError: WORLD_SIZE is above 1.
    """
    size = os.environ.get("WORLD_SIZE", "").strip()
    if size.isdecimal() and int(size) > 1:
        rank = os.environ.get("RANK", "?")
        raise ValueError(
            f"WORLD_SIZE={size}, rank {rank}: {command} is one process on one device, and each of these would run the "
            "same training; start it once, without torchrun. Several processes for your own model: docs/distributed.md"
        )
