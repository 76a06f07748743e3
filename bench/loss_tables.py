"""Tables of losses, from the comparisons in bench/results/training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bench import losses
from bench.markdown import rows
from bench.records import Record

MINUS = "−"


def gap(line: dict[str, Any], first: dict[str, Any]) -> str:
    """Return a run's gap to the first of its comparison, in percent of the held-out loss."""
    if line is first:
        return ""
    if None in (line["held_out_loss"], first["held_out_loss"]) or line["is_diverged"] or first["is_diverged"]:
        return "diverged"
    percent = 100 * (line["held_out_loss"] / first["held_out_loss"] - 1)
    return f"{percent:+.2f} %".replace("-", MINUS)


def comparison(name: str) -> Callable[[Sequence[Record]], str]:
    """Return the renderer of one comparison's table."""

    def render(records: Sequence[Record]) -> str:
        found = losses.load()
        if name not in found:
            return rows(["recipe", "held-out loss", "gap to bf16"], [["no record", "", ""]])
        _, lines = found[name]
        return rows(
            ["recipe", "held-out loss", "gap to bf16"],
            [[line["recipe"], f"{line['held_out_loss']:.4f}", gap(line, lines[0])] for line in lines],
        )

    return render


def seeds(records: Sequence[Record]) -> str:
    """Return the gaps of all ablations: a line a learning rate and recipe, a column a seed."""
    found: dict[tuple[float, str], dict[int, str]] = {}
    for name, (run, lines) in losses.load().items():
        if name.startswith("ablation-"):
            for line in lines[1:]:
                at = found.setdefault((run["config"]["optim"]["lr"], line["recipe"]), {})
                at[run["config"]["seed"]] = gap(line, lines[0])
    columns = sorted({seed for at in found.values() for seed in at})
    lines = [[recipe, f"{lr:g}", *(at.get(seed, "") for seed in columns)] for (lr, recipe), at in sorted(found.items())]
    return rows(["recipe", "learning rate", *(f"gap, seed {seed}" for seed in columns)], lines)


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {"make-train-losses": comparison("make-train"), "moe-losses": comparison("moe"), "ablation": seeds}
)
