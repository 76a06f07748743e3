"""The figures of steps, the host and `halfbyte compare` (docs/internals/host.md) on all GPUs of a machine at once.

    python -m bench.bars --out bench/results --seconds 540

What the host paces is read first, with nothing beside it: a process that compiles for the other GPU slows that down.
Then each GPU has a queue's next entry at a time, with its share of the cores. Lines are printed as entries end; what
has not begun when the time is over is named, what still runs is ended, and `--only` chooses entries. Records are those
of `python -m bench`; lines of `halfbyte compare` are printed as listings in bench/results/profiles have them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from bench import machine, results

STEPS = {"60m": 60, "125m": 60, "300m": 50, "1b": 40}
"""Optimizer steps of `halfbyte compare`, enough for a pace."""
PACED_BY_THE_HOST = (("host/*", "eval/*"), ("steps/60m",))
BENCHED = (
    *PACED_BY_THE_HOST,
    ("steps/125m",),
    ("steps/moe-60m", "steps/moe-300m"),
    ("train/60m", "train/125m"),
    ("steps/300m",),
    ("train/300m",),
    ("steps/1b",),
    ("train/1b",),
)


class Entry(NamedTuple):
    """One process: what it is called, its command, and whether nothing may run beside it."""

    name: str
    command: tuple[str, ...]
    alone: bool = False


def entries(records: Path, folder: Path, commit: Sequence[str]) -> list[Entry]:
    """Return all of them, in the order in which they begin.

    Args:
        records: folder of the records, which are there line by line as figures come.
        folder: of runs.
        commit: `--commit NAME`, or nothing.
    """
    python = (sys.executable, "-m")
    bench = (*python, "bench", "--no-plain", "--no-peers", "--out", str(records), *commit)
    benched = [Entry(" ".join(only), (*bench, "--only", *only), only in PACED_BY_THE_HOST) for only in BENCHED]
    compared = []
    for model, steps in STEPS.items():
        options = ("--steps", str(steps), "--compile", "on", "--eval-batches", "8")
        options += ("--accumulate", "1") if model == "1b" else ()
        options += ("--out", str(folder / "runs" / model))
        command = (*python, "halfbyte", "compare", "--model", model, "--recipes", "bf16,nvfp4", *options)
        compared.append(Entry(f"compare {model}", command))
    return [found for pair in zip(benched, compared, strict=False) for found in pair] + benched[len(compared) :]


class Queue:
    """Runs entries, one at a time on each GPU.

    Args:
        waiting: the entries.
        folder: for what they print.
        until: when they are ended, in seconds of time.monotonic.
    """

    def __init__(self, waiting: Sequence[Entry], folder: Path, until: float) -> None:
        self.waiting, self.folder, self.until = list(waiting), folder, until
        self.ended: list[tuple[Entry, int]] = []
        self._lock = threading.Lock()

    def run(self, gpus: Sequence[str], cores: Sequence[int]) -> None:
        """Run what is waiting, what is alone first; the cores are shared out among the GPUs."""
        for entry in [entry for entry in self.waiting if entry.alone]:
            if time.monotonic() >= self.until:
                return
            self.waiting.remove(entry)
            self._one(entry, gpus[0])
        workers = [threading.Thread(target=self._work, args=place) for place in machine.places(gpus, cores)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self, gpu: str, cores: Sequence[int]) -> None:
        os.sched_setaffinity(0, cores)  # of this thread, and so of all that it starts
        while True:
            with self._lock:
                if not self.waiting or time.monotonic() >= self.until:
                    return
                entry = self.waiting.pop(0)
            self._one(entry, gpu)

    def _one(self, entry: Entry, gpu: str) -> None:
        begin, output = time.monotonic(), self.folder / f"{re.sub(r'[^a-z0-9]+', '-', entry.name)}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                entry.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                start_new_session=True,
            )
            try:
                status = process.wait(max(0.0, self.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
                process.wait()
                status = -signal.SIGKILL
        said = {0: "", -signal.SIGKILL: ", ended by the limit of time"}.get(status, f", FAILED: {output}")
        with self._lock:
            self.ended.append((entry, status))
            print(f"{entry.name}: {time.monotonic() - begin:.0f} s on GPU {gpu}{said}{speeds(output)}", flush=True)


def speeds(output: Path) -> str:
    """Return tokens a second of both recipes that `halfbyte compare` printed, "" if it did not."""
    lines = [line.strip("| \n").split("|") for line in output.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in cells] for cells in lines]
    column = next((row.index("tokens/s") for row in rows if "tokens/s" in row), None)
    if column is None:
        return ""
    found = {row[0]: float(row[column].replace(",", "")) for row in rows if row[0] in ("bf16", "nvfp4")}
    if len(found) < 2:
        return ""
    bf16, nvfp4 = found["bf16"], found["nvfp4"]
    return f"; tokens/s: bf16 {bf16:,.0f}; nvfp4 {nvfp4:,.0f} ({bf16 / nvfp4:.3f} x its time)"


def lines_of(path: Path) -> list[str]:
    """Return a line for each case of a file of records: its figure, its bar, and whether that is met."""
    run, cases = results.read(path)
    found = []
    for case in cases:
        shape, bars = "x".join(map(str, case["shape"])), f"{case.get('least')}/{case.get('aim')}"
        figure = case.get("problem") or f"{case['value']:.3f} {case['metric']}"
        found.append(f"{case['case']:26}{shape:16}{figure}  {case.get('verdict', 'no bar')} {bars}")
    return [f"{path.name}: {run['device']}", *found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bars", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the records")
    parser.add_argument("--seconds", type=float, default=540, help="of all of it")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="GLOB", help="entries, such as 'compare *'")
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    options = parser.parse_args(arguments)
    gpus = machine.visible_gpus()
    if not gpus:
        print("torch sees no GPU; `halfbyte bench` times what runs on a CPU")
        return 1
    folder = Path(tempfile.mkdtemp(prefix="bars-"))
    commit = ("--commit", options.commit) if options.commit else ()
    records = options.out.resolve()
    before = set(records.glob("*.jsonl"))
    found = entries(records, folder, commit)
    chosen = [entry for entry in found if any(fnmatchcase(entry.name, glob) for glob in options.only)]
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: entries are {'; '.join(entry.name for entry in found)}")
    queue = Queue(chosen, folder, time.monotonic() + options.seconds)
    queue.run(gpus, sorted(os.sched_getaffinity(0)))
    for path in sorted(set(records.glob("*.jsonl")) - before):
        if path.stat().st_size:  # else it was ended before it had said what it is
            print("\n".join(lines_of(path)))
    for entry in queue.waiting:
        print(f"not begun: {entry.name}")
    shutil.rmtree(folder / "runs", ignore_errors=True)  # checkpoints
    return int(bool(queue.waiting) or any(status for _, status in queue.ended))


if __name__ == "__main__":
    raise SystemExit(main())
