"""Tables of `bench.gather`: FSDP2 with weights gathered as NVFP4 codes beside its bf16 gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from bench.markdown import percent, rows
from bench.records import Record

MOST_OF_FIRST, MOST_OF_STEP = 1.2, 0.03
"""Of what the first block's gathers take, and of a step: what is asked of the time that nothing hides."""
WAYS = {
    "codes": "codes",
    "bf16": "bf16",
    "shared": "codes; embedding and head shared",
    "compiled": "bf16, blocks compiled",
}


def _title(record: Record) -> str:
    v = record.values
    gpus = f"{v['world']} {str(record.run['device']).split()[1]}s"
    tokens = f"{v['tokens'][0] * v['tokens'][1]:,} tokens a rank"
    blocks = {"fused": "fused blocks", "compiled": "compiled blocks"}.get(v.get("blocks", ""), "blocks")
    return f"{v['model']}, {v['layers']} {blocks}, {v['parameters'] / 1e6:,.0f}M parameters, {gpus}, {tokens}"


def steps(records: Sequence[Record]) -> str:
    """Return every timed step, a line each."""
    lines = [
        [
            _title(r),
            WAYS[v["way"]],
            f"{v['step_ms']:.0f}" + (f" ± {percent(v['spread'], 0)}" if "spread" in v else ""),
            f"{v['gathered_bytes'] / 1e6:,.0f}",
            f"{v['gather_kernels_ms']:.0f}",
            f"{v['exposed_ms']:.0f}",
            percent(v["hidden_share"], 0),
            f"{v['kernels_ms']:.0f}",
            f"{v['peak_GiB']:.1f}",
            r.stamp,
        ]
        for r in records
        for v in [r.values]
        if v["case"] == "gather/step"
    ]
    measured = ["step, ms", "arrives, MB", "gathers, ms", "hidden by nothing, ms", "hidden", "other kernels, ms"]
    return rows(["", "gathered as", *measured, "peak, GiB", "record"], lines)


def wires(records: Sequence[Record]) -> str:
    """Return what gathers take the rank that comes last to each, beside what is asked of them, a line each."""
    lines = [
        [
            _title(r),
            WAYS[v["way"]],
            f"{v['wires_ms']:.1f}",
            f"{v['wires_alone_ms']:.2f}",
            f"{v['first_wires_ms']:.2f}",
            f"{MOST_OF_FIRST * v['first_wires_ms'] + MOST_OF_STEP * v['step_ms']:.2f}",
            percent(v["others_hidden_share"], 0) if "others_hidden_share" in v else "",
            r.stamp,
        ]
        for r in records
        for v in [r.values]
        if v["case"] == "gather/step" and "wires_ms" in v
    ]
    measured = [
        "gathers, ms",
        "hidden by nothing, ms",
        "the first block's, ms",
        "at most asked, ms",
        "hidden of others",
    ]
    return rows(["", "gathered as", *measured, "record"], lines)


def bitwise(records: Sequence[Record]) -> str:
    """Return every comparison of losses, norms and masters, bit for bit."""
    lines = [
        [
            f"{v['model']}, {v['world']} GPUs" + (", compiled" if v.get("blocks") == "compiled" else ""),
            f"{v['steps']}",
            "every loss, norm and master equal" if v["equal"] else f"differ from step {v['first_difference']} on",
            f"{v['first_loss']:.3f} → {v['last_loss']:.3f}",
            r.stamp,
        ]
        for r in records
        for v in [r.values]
        if v["case"] == "gather/bitwise"
    ]
    return rows(["", "steps", "codes against bf16's gather", "loss", "record"], lines)


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {"gather-steps": steps, "gather-wires": wires, "gather-bitwise": bitwise}
)
