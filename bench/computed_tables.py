"""What NVFP4 gains and costs by size of model, as `halfbyte plan` computes it: a table of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from bench.markdown import rows
from bench.records import Record
from halfbyte.plan.planning import GIB, PlanRequest, plan

ONE: dict[str, Any] = {"gpus": 1, "mesh": "dp_shard=1", "sequences": 8, "sequence": 2048}
EIGHT: dict[str, Any] = {"gpus": 8, "mesh": "dp_shard=8", "sequences": 1, "sequence": 8192}
CASES = (
    *(("60m", ONE), ("125m", ONE), ("300m", ONE), ("1b", ONE), ("moe-60m", ONE), ("moe-300m", ONE)),
    *(("1b", EIGHT), ("llama3-8b", EIGHT)),
)
HARDWARE = ("h200", "b200")


def cells(model: str, how: dict[str, Any], hardware: str) -> list[str]:
    """Return the step's time and the memory of a GPU in NVFP4, beside those of bf16."""
    requests = [PlanRequest(model=model, recipe=recipe, hardware=hardware, **how) for recipe in ("nvfp4", "bf16")]
    ours, bf16 = map(plan, requests)
    milliseconds = [1000 * found.step.total for found in (bf16, ours)]
    peaks = [found.peak.total / GIB for found in (bf16, ours)]
    time = " → ".join(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in milliseconds)
    memory = " → ".join(f"{value:.1f}" for value in peaks)
    return [f"{time}, {milliseconds[1] / milliseconds[0]:.2f}×", f"{memory}, {peaks[1] / peaks[0]:.2f}×"]


@cache
def table() -> str:
    """Return the table: bf16 → nvfp4 of every case on every GPU."""
    head = ["model", "GPUs", *(f"{name}, {what}" for name in HARDWARE for what in ("ms a step", "GiB a GPU"))]
    lines = []
    for model, how in CASES:
        found = [cell for hardware in HARDWARE for cell in cells(model, how, hardware)]
        lines.append([model, str(how["gpus"]), *found])
    return rows(head, lines)


def render(records: Sequence[Record]) -> str:
    """Return the table, for bench.tables."""
    return table()
