"""Two trees in turn on one machine: is any case slower than it was?

    python -m bench.in_turn ../before --only 'quantize/*' 'row_col/*' --pairs 7 --seconds 540

`../before` is a checkout of the other commit. Each tree has a process of its own, in which a case is compared with the
reference and compiled once; then both are timed in turn, in pairs, the other tree first in every second one. The figure
is the median of the pairs' ratios, this tree's time over the other's; a case is slower where that is above 1 by more
than twice the spread of the pairs, their interquartile range. Two processes of one tree can differ by more than their
pairs do, by where their memory lies: `--processes 3` takes the pairs from three of each, at three places, and
`--again 5` reads what came out slower once more in five of each at the end; that reading is the one that counts. Every
visible GPU has two processes and the queue's next case, with its share of the cores; on one of several GPUs the clocks
are those of a machine whose others work too. `--at-once 4` gives it eight, and four cases compare and compile at the
same time; one is timed while all others wait. What there was no time for is named, and `--after FILE` leaves out what a
file has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from statistics import median, quantiles
from threading import Condition, Thread
from typing import Any, Self

import torch

from bench import machine, results
from bench.registry import Case, Shape, all_cases, select
from halfbyte.ops.backends import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("turn_worker.py")
WHOLE = ("host/*", "steps/*", "train/*")  # these measure themselves and run whole at every turn
NOTABLY = 2.0  # spreads of the pairs
MAX_LEAD = 1024  # MiB


class Failed(Exception):
    """A tree cannot time a case; the message says why."""


class Floor:
    """Who may use a GPU: any number of cases that prepare, or one that is timed while none prepares."""

    def __init__(self) -> None:
        self.change = Condition()
        self.preparing = 0
        self.waiting = 0  # to be timed: nobody begins to prepare before these were
        self.timing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Prepare beside others."""
        with self.change:
            self.change.wait_for(lambda: not self.timing and not self.waiting)
            self.preparing += 1
        try:
            yield
        finally:
            with self.change:
                self.preparing -= 1
                self.change.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be timed while all others wait."""
        with self.change:
            self.waiting += 1
            self.change.wait_for(lambda: not self.timing and not self.preparing)
            self.waiting -= 1
            self.timing = True
        try:
            yield
        finally:
            with self.change:
                self.timing = False
                self.change.notify_all()


class Tree:
    """A process that times cases of one tree.

    Args:
        root: of its checkout.
        name: for messages.
        backend, budget: as `Setting` takes them.
        gpu: the only one that it sees, as CUDA_VISIBLE_DEVICES names it; None: what this process sees.
    """

    def __init__(self, root: Path, name: str, backend: str | None, budget: float, gpu: str | None = None) -> None:
        self.root, self.name, self.how = root, name, {"backend": backend, "budget": budget}
        self.seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            # -P: the worker's own folder is this tree's, and nothing of it may stand in for what the other has.
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **self.seen},
        )

    def begin(self, case: str, shape: Shape, lead: int = 0) -> None:
        """Let it compare and compile a case behind `lead` MiB of memory; `wait` waits for it.

        A process that has crashed is replaced.
        """
        if self.process.poll() is not None:
            self.process = self._start()
        whole = any(fnmatchcase(case, glob) for glob in WHOLE)
        self._say({**self.how, "case": case, "shape": list(shape), "whole": whole, "lead": lead})

    def wait(self) -> None:
        """Wait until the case that was begun can be timed."""
        self._hear("ready")

    def time(self) -> float:
        """Return microseconds of a call."""
        self._say({"order": "time"})
        return float(self._hear("us"))

    def end(self) -> None:
        """End the case."""
        self._say({"order": "next"})

    def renew(self) -> None:
        """Go on in a new process."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def _say(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            print(json.dumps(order), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(f"{self.name}: its process ended with status {self.process.wait()}") from None

    def _hear(self, wanted: str) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.name}: its process ended with status {self.process.wait()}")
        answer = json.loads(line)
        if wanted not in answer:
            raise Failed(f"{self.name}: {answer['problem']}")
        return answer[wanted]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def pairs_of(
    mine: Tree, other: Tree, case: str, shape: Shape, pairs: int, floor: Floor, leads: tuple[int, int] = (0, 0)
) -> list[tuple[float, float]]:
    """Return microseconds of this tree and of the other, pair by pair, each behind so many MiB of memory.

    Raises:
        Failed: a tree cannot time the case; both are ready for the next one.
    """
    ready, problems = [mine, other], []

    def said(tree: Tree, act: Callable[[], Any]) -> Any:
        """Return what a tree answers, which one that fails does no more in this case."""
        try:
            return act()
        except Failed as failed:
            ready.remove(tree)
            problems.append(str(failed))

    with floor.shared():
        for tree, lead in zip((mine, other), leads, strict=True):
            said(tree, lambda tree=tree, lead=lead: tree.begin(case, shape, lead))
        for tree in list(ready):  # both compare and compile at the same time
            said(tree, tree.wait)
    found = []
    with floor.alone():
        for index in range(pairs):
            order = (mine, other) if index % 2 == 0 else (other, mine)
            times = {tree.name: said(tree, tree.time) for tree in order if not problems}
            if problems:
                break
            found.append((times[mine.name], times[other.name]))
        for tree in list(ready):
            said(tree, tree.end)
    if problems:
        raise Failed("; ".join(problems))
    return found


