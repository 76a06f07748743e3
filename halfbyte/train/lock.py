"""One writer per folder: a file that says who writes to it, locked by the kernel for as long as that process lives.

A process that was killed, however hard, holds no lock. What it wrote into the file stays; the next writer takes over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from halfbyte import files

NAME = ".lock"
PATIENCE = 2.0
"""Seconds in which one that has the lock should have written who it is."""


@contextlib.contextmanager
def hold(work: str, *folders: Path) -> Iterator[None]:
    """Be the one process that writes to `folders` while the block runs.

    Args:
        work: what a second process is told about the first.
        folders: made if they are not there.

    Raises:
        ValueError: another process has one of them; the message says which, where, and since when.
        OSError: a folder cannot be written to.
    """
    with contextlib.ExitStack() as held:
        reasons = [held.enter_context(_hold(folder, work)) for folder in folders]
        lockless = [(folder, reason) for folder, reason in zip(folders, reasons, strict=True) if reason]
        if lockless:
            print(
                f"{lockless[0][0]}: no locks on this filesystem ({lockless[0][1]}); a second process on this host is "
                "told by the first one's pid, on another host it is not",
                file=sys.stderr,
            )
        yield


@contextlib.contextmanager
def _hold(folder: Path, work: str) -> Iterator[str]:
    """Hold one folder; yield why the filesystem has no locks, "" if it has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        reason = _lock(descriptor, folder, path)
        before = _read(descriptor)
        with files.naming(path):
            _write(descriptor, _own(work))
        _warn_of_another_host(before, folder)
        try:
            yield reason
        finally:
            with contextlib.suppress(OSError):  # a disk that fails now has failed the block before
                os.ftruncate(descriptor, 0)
                if not reason:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of this process may have the descriptor too
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, path: Path) -> str:
    """Take the lock; return why the filesystem has no such thing, "" if it has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        raise _refusal(folder, path, _wait_for_record(descriptor)) from None
    except OSError as error:
        reason = error.strerror or str(error)
    record = _read(descriptor)
    if record.get("host") == socket.gethostname() and _is_alive(record.get("pid")):
        raise _refusal(folder, path, record)
    return reason


def _refusal(folder: Path, path: Path, record: dict) -> ValueError:
    who = (
        f"{record.get('work', 'a run')}, pid {record.get('pid')} on {record.get('host')}, since {record.get('since')}"
        if record
        else f"which has not said who it is in {path}"
    )
    return ValueError(
        f"out={str(folder)!r} is in use by another process ({who}); wait for it, stop it, or choose another --out"
    )


def _warn_of_another_host(record: dict, folder: Path) -> None:
    """Say that one on another host did not end by itself: not every network filesystem shares locks between hosts."""
    if record and record.get("host") != socket.gethostname():
        print(
            f"{folder}: took over from pid {record.get('pid')} on {record.get('host')}, there since "
            f"{record.get('since')}, which did not end by itself; if it still runs, stop one of the two",
            file=sys.stderr,
        )


def _own(work: str) -> dict:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"work": work, "pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _write(descriptor: int, record: dict) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(record) + "\n").encode(), 0)
    os.fsync(descriptor)


def _read(descriptor: int) -> dict:
    """Return what the last one to take the lock wrote, {} if it gave it back."""
    try:
        record = json.loads(os.pread(descriptor, 1 << 16, 0))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _wait_for_record(descriptor: int) -> dict:
    deadline = time.monotonic() + PATIENCE
    while not (record := _read(descriptor)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return record


def _is_alive(pid: object) -> bool:
    if type(pid) is not int or pid <= 0 or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True
