"""The table of `bench.counters`: by what kernels of quantization are bound, beside their bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from bench.markdown import percent, recorded
from bench.records import Record
from bench.registry import all_cases, select

LEAST_US = 10.0
"""A kernel that takes less works out the groups' ends; by what it is bound says nothing of quantization."""


def counters(records: Sequence[Record]) -> str:
    """Return a line of each kernel in the newest count of its case: its shares, and the issue slots of its bar."""
    counted = [r for r in records if r.key[0].startswith("counters/") and not r.problem]
    newest = {record.key: record.file for record in counted}
    lines = []
    for record in counted:
        v = record.values
        if newest[record.key] != record.file or v["us"] < LEAST_US:
            continue
        case, shape = v["case"].removeprefix("counters/"), tuple(v["shape"])
        (chosen,) = select(all_cases(), [case])
        bar, share = chosen.shapes.get(shape), v.get("of_copy")
        shares = [percent(v[name], 0) for name in ("issue", "alu", "l2", "dram")]
        cells = [
            f"{case.removeprefix('grouped/')}, {shape[0]}" if case.startswith("grouped/") else case,
            f"{v['us']:.0f}",
            f"{v['instructions']:.1f}",
            *shares,
            f"{v['warps']:.0f}",
            percent(share, 0) if share else "",
            percent(bar.least, 0) if bar else "",
            percent(v["issue"] * bar.least / share, 0) if bar and share else "",
        ]
        lines.append((cells, [record.stamp]))
    measured = ["µs", "instr.", "issue", "ALU", "L2", "DRAM", "warps"]
    return recorded(["", *measured, "copy", "bar", "at bar"], lines)


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType({"counters": counters})
