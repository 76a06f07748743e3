"""The run of full size, from what experiments/full_size.py left in experiments/results/full_size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.loss_tables import MINUS
from bench.markdown import percent, rows
from bench.records import Record
from halfbyte.plan import PlanRequest

FOLDER = Path(__file__).parents[1] / "experiments" / "results" / "full_size"
BASE = "bf16"


@dataclass(frozen=True, kw_only=True)
class FullRun:
    """A run of one recipe.

    config, result, counted: what the run wrote; `counted` is full_size.json.
    machine: commit, time and devices of all runs.
    """

    config: dict[str, Any]
    result: dict[str, Any]
    counted: dict[str, Any]
    machine: dict[str, Any]

    @property
    def recipe(self) -> str:
        """Its name."""
        return self.result["recipe"]

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.result["tokens"] // self.result["steps"]

    @property
    def seconds(self) -> float:
        """Seconds of a step, the median by tokens."""
        return self.tokens / self.result["steady_tokens_per_second"]

    @property
    def stamp(self) -> str:
        """When and on which tree."""
        moment = self.machine["time"].translate(str.maketrans("", "", "-:Z"))
        return f"{moment}-{self.machine['commit']}"

    @property
    def request(self) -> PlanRequest:
        """What `halfbyte plan` is asked of it."""
        identity, ranks = self.config["identity"], self.counted["world"]
        data = identity["data"]
        return PlanRequest(
            model=identity["model"],
            gpus=ranks,
            host="measured",
            mesh=f"dp_shard={ranks}",
            recipe=self.recipe,
            hardware="h200" if "H200" in self.machine["devices"] else "h100",
            vocabulary=int(data["tokenizer"].removeprefix("bpe:")),
            sequences=data["batch"] // ranks,
            sequence=data["sequence"],
            accumulate=data["accumulate"],
            recompute=self.config["run"]["recompute"],
            kernels="compiled" if identity["fuse"] or identity["compile"] else "eager",
            head=self.config["mesh"]["head"],
            values="fp32",
            holds_logits=True,
        )


def load() -> list[FullRun]:
    """Return the runs, bf16 first."""
    machine = json.loads((FOLDER / "machine.json").read_text())
    found = []
    for folder in sorted(path.parent for path in FOLDER.glob("*/result.json")):
        config, result, counted = (
            json.loads((folder / f"{name}.json").read_text()) for name in ("config", "result", "full_size")
        )
        found.append(FullRun(config=config, result=result, counted=counted, machine=machine))
    return sorted(found, key=lambda run: (run.recipe != BASE, run.recipe))


def table(records: Sequence[Record]) -> str:
    """Return loss, speed, memory and bytes of every run."""
    runs = load()
    base = runs[0].result["held_out_loss"], runs[0].seconds, _gathered(runs[0])
    lines = []
    for run in runs:
        loss = run.result["held_out_loss"]
        gap = "" if run is runs[0] else percent(loss / base[0] - 1).replace("-", MINUS)
        lines.append(
            [
                f"`{run.recipe}`",
                f"{run.result['steps']}",
                f"{loss:.4f}",
                gap,
                f"{run.result['steady_tokens_per_second']:,.0f}",
                f"{1e3 * run.seconds:,.0f}",
                f"{run.seconds / base[1]:.3f}×",
                f"{_gathered(run) / 1e9:.2f}",
                f"{_gathered(run) / base[2]:.3f}×",
                f"{run.counted['peak_GiB']:.1f}",
                run.stamp,
            ]
        )
    columns = ["recipe", "steps", "held-out loss", "gap", "tokens/s", "step, ms", "", "gathered, GB a step", ""]
    return rows([*columns, "peak, GiB a GPU", "record"], lines)


def _gathered(run: FullRun) -> float:
    return run.counted["step_bytes"] / run.counted["steps"]


def curve(records: Sequence[Record]) -> str:
    """Return losses over steps, means of ten."""
    runs, length = load(), 10
    losses = {}
    for run in runs:
        lines = map(json.loads, (FOLDER / run.recipe / "log.jsonl").read_text().splitlines())
        losses[run.recipe] = [line["loss"] for line in lines if line["kind"] == "step"]
    steps = min(map(len, losses.values()))
    ends = [end for end in range(length, steps + 1, length) if end % 30 == 0 or end == length]
    columns = ["steps", *(f"{end - length + 1}–{end}" for end in ends)]
    means = {name: [sum(values[end - length : end]) / length for end in ends] for name, values in losses.items()}
    return rows(columns, [[f"`{name}`", *(f"{mean:.3f}" for mean in found)] for name, found in means.items()])


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {"full-size": table, "full-size-losses": curve}
)
