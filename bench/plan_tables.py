"""The tables of docs/scaling.md: `python -m bench.plan_tables` prints them, `--write` renews the page.

The page holds a table between `<!-- plan: NAME -->` and `<!-- /plan -->`; a test compares them.
What is measured comes from bench/results, everything else from `halfbyte.plan`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import full_size_tables
from bench.markdown import percent, rows
from bench.records import Record, counting, load
from halfbyte.plan import Mesh, Plan, PlanRequest, plan, work
from halfbyte.plan.architecture import Matrix
from halfbyte.plan.assumptions import computed, constants
from halfbyte.plan.hardware import HARDWARE
from halfbyte.plan.job import Kernels
from halfbyte.plan.planning import GIB, job_of
from halfbyte.plan.seconds import EXPOSED, host_seconds, kernel_seconds
from halfbyte.train.model import model_preset

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
BLOCK = re.compile(r"(<!-- plan: ([\w-]+) -->)(.*?)(<!-- /plan -->)", re.DOTALL)
MEMORY_BAR, TIME_BAR = 0.05, 0.20
RECIPES = ("bf16", "nvfp4")
KERNELS: Mapping[str, Kernels] = MappingProxyType({"plain": "eager", "fused": "fused", "compiled": "compiled"})
"""By what `bench.gather` calls it: how blocks run."""
TOKENS = (8, 2048)
"""Sequences and their length of a run of bench.zero that records none: docs/primary_weights.md."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A measured run and its plan.

    Args:
        what: ran.
        stamp: of the record.
        plan: of the same run.
        peak: bytes measured; None where they were not recorded.
        seconds: of a step, measured.
        waiting: seconds of a step in which the GPU had nothing to do or waited for another rank, as recorded.
        host: seconds in which the host launched a step, measured; None where it was not recorded.
    """

    what: str
    stamp: str
    plan: Plan
    peak: float | None
    seconds: float
    waiting: float | None = None
    host: float | None = None

    @property
    def memory_gap(self) -> float | None:
        """Planned over measured, less one."""
        return None if self.peak is None else self.plan.peak.total / self.peak - 1

    @property
    def time_gap(self) -> float:
        """Planned over measured, less one."""
        return self.plan.step.total / self.seconds - 1


@lru_cache(maxsize=256)
def planned(request: PlanRequest) -> Plan:
    """Return the plan of a measured run; several records are of one."""
    return plan(request)


def compared(records: Sequence[Record]) -> list[Compared]:
    """Return every measured training step whose shape is recorded, beside its plan."""
    chosen = counting(records).values()
    found: list[Compared] = []
    for record in chosen:
        if record.is_clean and record.values["case"].startswith(("train/", "steps/")):
            found += _of_step(record)
    for record in records:
        if record.is_clean and record.values["case"] == "zero/step" and _has_tokens(record):
            found.append(_of_zero(record))
        if record.is_clean and record.values["case"] == "gather/step" and _is_whole(record):
            found.append(_of_gather(record))
    return found + [_of_full_size(run) for run in full_size_tables.load()]


def left_out(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Return the runs of several GPUs that are not compared, each with the reason."""
    found = []
    for r in records:
        if r.values["case"] not in ("zero/step", "gather/step"):
            continue
        if not r.is_clean:
            found.append((r, "its sources are those of no commit"))
        elif r.values["case"] == "zero/step" and not _has_tokens(r):
            found.append((r, "its tokens are not recorded"))
        elif r.values["case"] == "gather/step" and not _is_whole(r):
            layers = model_preset(r.values["model"]).layers
            found.append((r, f"it has {r.values['layers']} of {layers} blocks, and a plan is of all"))
    return found


def _has_tokens(record: Record) -> bool:
    """Whether the tokens of a run are known: recorded, or those that runs with 32,000 words had."""
    return "tokens" in record.values or record.values.get("vocabulary", 32_000) == 32_000


def _of_step(record: Record) -> list[Compared]:
    """Return a step in bf16 and one under nvfp4 on one GPU."""
    values = record.values
    case, _, model = values["case"].partition("/")
    graphed = case == "train"
    found = []
    for recipe, prefix in (("bf16", "bf16_"), ("nvfp4", "")):
        request = PlanRequest(
            model=model,
            gpus=1,
            host="measured",
            mesh="dp_shard=1",
            recipe=recipe,
            sequences=values["shape"][0],
            sequence=values["shape"][1],
            sharding="none" if graphed else "zero1",  # steps/* have bf16 parameters: the time of zero1 on one rank
            gather="bf16",
            holds_logits=graphed,
        )
        seconds, busy = values[f"{prefix}us"] / 1e6, values.get(f"{prefix}busy")
        peak = values.get(f"{prefix}peak_GiB")
        found.append(
            Compared(
                what=f"{values['case']}, {recipe}, 1 GPU",
                stamp=record.stamp,
                plan=planned(request),
                peak=None if peak is None else peak * GIB,
                seconds=seconds,
                waiting=None if busy is None else (1 - busy) * seconds,
            )
        )
    return found


