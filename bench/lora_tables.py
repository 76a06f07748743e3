"""Adapters over a base of 4-bit codes beside one in bf16: the table of docs/lora.md, from what `bench.lora` printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import results
from bench.markdown import rows
from bench.records import Record

CASE = "lora/step"
BASES = (
    ("bf16", "bf16"),
    ("nvfp4", "`nvfp4` codes"),
    ("weight_only", "`nvfp4` codes, x in high precision"),
    ("merge_aware", "`nvfp4` codes, `merge_aware`"),
)


def listed(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the name and the lines of the newest listing that holds this case.

    Raises:
        ValueError: none does.
    """
    for path in sorted(folder.glob("*.txt"), reverse=True):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('{"case"')]
        values = [json.loads(line) for line in lines]
        if found := [value for value in values if value["case"] == CASE]:
            return path.name, found
    raise ValueError(f"{folder}: no listing has lines of {CASE}; run python -m bench.lora")


def adapters(records: Sequence[Record]) -> str:
    """Return the table, of the newest file of records or else of the newest listing."""
    own = [record for record in records if record.values["case"] == CASE]
    name, lines = (own[-1].stamp, [r.values for r in own if r.file == own[-1].file]) if own else listed(_FOLDER)
    by_way = {line["way"]: line for line in lines}
    table = []
    for way, title in BASES:
        v = by_way[way]
        bits = f"{v['base_bits']:.0f}" if v["base_bits"] == 16 else f"{v['base_bits']:.2f}"
        sizes = f"{v['at_rest_GiB']:.1f}", f"{v['peak_GiB']:.1f}", f"{v['tokens_per_s']:,.0f}"
        table.append([title, bits, *sizes, _merged(v)])
    first = lines[0]
    said = f"{first['model']}, rank {first['rank']}, {first['tokens'][0]} × {first['tokens'][1]:,} tokens; {name}."
    return rows(["base", "bits a weight", "GiB at rest", "peak GiB", "tokens/s", "merged bytes"], table) + f"\n\n{said}"


def _merged(values: dict[str, Any]) -> str:
    if "codes_changed" not in values:
        return ""
    if values["merged_equals_trained"]:
        return "those that were trained"
    return f"requantized, {values['codes_changed']:.1%} of the codes change".replace("%", " %")


_FOLDER = results.FOLDER / "profiles"
RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType({"lora": adapters})
