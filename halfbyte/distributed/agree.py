"""Ranks compare what each was asked to do before they communicate: a mistake is an error everywhere, not a hang.

Notes go through the process group's key-value store on the CPU, with a timeout of their own: ranks that disagree about
sizes cannot compare them by a collective whose size they disagree about.
"""

from __future__ import annotations

import atexit
import json
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

if dist.is_available():
    # Its functions have the default group of their import as default argument. torch._dynamo, which optimizers import,
    # imports it: after init_process_group that would keep the group past its end (see WeakGroup).
    import torch.distributed.nn.functional  # noqa: F401

LETTING_GO = 0.2
"""Seconds of rest at the end of a process in which gloo's threads outlived their group."""


def let_threads_go() -> None:
    """Give gloo's threads, if there are any, Python's lock once more before the interpreter ends.

    DDP, FSDP2 and meshes keep their groups past `destroy_process_group`. A thread of such a group that waits for the
    lock to let go of the last message's tensor would meet an interpreter that has ended, and the process is aborted.
    """
    tasks = Path("/proc/self/task")
    with suppress(OSError):  # no Linux, or a thread that ended meanwhile
        if any(task.read_text().startswith("pt_gloo") for task in tasks.glob("*/comm")):
            time.sleep(LETTING_GO)


atexit.register(let_threads_go)

AGREE_TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for the notes of the others."""


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (rank, size) in `group`; None is the default group, or one process alone if there is none.

    Raises:
        ValueError: this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not one of its ranks; call only on the ranks of the group")
    return rank, dist.get_world_size(group)


def current_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group that None stands for now; None if there is none."""
    return dist.group.WORLD if group is None and dist.is_available() else group


class WeakGroup(NamedTuple):
    """A process group that `torch.distributed` keeps alive, not this: it joins its threads when it is destroyed.

    Gloo's threads take the interpreter's lock to let go of a tensor. Where a model or an optimizer kept its group past
    `destroy_process_group`, one of them could meet an interpreter that had ended, and the process was aborted.
    """

    ref: weakref.ref[dist.ProcessGroup] | None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> WeakGroup:
        """Return that of `group`, None for one process alone."""
        return cls(None if group is None else weakref.ref(group))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None for one process alone.

        Raises:
            RuntimeError: it was destroyed.
        """
        if self.ref is None:
            return None
        group = self.ref()
        if group is None:
            raise RuntimeError("the process group was destroyed: call destroy_process_group after the last step")
        return group


def exchange_notes(
    note: Any, group: dist.ProcessGroup | None, call: str, timeout: timedelta | None = None
) -> list[Any]:
    """Return every rank's note, in the order of ranks.

    Args:
        note: anything json writes.
        group: the ranks that take part.
        call: the function in whose name they meet.
        timeout: how long to wait, AGREE_TIMEOUT by default.

    Raises:
        RuntimeError: some ranks left no note in time; the message names them.
    """
    return exchange_among(members_of(group), note, call, timeout)


def members_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of `group`, in its order; None is the default group, or one process alone."""
    _, size = rank_and_size(group)
    return [0] if size == 1 else dist.get_process_group_ranks(group or dist.group.WORLD)


def exchange_among(members: Sequence[int], note: Any, call: str, timeout: timedelta | None = None) -> list[Any]:
    """Return the notes of `members`, global ranks, in their order; the rest as for `exchange_notes`."""
    size = len(members)
    if size == 1:
        return [json.loads(json.dumps(note))]
    rank = members.index(dist.get_rank())
    timeout = AGREE_TIMEOUT if timeout is None else timeout
    store = dist.distributed_c10d._get_default_store()
    room = f"halfbyte/{call}/{'-'.join(map(str, members))}"
    count = store.add(f"{room}/calls/{rank}", 1)
    keys = [f"{room}/{count}/{other}" for other in range(size)]
    store.delete_key(f"{room}/{count - 2}/{rank}")  # all have read it: they have been in the call after it
    store.set(keys[rank], json.dumps(note))
    try:
        store.wait(keys, timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        # As if this call had not been: the next one meets the others where they are.
        store.delete_key(keys[rank])
        store.add(f"{room}/calls/{rank}", -1)
        missing = [members[i] for i, key in enumerate(keys) if i != rank and not store.check([key])]
        raise RuntimeError(
            f"{call}: ranks {missing} did not make the same call within {timeout.total_seconds():g} s; every rank of "
            "the group must call it, in the same order"
        ) from error
    return [json.loads(store.get(key)) for key in keys]


@contextmanager
def telling(
    group: dist.ProcessGroup | None, call: str, timeout: timedelta | None, rest: Sequence[Any]
) -> Iterator[None]:
    """Tell the other ranks, who are about to exchange notes, of an error that keeps this one from it.

    Args:
        group, call, timeout: as for `exchange_notes`.
        rest: what follows the problem in their notes.
    """
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # nobody came: this rank's error is the one to show
            exchange_notes([f"{type(error).__name__}: {error}", *rest], group, call, timeout)
        raise


def refuse_together(
    problem: str | None, group: dist.ProcessGroup | None, call: str, timeout: timedelta | None = None
) -> None:
    """Raise ValueError on every rank of `group` if one of them has a problem.

    Args:
        problem: what is wrong on this rank, or None.
        group, call, timeout: as for `exchange_notes`.
    """
    problems = exchange_notes(problem, group, call, timeout)
    for rank, text in enumerate(problems):
        if text is not None:
            raise ValueError(text if len(problems) == 1 else f"rank {rank}: {text}")