def _of_zero(record: Record) -> Compared:
    values = record.values
    sequences, sequence = values.get("tokens", TOKENS)
    world, vocabulary = values["world"], values.get("vocabulary", 32_000)
    gather = "nvfp4" if values["weights"] == "nvfp4" else "bf16"
    request = PlanRequest(
        model=values["model"],
        gpus=world,
        host="measured",
        mesh=f"dp_shard={world}",
        sequences=sequences,
        sequence=sequence,
        sharding="zero1",
        gather=gather,
        kernels="eager",
        vocabulary=vocabulary,
        high_precision_blocks=0.0,
    )
    return Compared(
        what=f"ZeroOptimizer, {values['model']}, {gather} gathered, {world} GPUs, {vocabulary:,} words",
        stamp=record.stamp,
        plan=planned(request),
        peak=values["peak_GiB"] * GIB,
        seconds=values["step_ms"] / 1e3,
        waiting=values["reduce_kernels_ms"] / 1e3,
    )


def _is_whole(record: Record) -> bool:
    """Whether a run had all blocks of its model; the words may be others."""
    preset = model_preset(record.values["model"])
    return record.values["parameters"] == replace(preset, vocab_size=_words(record)).parameters


def _words(record: Record) -> int:
    """Return the vocabulary of a run; records that name none are of the model's own."""
    return record.values.get("vocabulary") or model_preset(record.values["model"]).vocab_size


def _of_gather(record: Record) -> Compared:
    values, way = record.values, record.values["way"]
    hardware = "h100" if "H100" in str(record.run["device"]) else "h200"
    request = PlanRequest(
        model=values["model"],
        gpus=values["world"],
        host="measured",
        mesh=f"dp_shard={values['world']}",
        hardware=hardware,
        sequences=values["tokens"][0],
        sequence=values["tokens"][1],
        sharding="fsdp",
        gather="bf16" if way in ("bf16", "compiled") else "nvfp4",
        kernels="compiled" if way == "compiled" else KERNELS[values.get("blocks", "plain")],
        vocabulary=_words(record),
        high_precision_blocks=0.0,
        head="shared" if way == "shared" else "gathered",
        reduce="fp32",
    )
    found, host = planned(request), values.get("host_step_ms")
    kept = ", embedding and head shared" if way == "shared" else ""
    return Compared(
        what=f"FSDP2, {values['model']}, {request.gather} gathered{kept}, {request.kernels}, {values['world']} "
        f"{hardware.upper()}s, {request.sequences * request.sequence:,} tokens, {request.vocabulary:,} words",
        stamp=record.stamp,
        plan=found,
        peak=values["peak_GiB"] * GIB,
        seconds=values["step_ms"] / 1e3,
        waiting=_waited(values, found) / 1e3,
        host=None if host is None else host / 1e3,
    )


def _waited(values: Mapping[str, Any], found: Plan) -> float:
    """Return the ms of a step without a kernel, and of gathers that outlast their wires: they wait for another rank.

    Of records that have not measured the wires, all gathers by the plan's bandwidth are taken for exposed ones.
    """
    gathers = (c for c in found.collectives if c.verb == "all-gather" and c.is_hidden)
    wires = values.get("wires_alone_ms", 1e3 * sum(c.seconds(found.job.hardware) for c in gathers))
    idle = values["step_ms"] - values["kernels_ms"] - values["exposed_ms"]
    return max(0.0, idle) + max(0.0, values["exposed_ms"] - wires)


def _of_full_size(run: full_size_tables.FullRun) -> Compared:
    devices = run.machine["devices"].replace("NVIDIA ", "")
    return Compared(
        what=f"`halfbyte train`, FSDP2, {run.request.model}, {run.recipe}, {devices}s",
        stamp=run.stamp,
        plan=planned(run.request),
        peak=run.counted["peak_GiB"] * GIB,
        seconds=run.seconds,
    )