def pairs_of_processes(
    mine: Tree, other: Tree, case: str, shape: Shape, pairs: int, processes: int, floor: Floor
) -> list[tuple[float, float]]:
    """Return what `pairs_of` does in as many processes of each tree, one behind the other.

    A case may be faster where its memory lies well in the L2, and all processes of a tree would choose one place: from
    the second on each begins behind memory of another size.

    Raises:
        Failed: as `pairs_of` does.
    """
    found = pairs_of(mine, other, case, shape, pairs, floor)
    sizes = Random(f"{case} {shape}")
    for _ in range(processes - 1):
        with floor.shared():
            mine.renew()
            other.renew()
        leads = sizes.randrange(MAX_LEAD), sizes.randrange(MAX_LEAD)
        found += pairs_of(mine, other, case, shape, pairs, floor, leads)
    return found


def compared(case: str, shape: Shape, found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return a case's line of the record."""
    ratios = [mine / other for mine, other in found]
    low, _, high = quantiles(ratios, n=4)
    ratio, spread = median(ratios), high - low
    words = "slower" if ratio - 1 > NOTABLY * spread else "faster" if 1 - ratio > NOTABLY * spread else "equal"
    return {
        "case": f"turns/{case}",
        "shape": list(shape),
        "us": median(mine for mine, _ in found),
        "other_us": median(other for _, other in found),
        "ratio": ratio,
        "spread": spread,
        "pairs": len(found),
        "verdict": words,
    }


def line(values: dict[str, Any]) -> str:
    """Return a record's line as it is printed."""
    name = f"{values['case'].removeprefix('turns/'):<32}{'x'.join(map(str, values['shape'])):<24}"
    if "problem" in values:
        return f"{name}NO FIGURE: {values['problem']}"
    times = f"{values['other_us']:>10.1f} {values['us']:>10.1f}"
    return f"{name}{times} {values['ratio']:>8.3f} ±{values['spread']:.3f} {values['verdict']}"


def wanted(cases: Iterable[Case], done: set[tuple[str, Shape]], small: bool) -> Iterator[tuple[str, Shape]]:
    """Yield what is to be timed and is not done."""
    for case in cases:
        for shape in (case.small,) if small else case.shapes:
            if (f"turns/{case.name}", shape) not in done:
                yield case.name, shape


class Lanes:
    """Two trees' processes on each GPU, `at_once` times, which take one case after the other from a queue.

    Args:
        options: of the command line.
        places: of each lane.
        until: no case begins after this, in seconds of time.monotonic.
    """

    def __init__(self, options: argparse.Namespace, places: Sequence[machine.Place], until: float) -> None:
        self.options, self.places, self.until = options, places, until

    def timed(self, left: deque[tuple[str, Shape]], processes: int) -> Iterator[dict[str, Any]]:
        """Take cases from `left` until it is empty or the time is over; yield the record's line of each as it ends."""
        answers: SimpleQueue[dict[str, Any] | BaseException | None] = SimpleQueue()
        lanes = []
        for place in self.places:
            floor = Floor()
            for _ in range(self.options.at_once):
                lanes.append(Thread(target=self._lane, args=(place, floor, left, processes, answers)))
        for lane in lanes:
            lane.start()
        try:
            while lanes:
                answer = answers.get()
                if isinstance(answer, dict):
                    yield answer
                elif answer is None:
                    lanes.pop()
                else:
                    raise answer
        except BaseException:
            self.until = 0.0  # the other lanes end with their case
            raise

    def _lane(
        self, place: machine.Place, floor: Floor, left: deque[tuple[str, Shape]], processes: int, answers: Any
    ) -> None:
        try:
            os.sched_setaffinity(0, place.cores)  # of this thread, and so of both processes
            with ExitStack() as stack:
                how = (self.options.backend, self.options.budget, place.gpu)
                mine = stack.enter_context(Tree(ROOT, "this tree", *how))
                other = stack.enter_context(Tree(self.options.other, "the other", *how))
                while time.monotonic() < self.until:
                    try:
                        case, shape = left.popleft()
                    except IndexError:
                        break
                    reading = pairs_of_processes, mine, other, case, shape, self.options.pairs, processes, floor
                    answers.put(_line(case, shape, partial(*reading)))
            answers.put(None)
        except BaseException as error:
            answers.put(error)


def _line(case: str, shape: Shape, reading: Callable[[], list[tuple[float, float]]]) -> dict[str, Any]:
    """Return a case's line of the record, also where it has no figure."""
    try:
        return compared(case, shape, reading())
    except Failed as failed:
        return {"case": f"turns/{case}", "shape": list(shape), "problem": str(failed)}


def readings(lanes: Lanes, left: deque[tuple[str, Shape]], processes: int, again: int) -> Iterator[dict[str, Any]]:
    """Yield the record's line of every case of `left`, and then of those that were slower, from `again` processes."""
    slower: list[tuple[str, Shape]] = []
    for values in lanes.timed(left, processes):
        if values.get("verdict") == "slower":
            slower.append((values["case"].removeprefix("turns/"), tuple(values["shape"])))
        yield values
    if again and slower and not left:
        left.extend(slower)
        yield from lanes.timed(left, again)


def main(arguments: Sequence[str]) -> int:
    """Time cases of both trees in turn; the exit status is 1 if one is slower or has no figure, 3 if time ran out."""
    options = _parse(arguments)
    begun = time.monotonic()
    on_gpu = torch.cuda.is_available()
    done = {(old["case"], tuple(old["shape"])) for path in options.after for old in results.read(path)[1]}
    left = deque(wanted(select(all_cases(), options.only), done, not on_gpu))
    facts = machine.facts(torch.device("cuda" if on_gpu else "cpu")) | {"other_commit": machine.commit(options.other)}
    facts |= {"commit": options.commit} if options.commit else {}
    facts |= {"other_commit": options.other_commit} if options.other_commit else {}
    path = results.claim(facts, options.out, "turns")
    print(f"{'case':<32}{'shape':<24}{'other µs':>10} {'µs':>10} {'ratio':>8}  of {facts['other_commit']}", flush=True)
    last: dict[tuple[str, Shape], dict[str, Any]] = {}  # of each case, whose second reading takes the first one's place

    def timed() -> Iterator[dict[str, Any]]:
        places = machine.places(machine.visible_gpus() or [None], sorted(os.sched_getaffinity(0)))
        lanes = Lanes(options, places, begun + options.seconds)
        for values in readings(lanes, left, options.processes, options.again):
            last[values["case"], tuple(values["shape"])] = values
            print(line(values), flush=True)
            yield values

    results.write(path, facts, timed())
    bad = sum(values.get("verdict", "slower") == "slower" for values in last.values())
    print(f"\n{len(last)} timed, {bad} slower or without a figure, {len(left)} left{': ' if left else ''}", end="")
    print(*(f"{case} {'x'.join(map(str, shape))}" for case, shape in left), sep=", ")
    print(path)
    return 1 if bad else 3 if left else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.in_turn", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("other", type=_tree, help="folder of the other checkout")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="GLOB", help="case names, such as 'quantize/*'")
    parser.add_argument("--pairs", type=_pairs, default=5, help="of every case in each process, at least 3")
    parser.add_argument("--processes", type=int, choices=range(1, 10), default=1, help="of each tree for every case")
    parser.add_argument(
        "--again", type=int, choices=range(10), default=0, help="processes from which what is slower is read once more"
    )
    parser.add_argument("--at-once", type=int, choices=range(1, 9), default=1, help="cases that prepare on each GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of one timing")
    parser.add_argument("--backend", choices=BACKENDS, help="by default what runs on the GPU")
    parser.add_argument(
        "--after", nargs="*", type=Path, default=[], metavar="FILE", help="records of cases to leave out"
    )
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the .jsonl file")
    for name in ("commit", "other-commit"):
        parser.add_argument(f"--{name}", help="what to record where the sources lie outside a git checkout")
    return parser.parse_args(arguments)


def _tree(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "bench" / "registry.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} has no bench/registry.py: give a checkout of halfbyte")
    return path


def _pairs(text: str) -> int:
    if not text.isdecimal() or int(text) < 3:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 3 on; fewer pairs have no spread")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
