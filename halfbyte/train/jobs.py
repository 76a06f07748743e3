"""Runs side by side: a process for each, each on a GPU of its own, which go on where they stopped.

`python -m halfbyte.train.jobs FILE` trains the one run that a file describes, as `halfbyte train` would. While a run
has a GPU, the next one imports and reads its text, and then waits for a line that says that the GPU is its own.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfbyte import files
from halfbyte.train.config import DataConfig, OptimConfig, RunConfig, TrainConfig, TuneConfig
from halfbyte.train.mesh_config import MeshConfig
from halfbyte.train.signals import Interrupts

NAP = 0.2
"""Seconds between two looks at the processes."""
DIVERGED, STOPPED = 1, (130, 143)
REFUSED = 2
"""Exit statuses of a run; others say that something is wrong."""
TURN = "--in-turn"
"""Behind the file: wait for a line on the standard input before anything touches the GPU."""
PATHS = ("out", "cache", "begin", "teacher")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """A run that is to be trained: what it is called where it is spoken of, its treatment, its config."""

    name: str
    recipe: str
    config: TrainConfig


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of jobs, by name: `left` have not ended, the same call goes on with them; `failed` say why."""

    ended: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class _Running(NamedTuple):
    job: RunJob
    process: subprocess.Popen
    output: Path
    since: float
    has_turn: bool = False


def workplaces(device: str, workers: int) -> list[int | None]:
    """Return where runs go side by side: numbers of GPUs, or None for this machine's CPU.

    Args:
        device: of the runs: "auto", "cpu" or "cuda".
        workers: how many at a time; 0: one for every GPU, one on a CPU.

    Raises:
        ValueError: there are fewer GPUs, or it is no number of them.
    """
    if workers < 0:
        raise ValueError(f"workers={workers}: give a number of runs at a time, or 0 for one on every GPU")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if not gpus:
        return [None] * max(1, workers)
    if workers > gpus:
        raise ValueError(
            f"workers={workers}: this machine has {gpus} GPUs, and each run takes one; give at most {gpus}"
        )
    return list(range(workers or gpus))


def run_side_by_side(
    jobs: Sequence[RunJob],
    where: Sequence[int | None],
    folder: Path,
    *,
    seconds: float,
    interrupts: Interrupts,
    say: Say,
    done: Callable[[RunJob], None] | None = None,
) -> Outcome:
    """Train all jobs, as many at a time as there are places, and wait until they ended or time is up.

    Args:
        jobs: of different folders.
        where: see `workplaces`. On a GPU the next run gets ready while one trains.
        folder: for what each job is and what it prints.
        seconds: after which no run is begun and those that train stop with a checkpoint.
        interrupts: of the caller; a signal stops all runs likewise.
        say: prints a line.
        done: called with every job that ended, at once: what it keeps of it, nothing that comes later can lose.

    Raises:
        Stopped: a signal came; every run has a checkpoint.
    """
    waiting, outcome, start = list(jobs), Outcome(), time.monotonic()
    slots = [*where, *(place for place in where if place is not None)]
    running: dict[int, _Running] = {}
    with interrupts.deferred():
        try:
            while waiting or running:
                is_over = time.monotonic() - start > seconds or interrupts.requested
                if is_over and waiting:
                    outcome.left.extend(job.name for job in waiting)
                    waiting.clear()
                for slot, place in enumerate(slots):
                    if waiting and slot not in running:
                        running[slot] = _begin(waiting.pop(0), place, folder)
                for slot in _next_turns(running, slots):
                    running[slot] = _give_turn(running[slot])
                    say(f"{running[slot].job.name}: begun" + ("" if slots[slot] is None else f" on GPU {slots[slot]}"))
                if is_over:
                    _stop(running)
                    is_over = False
                for slot, one in list(running.items()):
                    if one.process.poll() is not None:
                        del running[slot]
                        if _note(one, outcome, say) and done is not None:
                            done(one.job)
                time.sleep(NAP if running else 0)
        finally:
            _stop(running)
            for one in running.values():
                one.process.wait()
        interrupts.check("with the runs that are left")
    return outcome


