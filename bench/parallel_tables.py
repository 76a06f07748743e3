"""Tables of `bench.parallel`: steps of layers and experts that several GPUs share, and the bytes between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from bench.markdown import recorded, rows
from bench.records import Record, counting

NOTHING = "What has not run on GPUs is its speed: no step has been timed."
ALONE = "one GPU"
WAYS = {
    "parallel/dense": {
        ALONE: "one GPU",
        "values": "torch's styles, sequence parallel",
        "codes": "`NVFP4Colwise`, `NVFP4Rowwise`",
    },
    "parallel/mixture": {
        ALONE: "one GPU",
        "plain": "tokens in their values",
        "nvfp4": 'tokens as codes, `dispatch="nvfp4"`',
    },
}
"""What the ways of a case are called, in the order of the table."""


def steps(case: str, records: Sequence[Record]) -> str:
    """Return the newest run of every way of a case, and what came from other ranks; a sentence where there is none."""
    chosen = sorted(_timed(case, records), key=partial(_place, case))
    if not chosen:
        return NOTHING
    lines = [(_cells(record, _title(case, record.values)), [record.stamp]) for record in chosen]
    measured = ["step, ms", "of bf16's shared alike", "one GPU's multiple", "launched in, ms", "peak, GiB"]
    table = recorded(["", "GPUs", "recipe", *measured], lines)
    devices = " and ".join(sorted({str(record.run["device"]) for record in chosen}))
    return f"{_about(chosen[0].values, devices)}\n\n{table}\n\n{_bytes(case, chosen)}"


def _timed(case: str, records: Sequence[Record]) -> Iterable[Record]:
    """Return the newest records of GPUs."""
    return counting([r for r in records if r.values["case"] == case and "CPU" not in str(r.run["device"])]).values()


def _place(case: str, record: Record) -> tuple[Any, ...]:
    v = record.values
    return v["world"], list(WAYS[case]).index(v["way"]), v["has_capacity"], v["recipe"]


def _about(v: dict[str, Any], devices: str) -> str:
    """Return the sentence above a table."""
    tokens = f"{v['tokens']:,} tokens " + ("of one sequence" if v["case"] == "parallel/dense" else "of each rank")
    blocks = f"{v['layers']} blocks of `{v['model']}`"
    how = "unbroken steps" if "awaited_ms" in v else "each step awaited"
    return f"Forward and backward of {blocks}, bf16 parameters, {tokens}, eager, {devices}, {how}, medians:"


def _title(case: str, v: dict[str, Any]) -> str:
    return WAYS[case][v["way"]] + (", capacity" if v["has_capacity"] else "")


def _cells(record: Record, title: str) -> list[str]:
    v = record.values
    ratios = [f"{v[name]:.3f}×{record.mark}" if name in v else "" for name in ("of_bf16", "alone_of_bf16")]
    return [
        title,
        str(v["world"]),
        v["recipe"],
        f"{v['step_ms']:.1f}",
        *ratios,
        f"{v['host_ms']:.1f}",
        f"{v['peak_GiB']:.1f}",
    ]


def _bytes(case: str, chosen: Sequence[Record]) -> str:
    """Return what came from other ranks in a step, in MB: by pass, collective and dtype."""
    shared = [record.values for record in chosen if record.values["way"] != ALONE]
    names = list(dict.fromkeys(name for v in shared for name in v["arriving_bytes"]))
    names.sort(key=lambda name: not name.startswith("forward"))
    lines = [
        [
            _title(case, v),
            str(v["world"]),
            v["recipe"],
            *(f"{v['arriving_bytes'][name] / 1e6:,.2f}" if name in v["arriving_bytes"] else "" for name in names),
        ]
        for v in shared
    ]
    return "MB from other ranks, of one rank:\n\n" + rows(["", "GPUs", "recipe", *names], lines)


def ratios(case: str, records: Sequence[Record]) -> str:
    """Return how many times bf16's time the newest steps in 4 bits take that GPUs share, the least to the most."""
    found: dict[int, list[float]] = {}
    for record in _timed(case, records):
        v = record.values
        if v["way"] != ALONE and v["recipe"] != "bf16":
            found.setdefault(v["world"], []).append(v["of_bf16"])
    spans = {world: list(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(of), max(of)))) for world, of in found.items()}
    parts = [f"{' to '.join(span)}× on {world} GPUs" for world, span in sorted(spans.items())]
    return " and ".join(parts) or NOTHING


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {
        "parallel-dense": partial(steps, "parallel/dense"),
        "parallel-mixture": partial(steps, "parallel/mixture"),
        "ratios-dense": partial(ratios, "parallel/dense"),
        "ratios-mixture": partial(ratios, "parallel/mixture"),
    }
)
