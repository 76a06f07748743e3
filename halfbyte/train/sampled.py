"""The statistics of a run: `--stats-every N` writes them to stats.jsonl in its folder, and to its TensorBoard files."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

from halfbyte import files, stats
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.stats.sinks import as_lines
from halfbyte.train.log import Log, Silent
from halfbyte.train.ranks import World

NAME = "stats.jsonl"
NAMED = 3
"""Layers that a line on the terminal names."""


class RunSink:
    """Appends to `stats.jsonl`; an error names it."""

    def __init__(self, folder: Path, after: int) -> None:
        path = folder / NAME
        with files.naming(path):
            kept = [record for record in read_statistics(folder) if record["step"] <= after]
            files.write_text(path, as_lines(kept))
        self._path, self._lines = path, stats.JSONL(path)

    def write(self, statistics: stats.StepStatistics) -> None:
        """Append the records of a step.

        Raises:
            OSError: the disk is full; the error names the file.
        """
        with files.naming(self._path):
            self._lines.write(statistics)


class Unmeasured:
    """Says once, of the first step that was sampled, which layers are not measured and why."""

    def __init__(self) -> None:
        self._is_said = False

    def write(self, statistics: stats.StepStatistics) -> None:
        """Print a line for each reason."""
        if self._is_said:
            return
        self._is_said = True
        reasons: dict[str, list[str]] = {}
        for name, reason in statistics.unobserved.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            print(f"stats: not measured: {', '.join(names[:NAMED])}{more}: {reason}", file=sys.stderr, flush=True)


def read_statistics(folder: Path) -> list[dict]:
    """Return the records of a run, nothing if it wrote none.

    Raises:
        ValueError: a line is not one of statistics; the message names it.
    """
    path = folder / NAME
    return stats.read_records(path) if path.exists() else []


def collector(
    model: nn.Module, every: int, log: Log | Silent, folder: Path, begun: tuple[int, World]
) -> stats.StatsCollector | None:
    """Return what measures the steps of a run, None where nothing is measured, which is said.

    Args:
        model: converted.
        every: of the config; 0 for no statistics.
        log: of this rank.
        folder: of the run.
        begun: the steps that are done, and the ranks that train together.
    """
    if not every:
        return None
    step, ranks = begun
    if not any(isinstance(m, FollowsRecipe) and m.recipe.specs for m in model.modules()):
        if ranks.is_first:
            print(f"stats: the recipe quantizes no layer, so {NAME} is not written", file=sys.stderr)
        return None
    board = getattr(log, "board", None)
    sinks = [RunSink(folder, step), Unmeasured()] if ranks.is_first else []
    to = [*sinks, stats.TensorBoard(board)] if board is not None else sinks
    return stats.collect_stats(model, every=every, to=to).start_at(step)