def _begin(job: RunJob, place: int | None, folder: Path) -> _Running:
    stem = folder / job.name.replace("/", "_").replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    description, output = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.txt")
    files.write_text(description, json.dumps({"recipe": job.recipe, "config": values_of_config(job.config)}, indent=2))
    command = [sys.executable, "-m", "halfbyte.train.jobs", str(description), TURN]
    if place is not None:
        command = ["env", f"CUDA_VISIBLE_DEVICES={place}", *command]
    with output.open("ab") as file:  # a session of its own: ctrl-C reaches this process, which passes it on
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, start_new_session=True
        )
    return _Running(job, process, output, time.monotonic())


def _next_turns(running: dict[int, _Running], slots: Sequence[int | None]) -> list[int]:
    """Return the slots whose runs may train now: on every GPU one, the first that was begun; on a CPU all."""
    taken = {slots[slot] for slot, one in running.items() if one.has_turn}
    found = []
    for slot, one in sorted(running.items(), key=lambda item: item[1].since):
        place = slots[slot]
        if not one.has_turn and one.since >= 0 and (place is None or place not in taken):
            found.append(slot)
            taken.add(place)
    return found


def _give_turn(one: _Running) -> _Running:
    with contextlib.suppress(BrokenPipeError):  # it ended before: what it said of that is read elsewhere
        assert one.process.stdin is not None
        one.process.stdin.write(b"\n")
        one.process.stdin.close()
    return one._replace(has_turn=True)


def _stop(running: dict[int, _Running]) -> None:
    """Ask runs to end with a checkpoint; asked twice they would end without."""
    for slot, one in running.items():
        if one.process.poll() is None and one.since >= 0:
            one.process.send_signal(signal.SIGTERM)
        running[slot] = one._replace(since=-1.0)


def _note(one: _Running, outcome: Outcome, say: Say) -> bool:
    """Write down how a run stopped, and return whether it ended."""
    status, name = one.process.returncode, one.job.name
    if not one.has_turn:
        _give_turn(one)  # which closes its pipe
    if status in (0, DIVERGED) and (one.job.config.run.out / "result.json").exists():
        outcome.ended.append(name)
        say(f"{name}: {_last_line(one.output, 'halfbyte' if status else 'held-out')}")
    elif status in STOPPED or status == -signal.SIGTERM:
        outcome.left.append(name)
        say(f"{name}: stopped, the same command goes on with it")
    else:
        outcome.failed[name] = f"exit status {status}: {_last_line(one.output, '')} ({one.output})"
        say(f"{name}: failed, {outcome.failed[name]}")
    return name in outcome.ended


def _last_line(path: Path, word: str) -> str:
    """Return the last line that holds a word, else the last one."""
    lines = [line.strip() for line in files.read_text(path).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if word in line), lines[-1] if lines else "nothing was printed")


def values_of_config(config: TrainConfig) -> dict[str, Any]:
    """Return a config as JSON values, for `config_of`; an infinite number is written as Python's json writes it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items()}
        return str(value) if isinstance(value, Path) else value

    return plain(asdict(config))


def config_of(values: dict[str, Any]) -> TrainConfig:
    """Return the config that `values_of_config` wrote.

    Raises:
        TypeError, ValueError: these are not its values.
    """
    kinds = {"data": DataConfig, "optim": OptimConfig, "run": RunConfig, "mesh": MeshConfig, "tune": TuneConfig}
    parts: dict[str, Any] = dict(values)
    for name, kind in kinds.items():
        fields: dict[str, Any] = dict(parts[name])
        for key in fields.keys() & set(PATHS):
            fields[key] = None if fields[key] is None else Path(fields[key])
        parts[name] = kind(**fields)
    return TrainConfig(**parts)


def _await_turn() -> None:
    """Wait for a line on the standard input; without one, whoever would have written it is gone."""
    if not sys.stdin.buffer.readline():
        print("whoever began this run has ended; it was not trained", file=sys.stderr)
        sys.exit(STOPPED[1])


def main(arguments: list[str]) -> int:
    """Train the run that a file describes; the exit status is that of `halfbyte train`."""
    from halfbyte.train import commands  # which asks for this module too

    described, wait = files.read_json(Path(arguments[0])), _await_turn if TURN in arguments else None
    try:
        return commands.train_alone(described["recipe"], config_of(described["config"]), wait)
    except (ValueError, ImportError) as error:
        print(f"{described['recipe']}: {error}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
