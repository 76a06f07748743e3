"""torchrun's own main function, in a process that has imported torch already; its ranks may be forked from that."""

from __future__ import annotations

import ctypes
import os
import pickle
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def torchrun(arguments: list[str], environment: dict[str, str], output: str, error: str, forked: int) -> None:
    """Be `torchrun`, called with these arguments there.

    Args:
        arguments: with the program's name.
        environment: all of it.
        output, error: files for what it and its ranks print.
        forked: how many ranks are children forked from this process; for others torchrun starts an interpreter.
    """
    for stream, path in enumerate((output, error), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    waiting: list[Rank] = []
    for _ in range(forked):  # before torchrun has threads, whose locks a fork might find taken
        waiting.append(Rank(waiting))
    anew = SubprocessHandler._popen

    def begin(handler: SubprocessHandler, command: tuple[str, ...], surroundings: dict[str, str]):
        return waiting.pop(0).begin(command, surroundings) if waiting else anew(handler, command, surroundings)

    SubprocessHandler._popen = begin
    sys.argv = arguments
    from torch.distributed.run import main

    main()


class Rank:
    """A child that waits until it is told which program to be; then what torchrun asks of a subprocess.Popen."""

    def __init__(self, before: list[Rank]) -> None:
        read, self.orders = os.pipe()
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            os.setsid()
            for end in (self.orders, *(rank.orders for rank in before)):
                os.close(end)
            _wait(read)
        os.close(read)

    def begin(self, command: tuple[str, ...], environment: dict[str, str]) -> Rank:
        """Tell it; the interpreter at the command's head is the one that it is."""
        with open(self.orders, "wb") as orders:
            pickle.dump((command[1:], environment), orders)
        return self

    def poll(self) -> int | None:
        """Return how it ended, if it has."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, when it has."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode


def _wait(read: int) -> NoReturn:
    """Be the program that is asked for, to the end of the interpreter; end at once if torchrun has."""
    try:
        with open(read, "rb") as orders:
            command, environment = pickle.load(orders)
    except EOFError:
        os._exit(0)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdout.reconfigure(write_through=True)  # -u
    status = _status(lambda: _run([part for part in command if part != "-u"]))
    ctypes.pythonapi.Py_Exit(status)  # os._exit, by which a child of multiprocessing ends, leaves out C++'s own ends
    raise AssertionError("it has ended")


def _run(command: list[str]) -> None:
    """Run what python would with these arguments: -m and a module's name or a file, then the program's own."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _status(program: Callable[[], None]) -> int:
    """Return the status that an interpreter ends with after a program, having printed what it prints then."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
