"""Results as they are written and read: a JSONL file whose first line describes the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bench.registry import MULTIPLES, Bar, Outcome, Shape

FOLDER = Path(__file__).resolve().parent / "results"
FIELD_BAR = 0.80
"""Share of the achievable bandwidth that the field asks of every quantization kernel (torchao's NVFP4 tracker)."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line: a case at a shape, and its outcome, or why there is none."""

    case: str
    shape: Shape
    bar: Bar | None
    outcome: Outcome | None = None
    problem: str = ""

    @property
    def verdict(self) -> str:
        """How the value stands to its bar: "aim", "least", "missed", or "" without a bar."""
        if self.outcome is None or self.bar is None:
            return ""
        if self.outcome.facts.get("peak_GiB", 0.0) > self.outcome.facts.get("bf16_peak_GiB", 0.0):
            return "missed"  # a training step must also need less memory than bf16's
        sign = -1 if self.outcome.metric in MULTIPLES else 1
        value, least, aim = (sign * v for v in (self.outcome.value, self.bar.least, self.bar.aim))
        return "aim" if value >= aim else "least" if value >= least else "missed"

    def as_json(self) -> dict[str, Any]:
        """Return plain values; microseconds rather than seconds."""
        values: dict[str, Any] = {"case": self.case, "shape": list(self.shape)}
        if self.outcome is None:
            return values | {"problem": self.problem}
        out = self.outcome
        values |= {"us": out.seconds * 1e6, "spread": out.spread, "metric": out.metric, "value": out.value}
        if out.work:
            values |= {"rate": out.rate, "unit": out.unit}
        if self.bar is not None:
            values |= {"least": self.bar.least, "aim": self.bar.aim, "verdict": self.verdict}
        if out.metric == "of copy":
            values["to_80_percent"] = FIELD_BAR - out.value
        others = {"rivals": dict(out.rivals)} | ({"left_out": dict(out.left_out)} if out.left_out else {})
        return values | {"checked": list(out.checked), **others, **out.facts}


def claim(facts: dict[str, Any], folder: Path = FOLDER, kind: str = "") -> Path:
    """Make a new, empty file, named after its kind, device, time and commit, and return it.

    The name is this process's own: of several that began in one second, each but the first takes the next free second.
    """
    device = re.sub(r"[^a-z0-9]+", "-", f"{kind} {facts['device']}".lower()).strip("-")
    when = datetime.fromisoformat(str(facts["time"])[:19])
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        path = folder / f"{device}-{when:%Y%m%dT%H%M%S}-{facts['commit'].rstrip('+')}.jsonl"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            when += timedelta(seconds=1)
        else:
            return path


def write(path: Path, facts: dict[str, Any], results: Iterable[dict[str, Any]]) -> None:
    """Write the run's line and then each result as it comes, so that a run that stops keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", buffering=1) as file:
        file.write(json.dumps({"run": facts}) + "\n")
        for line in results:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run's facts and its results.

    Raises:
        ValueError: the file is not one that a benchmark wrote.
    """
    try:
        first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        return first["run"], lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a result of the benchmark; give a .jsonl from bench/results") from error


# The table


HEAD = f"{'case':<26}{'shape':<20}{'µs':>10}{'rate':>16}{'value':>17}  {'bar':<18}compared with"


def line(result: Result) -> str:
    """Return one row of the table."""
    shape = "x".join(map(str, result.shape))
    start = f"{result.case:<26}{shape:<20}"
    out = result.outcome
    if out is None:
        return f"{start}  NO FIGURE: {result.problem}"
    rate = f"{out.rate:.4g} {out.unit}" if out.work else ""
    notes = [f"{name} {ratio:.2f}x our time" for name, ratio in out.rivals.items()]
    notes += [f"{name} not timed: {why}" for name, why in out.left_out.items()]
    if "peak_GiB" in out.facts:
        notes.append(f"peak {out.facts['peak_GiB']:.1f} GiB, bf16 {out.facts['bf16_peak_GiB']:.1f}")
    row = f"{start}{out.seconds * 1e6:>10.1f}{rate:>16}{_value(out):>17}  {_bar(result):<18}{', '.join(notes)}"
    return row.rstrip()


def _value(out: Outcome) -> str:
    if out.metric == "us":
        return ""
    return f"{out.value:.3f} {out.metric}" if out.metric in MULTIPLES else f"{out.value:.1%} {out.metric}"


def _bar(result: Result) -> str:
    if result.bar is None:
        return ""
    words = {"aim": "aim met", "least": "least met", "missed": "MISSED"}[result.verdict]
    if result.outcome is not None and result.outcome.metric in MULTIPLES:
        return f"{words} {result.bar.least:g}/{result.bar.aim:g}"
    return f"{words} {result.bar.least:.0%}/{result.bar.aim:.0%}"


def summary(results: list[Result], on_gpu: bool) -> str:
    """Return what is below the table: how many bars are met, and the distance of each kernel to 80 %."""
    barred = [r for r in results if r.verdict]
    lines = [
        f"{sum(r.verdict != 'missed' for r in barred)} of {len(barred)} bars met, "
        f"{sum(r.verdict == 'aim' for r in barred)} at their aim, "
        f"{sum(r.outcome is None for r in results)} cases without a figure"
    ]
    below = [
        f"{r.case} {'x'.join(map(str, r.shape))} by {FIELD_BAR - r.outcome.value:.1%}"
        for r in results
        if r.outcome is not None and r.outcome.metric == "of copy" and r.outcome.value < FIELD_BAR
    ]
    if below and on_gpu:
        lines.append(f"below 80 % of the copy bandwidth: {', '.join(below)}")
    return "\n".join(lines)
