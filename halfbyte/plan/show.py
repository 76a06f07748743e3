"""A plan as tables for a terminal, and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.notebook import html_lines, html_table
from halfbyte.plan.assumptions import ROOM, assumptions, computed
from halfbyte.plan.planning import GIB, Plan

SHOWN = 6
"""Meshes that are refused are shown up to so many; --json has all."""
Table = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]


def plan_heading(plan: Plan) -> str:
    """Return one line: what runs where, and whether it fits."""
    job = plan.job
    mark = "computed" if computed(job) else "of what was measured"
    room = ROOM * job.hardware.memory_GiB
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{job.architecture.name}, {job.architecture.parameters / 1e9:.1f}B parameters, recipe {plan.request.recipe}, "
        f"{job.mesh.gpus:,} x {job.hardware.name}: mesh {job.mesh}, {job.sharding}, weights travel in {job.gather}, "
        f"recompute {job.recompute}{', op by op' if job.kernels == 'eager' else ''}\n"
        f"{plan.peak.total / GIB:.1f} GiB of {room:.0f} at {plan.peak.moment}: {verdict}; "
        f"{plan.step.total * 1e3:,.1f} ms a step of {job.step_tokens:,} tokens, "
        f"{plan.tokens_per_second:,.0f} tokens/s, "
        f"{plan.utilization:.1%} of the bf16 peak ({mark})"
    )


def tables(plan: Plan) -> list[Table]:
    """Return title, columns and lines of each table."""
    found = [_memory(plan), _time(plan), _flops(plan)]
    if plan.collectives:
        found.append(_collectives(plan))
    if plan.refused:
        found.append(_refused(plan))
    return found


def as_html(plan: Plan) -> str:
    """Return what the command prints, for a notebook."""
    found = [html_lines([title]) + html_table(columns, lines) for title, columns, lines in tables(plan)]
    return "".join([html_lines(plan_heading(plan).split("\n")), *found, html_lines(assumptions(plan.job))])


def _memory(plan: Plan) -> Table:
    columns = ("GiB a GPU", *(moment.moment for moment in plan.moments))
    lines = [(kind, *(f"{moment.bytes[kind] / GIB:,.2f}" for moment in plan.moments)) for kind in plan.moments[0].bytes]
    lines.append(("in all", *(f"{moment.total / GIB:,.2f}" for moment in plan.moments)))
    return "Memory", columns, lines


def _time(plan: Plan) -> Table:
    ordered = sorted(plan.step.seconds.items(), key=lambda item: -item[1])
    lines = [(what, f"{value * 1e3:,.1f}", f"{value / plan.step.total:.0%}") for what, value in ordered]
    return "Time of a step", ("what", "ms", "share"), lines


def _flops(plan: Plan) -> Table:
    lines = [(precision, f"{flops / 1e12:,.1f}") for precision, flops in sorted(plan.step.flops.items())]
    return "Multiplications and additions a GPU", ("operands", "TFLOP"), lines


def _collectives(plan: Plan) -> Table:
    columns = ("what", "how", "beside", "ranks", "message, MB", "received, MB", "ms")
    lines = [
        (
            c.what,
            c.verb,
            c.phase if c.is_hidden else f"{c.phase}, not hidden",
            f"{c.group.size:,}",
            f"{c.message / 1e6:,.1f}",
            f"{c.wire / 1e6:,.1f}",
            f"{c.seconds(plan.job.hardware) * 1e3:,.1f}",
        )
        for c in plan.collectives
    ]
    return "Collectives of a step", columns, lines


def _refused(plan: Plan) -> Table:
    lines = list(plan.refused[:SHOWN])
    if len(plan.refused) > SHOWN:
        lines.append(("…", "", f"{len(plan.refused) - SHOWN} more; --json has all"))
    return "Meshes left out", ("mesh", "recompute", "why"), lines


def as_json(plan: Plan) -> dict[str, Any]:
    """Return everything as JSON values: bytes, seconds, flops of one GPU."""
    job = plan.job
    return {
        "model": job.architecture.name,
        "parameters": job.architecture.parameters,
        "active_parameters": job.architecture.active_parameters,
        "gpus": job.mesh.gpus,
        "hardware": job.hardware.name,
        "mesh": {name: getattr(job.mesh, name) for name in ("dp_replicate", "dp_shard", "tp", "ep")},
        "recipe": plan.request.recipe,
        "sharding": job.sharding,
        "gather": job.gather,
        "recompute": job.recompute,
        "fits": plan.fits,
        "peak_bytes": plan.peak.total,
        "moments": {moment.moment: moment.bytes for moment in plan.moments},
        "collectives": [_collective(plan, index) for index in range(len(plan.collectives))],
        "flops": plan.step.flops,
        "seconds": plan.step.seconds,
        "step_seconds": plan.step.total,
        "tokens_per_step": job.step_tokens,
        "tokens_per_second": plan.tokens_per_second,
        "of_bf16_peak": plan.utilization,
        "refused": [dict(zip(("mesh", "recompute", "why"), line, strict=True)) for line in plan.refused],
        "computed": list(computed(job)),
        "assumptions": list(assumptions(job)),
    }


def _collective(plan: Plan, index: int) -> dict[str, Any]:
    c = plan.collectives[index]
    return {
        "what": c.what,
        "verb": c.verb,
        "phase": c.phase,
        "ranks": c.group.size,
        "is_hidden": c.is_hidden,
        "message_bytes": c.message,
        "wire_bytes": c.wire,
        "seconds": c.seconds(plan.job.hardware),
    }
