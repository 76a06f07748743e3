"""Where statistics go: a file of JSON lines, TensorBoard, Weights & Biases, a table on the terminal.

Packages are imported when a sink is made, so that nobody needs those that he does not use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halfbyte import files
from halfbyte.stats.figures import NOISE_LIMIT
from halfbyte.stats.table import HEAD, PRODUCT_HEAD, StepStatistics

FIGURES = ("amax", "snr_db", "relative_error", "underflow", "saturation", "scale_underflow", "rht_gain_db", "outliers")
"""Of every operand, as curves."""
WIDTH = 230
"""Columns that a table takes."""


class JSONL:
    """One JSON object a line: of every operand and every product of every layer; null where a figure is not finite.

    Args:
        path: of the file, to which lines are appended.
        after: the step behind which a resumed run goes on: lines of later steps, and a line cut in half, are dropped.
    """

    def __init__(self, path: str | Path, *, after: int | None = None) -> None:
        self.path = Path(path)
        if after is not None and self.path.exists():
            kept = [record for record in read_records(self.path) if record["step"] <= after]
            files.write_text(self.path, as_lines(kept))

    def write(self, statistics: StepStatistics) -> None:
        """Append the records of a step."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(as_lines(statistics.records()))


def as_lines(records: list[dict[str, Any]]) -> str:
    """Return records as JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records that `JSONL` wrote; a last line cut in half is left out.

    Raises:
        ValueError: another line is no JSON object with a step and a layer; the message names it.
    """
    records: list[dict[str, Any]] = []
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number}: not JSON ({error}); delete the line") from error
        if not isinstance(record, dict) or type(record.get("step")) is not int or "layer" not in record:
            raise ValueError(f"{path} line {number}: not a line of statistics; delete the line")
        records.append(record)
    return records


def scalars(statistics: StepStatistics) -> dict[str, float]:
    """Return {name: value} of the curves of a step, such as stats/blocks.0.up_proj/x.row/snr_db."""
    found: dict[str, float] = {}
    for record in statistics.records():
        of = f"stats/{record['layer']}/{record.get('operand') or record['product']}"
        names = FIGURES if "operand" in record else ("cosine", "noise_ratio")
        found |= {f"{of}/{name}": record[name] for name in names if record[name] is not None}
    found["stats/noise_ratio"] = statistics.noise_ratio
    return found


class TensorBoard:
    """Curves in TensorBoard.

    Args:
        writer: a SummaryWriter, or the folder of a new one.

    Raises:
        ImportError: a folder, without the package `tensorboard`.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, str | Path):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("hb.stats.TensorBoard needs `tensorboard`: pip install 'halfbyte[train]'") from error
            writer = SummaryWriter(str(writer))
        self.writer = writer

    def write(self, statistics: StepStatistics) -> None:
        """Add a point to every curve."""
        for name, value in scalars(statistics).items():
            self.writer.add_scalar(name, value, statistics.step)


class WandB:
    """Curves in Weights & Biases.

    Args:
        run: what wandb.init returned; None: the run that is active.

    Raises:
        ImportError: None, without the package `wandb`.
        ValueError: None, and no run is active.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            try:
                import wandb  # type: ignore[import-not-found]
            except ImportError as error:
                raise ImportError("hb.stats.WandB needs `wandb`: pip install wandb, or pass run=") from error
            run = wandb.run
            if run is None:
                raise ValueError("run=None: no run of wandb is active; call wandb.init first, or pass what it returned")
        self.run = run

    def write(self, statistics: StepStatistics) -> None:
        """Log the step."""
        self.run.log(scalars(statistics), step=statistics.step)


class Table:
    """Tables on the terminal, drawn by rich.

    Args:
        console: a rich.console.Console; None: standard output.

    Raises:
        ImportError: the package `rich` is missing.
    """

    def __init__(self, console: Any = None) -> None:
        try:
            from rich.console import Console
        except ImportError as error:
            raise ImportError("hb.stats.Table needs `rich`: pip install 'halfbyte[train]'") from error
        self.console = console or Console()
        if console is None and self.console.width < WIDTH:
            self.console.width = WIDTH  # cells cut to fit say nothing; lines may wrap

    def write(self, statistics: StepStatistics) -> None:
        """Print the tables of a step; noise beyond 1/√3 in red."""
        from rich.table import Table as Grid

        for title, head, rows in (
            (f"step {statistics.step}: operands", HEAD, statistics.operand_rows()),
            (f"step {statistics.step}: products", PRODUCT_HEAD, statistics.product_rows()),
        ):
            grid = Grid(title=title)
            for i, name in enumerate(head):
                grid.add_column(name, no_wrap=True, justify="left" if i < 2 else "right")
            for row in rows:
                grid.add_row(*row, style="red" if row[-1].endswith("!") else None)
            self.console.print(grid)
        for line in statistics.closing_lines():
            self.console.print(line, style="red" if statistics.is_noisy and f"{NOISE_LIMIT:.3f}" in line else None)
