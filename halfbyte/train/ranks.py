"""The ranks of a run: who of them writes, what they agree on, and how an error of one ends all with one message.

What is agreed on travels over gloo, which notices at once that a rank has died. One process alone agrees with itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed import agree
from halfbyte.train.launch import ProcessPlace

T = TypeVar("T")
TOLD = "halfbyte/told"
"""In the launcher's store: how many ranks had something to say of their end. The first says it."""
GRACE = 3.0
"""Seconds in which a rank that failed says so, before the others take it for killed."""
LONG = timedelta(hours=12)
"""How long ranks wait for the first to tokenize a corpus; a rank that died ends the wait."""


class Elsewhere(Exception):
    """Another rank failed, and says why."""


class World:
    """What this process knows of those that train with it.

    Args:
        place: this process among them.
        control: a gloo group of all of them, None for one process.
    """

    def __init__(self, place: ProcessPlace | None = None, control: dist.ProcessGroup | None = None) -> None:
        self.place = place or ProcessPlace()
        self.control = control

    @property
    def size(self) -> int:
        """How many there are."""
        return self.place.size

    @property
    def is_first(self) -> bool:
        """Whether this one writes and speaks for all."""
        return self.place.rank == 0

    def first(self, work: Callable[[], T]) -> T:
        """Return what `work` returns on the first rank, on every rank.

        Raises:
            Elsewhere: it failed there; there its own error is raised.
        """
        if self.size == 1:
            return work()
        failure, answer = None, None
        if self.is_first:
            try:
                answer = work()
            except Exception as error:
                failure = error
        box: list[Any] = [failure is not None, answer]
        dist.broadcast_object_list(box, src=0, group=self.control)
        if failure is not None:
            raise failure
        if box[0]:
            raise Elsewhere
        return box[1]

    def together(self, work: Callable[[], T]) -> T:
        """Return what `work`, in which no rank waits for another, returns here, if it fails nowhere.

        Raises:
            Elsewhere: it failed on another rank; the first on which it failed raises its own error.
        """
        if self.size == 1:
            return work()
        failure, answer = None, None
        try:
            answer = work()
        except Exception as error:
            failure = error
        failed = [rank for rank, is_so in enumerate(self.gather(failure is not None)) if is_so]
        if failed and failed[0] == self.place.rank and failure is not None:
            raise failure
        if failed:
            raise Elsewhere
        return answer  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.size == 1:
            return number
        box = torch.tensor(number)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control)
        return int(box)

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of the ranks' tensors, which are on the devices that they train on."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total / self.size

    def first_here(self, work: Callable[[], T], call: str) -> T:
        """Return what `work` returns here; one rank of every machine does it before the others, who find its files.

        Args:
            work: of minutes or hours the first time, of seconds after that.
            call: its name.

        Raises:
            Elsewhere: it failed on another rank.
        """
        if self.size == 1:
            return work()
        failure, answer = None, None
        leads = self.place.local_rank == 0
        if leads:
            try:
                answer = work()
            except Exception as error:
                failure = error
        failed = agree.exchange_notes(failure is not None, None, call, LONG)
        if failure is not None and failed.index(True) == self.place.rank:
            raise failure
        if any(failed):
            raise Elsewhere
        return self.together(lambda: answer if leads else work())  # type: ignore[return-value]

    def compare(self, note: dict, differences: Callable[[dict, dict], list[str]]) -> None:
        """Raise if ranks were asked to do different things.

        Args:
            note: what this one was asked, as JSON holds it.
            differences: says in words how the first note differs from the second.

        Raises:
            ValueError: on the first rank, which names another rank and all differences to it.
            Elsewhere: on the others.
        """
        notes = self.gather(note)

        def look() -> None:
            for rank, theirs in enumerate(notes):
                changed = differences(notes[0], theirs)
                if changed:
                    raise ValueError(
                        f"rank {rank} was started otherwise than rank 0 ({'; '.join(changed)}, where 'there' is rank "
                        f"{rank}); give all ranks the same command and packages"
                    )

        self.first(look)

    def say(self, text: str) -> None:
        """Print a line for the user, on the standard error that the process began with."""
        print(text, file=sys.__stderr__, flush=True)

    def speaks_of(self, error: BaseException) -> bool:
        """Return whether this rank is to show `error`, which ends it: it is its own, and nobody spoke before."""
        if self.size == 1:
            return True
        if isinstance(error, Elsewhere):
            return False
        with contextlib.suppress(RuntimeError):  # the store may be gone, with the launcher or the rank that held it
            store = dist.distributed_c10d._get_default_store()
            deadline = time.monotonic() + (GRACE if is_lost(error) else 0)
            while time.monotonic() < deadline and not store.check([TOLD]):
                time.sleep(0.05)
            return store.add(TOLD, 1) == 1
        return self.is_first or is_lost(error)  # nobody can be asked: rather twice than not at all


def is_lost(error: BaseException) -> bool:
    """Return whether an error is that of communication with a rank that is not there any more."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "connection was likely closed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def lost_in_words(error: BaseException, ranks: World) -> str:
    """Return what happened to this rank if `is_lost(error)`, without the place in gloo's sources."""
    reason = str(error).partition("\n")[0].rpartition(".cc:")[2].partition("] ")[2] or str(error)
    return f"rank {ranks.place.rank} lost another ({reason.partition('. ')[0][:120]})"


@contextlib.contextmanager
def joined(place: ProcessPlace) -> Iterator[World]:
    """Be one of the processes that were started together while the block runs; only the first of them prints.

    Standard error of the others stays for errors that end them. The process group is gone when the block ends: gloo's
    threads must not outlive the interpreter.
    """
    if place.size == 1:
        yield World(place)
        return
    with contextlib.ExitStack() as stack:
        if place.rank:
            nothing = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nothing))
            stack.enter_context(contextlib.redirect_stderr(nothing))
        ranks = _join(place)
        try:
            yield ranks
        except BaseException as error:
            _forget_frames(error)
            raise
        finally:
            ranks.control = None
            gc.collect()
            dist.destroy_process_group()


def _join(place: ProcessPlace) -> World:
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        count = torch.cuda.device_count()
        if place.local_rank >= count:
            raise ValueError(
                f"LOCAL_RANK={place.local_rank}: this machine has {count} GPUs; start torchrun --nproc-per-node {count}"
            )
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    control: Any = dist.new_group(backend="gloo") if has_gpu else dist.group.WORLD
    return World(place, control)


def _forget_frames(error: BaseException) -> None:
    """Drop what the frames of an error hold: models keep process groups."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]
