"""Steps on several GPUs with weights that travel in bf16 and as NVFP4: a table of docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from bench.markdown import recorded
from bench.plan_tables import TOKENS
from bench.records import Record

KINDS = MappingProxyType({"plain": "bf16", "bf16": "bf16", "nvfp4": "nvfp4", "codes": "nvfp4", "shared": None})
"""How weights travel, by what `bench.zero` and `bench.gather` call it; a head that ranks share is not in this table."""


def _belongs(record: Record) -> bool:
    """Whether a run is one of H200s with a vocabulary of 32,000, as the table's are."""
    return "H200" in str(record.run["device"]) and record.values.get("vocabulary", 32_000) == 32_000


def several(records: Sequence[Record]) -> str:
    """Return the newest run with both kinds of weights of each sharding, model, number of GPUs and tokens."""
    pairs: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        v = record.values
        if v["case"] in ("zero/step", "gather/step") and record.is_clean and _belongs(record):
            kind = KINDS[v.get("weights", v.get("way"))]
            key = v["case"], v["model"], v.get("layers"), v["world"], prod(v.get("tokens") or TOKENS)
            if kind is not None:
                pairs.setdefault(key, {})[kind] = record  # oldest first
    lines = []
    ordered = sorted(pairs.items(), key=lambda item: (item[0][0] < "z", item[0][3]))
    for (case, model, layers, world, tokens), pair in ordered:
        before, after = pair["bf16"], pair["nvfp4"]
        lines.append(
            (
                [
                    ("ZeRO-1, " if case == "zero/step" else "FSDP2, ")
                    + (f"{layers} blocks of {model}" if layers else model),
                    str(world),
                    f"{tokens:,}",
                    f"{_ratio(before, after, 'step_ms', 1, '.0f')}",
                    f"{_ratio(before, after, 'peak_GiB', 1, '.1f')}",
                    f"{_ratio(before, after, 'gathered_bytes', 1e-6, ',.0f')}",
                ],
                [before.stamp, after.stamp],
            )
        )
    return recorded(["", "GPUs", "tokens a rank", "step, ms", "peak, GiB", "gathered, MB"], lines)


def _ratio(before: Record, after: Record, name: str, factor: float, form: str) -> str:
    old, new = before.values[name] * factor, after.values[name] * factor
    return f"{old:{form}} → {new:{form}}, {new / old:.2f}×"


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType({"several": several})