def measured(records: Sequence[Record]) -> str:
    """Return the table of every measured step beside its plan."""
    columns = ["", "GiB, measured", "planned", "gap", "ms, measured", "planned", "gap", "waited, ms"]
    columns += ["host, ms", "planned", "record"]
    lines = []
    for c in compared(records):
        gap = "" if c.memory_gap is None else _signed(c.memory_gap)
        lines.append(
            [
                c.what,
                "" if c.peak is None else f"{c.peak / GIB:.1f}",
                "" if c.peak is None else f"{c.plan.peak.total / GIB:.1f}",
                gap,
                f"{c.seconds * 1e3:.1f}",
                f"{c.plan.step.total * 1e3:.1f}",
                _signed(c.time_gap),
                "" if c.waiting is None else f"{c.waiting * 1e3:.0f}",
                "" if c.host is None else f"{c.host * 1e3:.0f}",
                "" if c.host is None else f"{host_seconds(c.plan.job) * 1e3:.0f}",
                c.stamp,
            ]
        )
    return rows(columns, lines)


LAYERS = tuple(f"linear/{recipe}" for recipe in ("nvfp4", "nvfp4_mxfp8_bwd", "nvfp4_forward"))


def layers(records: Sequence[Record]) -> str:
    """Return linear layers alone, forward and backward, as measured and as their kernels are planned."""
    lines = []
    for (case, shape), record in counting(records).items():
        if case not in LAYERS or not record.is_clean:
            continue
        ours, bf16 = record.values["us"] / 1e6, record.values["bf16_us"] / 1e6
        own, plain = (layer_seconds(recipe, shape) for recipe in (case.partition("/")[2], "bf16"))
        size = " x ".join(map(str, shape))
        times = [f"{seconds * 1e3:.2f}" for seconds in (bf16, plain, ours, own)]
        lines.append([f"`{case}`", size, *times, f"{ours / bf16:.3f}", f"{own / plain:.3f}", record.stamp])
    columns = ["", "M, K, N", "bf16, ms", "planned", "recipe, ms", "planned", "recipe / bf16", "planned", "record"]
    return rows(columns, lines)


def layer_seconds(recipe: str, shape: Sequence[int]) -> float:
    """Return the seconds of one layer's kernels on an H200, from their own rates."""
    tokens, cols, out = shape
    job = job_of(PlanRequest(gpus=1, recipe=f"{recipe}@all", sequence=tokens), Mesh(), "nothing")
    parts = work.linear_work(job, Matrix(name="layer", rows=out, cols=cols), job.recipe).values()
    return sum(sum(kernel_seconds(part, job.hardware, step_share=1.0).values()) for part in parts)


def _signed(gap: float) -> str:
    return f"{gap * 100:+.1f} %".replace("-", "−")


def verdict(records: Sequence[Record]) -> str:
    """Return in sentences how many runs are within the bars, the worst ones, and those that are not compared."""
    runs = compared(records)
    memory = [c for c in runs if c.memory_gap is not None]
    worst = max(memory, key=lambda c: abs(c.memory_gap or 0.0))
    within = [c for c in memory if abs(c.memory_gap or 0.0) <= MEMORY_BAR]
    timely = [c for c in runs if abs(c.time_gap) <= TIME_BAR]
    slowest = max(timely, key=lambda c: abs(c.time_gap))
    lines = [
        f"- Memory: {len(within)} of {len(memory)} peaks within {percent(MEMORY_BAR, 0)}; the worst is "
        f"{worst.what} with {_signed(worst.memory_gap or 0.0)}.",
        f"- Time: {len(timely)} of {len(runs)} steps within {percent(TIME_BAR, 0)}, the worst of these "
        f"{slowest.what} with {_signed(slowest.time_gap)}. The others:",
    ]
    for c in runs:
        if c not in timely:
            waited = "" if c.waiting is None else f", of {c.seconds * 1e3:.0f} ms {c.waiting * 1e3:.0f} waited"
            host = ""
            if c.host is not None:
                host = f"; its host took {c.host * 1e3:.0f} ms, the plan's {host_seconds(c.plan.job) * 1e3:.0f}"
            lines.append(f"    - {c.what}, {c.stamp}: {_signed(c.time_gap)}{waited}{host}")
    for r, why in _once(records):
        lines.append(f"- Not compared: {r.values['case']}, {r.values['model']}, {r.stamp}: {why}.")
    return "\n".join(lines)


