"""Tables of studies, from what `halfbyte study --record` keeps in experiments/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.loss_tables import MINUS
from bench.markdown import rows
from bench.records import Record

RESULTS = Path(__file__).parents[1] / "experiments" / "results"


def league(name: str) -> Callable[[Sequence[Record]], str]:
    """Return the renderer of a study's table: the rows that were trained, and which were not."""

    def render(records: Sequence[Record]) -> str:
        columns = ["place", "recipe", "seeds", "held-out loss", "gap to bf16", "tokens/s", "memory", "4-bit FLOPs"]
        path = RESULTS / name / "league.json"
        found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
        trained = [row for row in found if row["seeds"]]
        missing = [f"`{row['recipe']}`" for row in found if not row["seeds"]]
        table = rows(columns, [_cells(row) for row in trained])
        elsewhere = [f"`{row['recipe']}`" for row in trained if row["speed"] is None]
        if elsewhere:
            table += f"\n\nTrained beside another CPU, so that speeds do not compare: {', '.join(elsewhere)}."
        return table + (f"\n\nNot trained yet: {', '.join(missing)}." if missing else "")

    return render


def _cells(row: Mapping[str, Any]) -> list[str]:
    is_base = row["gap"] == 0 and row["place"] is None
    gap = "" if is_base or row["gap"] is None else f"{row['gap']:+.2f} %".replace("-", MINUS)
    return [
        "" if row["place"] is None else str(row["place"]),
        f"`{row['recipe']}`",
        str(len(row["seeds"])),
        f"{row['diverged']} diverged" if row["loss"] is None else f"{row['loss']:.4f}",
        gap if row["half"] is None else f"{gap} ± {row['half']:.2f}",
        *("" if row[name] is None else f"{row[name]:.2f}×" for name in ("speed", "memory")),
        f"{100 * row['four_bit']:.0f} %",
    ]


def learning_rates(records: Sequence[Record]) -> str:
    """Return the held-out losses of the study of learning rates."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("lr/seed-0/*/result.json"))]
    lines = sorted((run["identity"]["optim"]["lr"], run["held_out_loss"]) for run in found)
    return rows(["learning rate", "held-out loss"], [[f"{lr:g}", f"{loss:.4f}"] for lr, loss in lines])


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {"study-lr": learning_rates, "study-screen": league("screen"), "study-final": league("final")}
)