def _once(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Return those left out, one of each model and file."""
    return list({(r.values["model"], r.file): (r, why) for r, why in left_out(records)}.values())


def scaling(model: str, cases: Sequence[tuple[str, int]]) -> Callable[[Sequence[Record]], str]:
    """Return a table of the fastest mesh that fits for each hardware, number of GPUs and recipe."""

    def render(_: Sequence[Record]) -> str:
        lines = []
        for hardware, gpus in cases:
            for recipe in RECIPES:
                request = PlanRequest(model=model, gpus=gpus, recipe=recipe, hardware=hardware)
                try:
                    lines.append(line(plan(request)))
                except ValueError as error:
                    lines.append([hardware, f"{gpus:,}", recipe, f"none fits: {_reason(error)}", *[""] * 6])
        columns = ["", "GPUs", "recipe", "mesh", "recompute", "GiB", "received, GB", "ms a step", "of it exposed"]
        return rows([*columns, "tokens/s a GPU"], lines)

    return render


EVERY_RECIPE = ("bf16", "nvfp4", "four_over_six", "nvfp4_mxfp8_bwd", "mxfp8", "nvfp4_forward")


def recipes_table(_: Sequence[Record]) -> str:
    """Return memory, traffic and the time of a step of 8B on one mesh, for each recipe and hardware."""
    lines = []
    for recipe in EVERY_RECIPE:
        found = [
            plan(PlanRequest(model="llama3-8b", gpus=64, mesh="dp_shard=64", recipe=recipe, hardware=name))
            for name in HARDWARE
        ]
        first = found[0]
        received = sum(c.wire for c in first.collectives) / 1e9
        times = (f"{p.step.total * 1e3:,.0f}" for p in found)
        lines.append([recipe, first.job.gather, f"{first.peak.total / GIB:.1f}", f"{received:.1f}", *times])
    return rows(["recipe", "weights travel in", "GiB", "received, GB", *(f"{name}, ms" for name in HARDWARE)], lines)


def _reason(error: ValueError) -> str:
    """Return what the least needs."""
    found = re.search(r"needs .*?\)", str(error))
    return found.group(0) if found else str(error)


def line(found: Plan) -> list[str]:
    """Return a line of a table of scaling; what halfbyte does not have yet is marked with an asterisk."""
    mark = "\\*" if computed(found.job) else ""
    return [
        found.job.hardware.name,
        f"{found.job.mesh.gpus:,}",
        found.request.recipe,
        f"{found.job.mesh}{mark}",
        found.job.recompute,
        f"{found.peak.total / GIB:.1f}",
        f"{sum(c.wire for c in found.collectives) / 1e9:,.1f}",
        f"{found.step.total * 1e3:,.0f}",
        percent(found.step.seconds[EXPOSED] / found.step.total, 0),
        f"{found.tokens_per_second / found.job.mesh.gpus:,.0f}",
    ]


def constants_table(_: Sequence[Record]) -> str:
    """Return the measured constants with their records."""
    lines = [[f"`{name}`", f"{c.value:g}", c.means, c.record or "assumed", c.date] for name, c in constants().items()]
    return rows(["constant", "value", "what it is", "record", "date"], lines)


def hardware_table(_: Sequence[Record]) -> str:
    """Return the peaks of each GPU with their source."""
    lines = []
    for h in HARDWARE.values():
        peaks = " / ".join(f"{h.flops[p] / 1e12:,.0f}" if p in h.flops else "bf16's" for p in ("bf16", "fp8", "fp4"))
        links = [f"{h.nvlink / 1e9:.0f} GB/s among {h.domain}", f"{h.network / 1e9:.0f} GB/s"]
        lines.append([h.name, f"{h.memory_GiB:.0f} GiB", f"{h.hbm / 1e12:.2f} TB/s", peaks, *links, h.source])
    columns = ["", "memory", "its rate", "TFLOP/s, bf16 / fp8 / fp4", "NVLink, one direction", "network", "source"]
    return rows(columns, lines)


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {
        "measured": measured,
        "verdict": verdict,
        "layers": layers,
        "constants": constants_table,
        "hardware": hardware_table,
        "recipes": recipes_table,
        "8b": scaling("llama3-8b", [(h, n) for h in ("h200", "b200") for n in (1, 8, 64, 512)]),
        "70b": scaling("llama3-70b", [(h, n) for h in ("h200", "b200") for n in (32, 256, 1024, 4096)]),
        "671b": scaling("deepseek-v3", [(h, n) for h in ("h200", "gb300") for n in (64, 256, 1024, 4096)]),
    }
)


def renew(text: str, records: Sequence[Record], names: Sequence[str] = tuple(RENDERERS)) -> str:
    """Return the page with those of its tables as they are now.

    Raises:
        ValueError: the page names a table that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in RENDERERS:
            raise ValueError(f"{name!r} is no table; they are {', '.join(RENDERERS)}")
        if name not in names:
            return match.group(0)
        return f"{match.group(1)}\n\n{RENDERERS[name](records)}\n\n{match.group(4)}"

    return BLOCK.sub(replace, text)


def main(arguments: list[str]) -> int:
    """Print every table, or write them into the page."""
    parser = argparse.ArgumentParser(prog="bench.plan_tables", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew docs/scaling.md instead of printing")
    options = parser.parse_args(arguments)
    records = load()
    if options.write:
        PAGE.write_text(renew(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    else:
        print("\n\n".join(f"## {name}\n\n{render(records)}" for name, render in RENDERERS.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
