"""Tables of `bench.zero`: gathers of primary weights on several GPUs, their bytes, and losses compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from bench.markdown import percent, rows
from bench.records import Key, Record, counting

Figure = Callable[[Record], str]

FIGURES: tuple[tuple[str, Figure], ...] = (
    ("gathered in a step, MB", lambda r: f"{r.values['gathered_bytes'] / 1e6:,.0f}"),
    ("gather alone, ms", lambda r: f"{r.values['gather_ms']:.1f}"),
    ("gathers' kernels in a step, ms", lambda r: f"{r.values['gather_kernels_ms']:.1f}"),
    ("of it beside other kernels, median step", lambda r: percent(r.values["hidden_share"])),
    ("beside none, mean step, ms", lambda r: f"{r.values['exposed_ms']:.2f}"),
    ("reduces' kernels in a step, ms", lambda r: f"{r.values['reduce_kernels_ms']:.0f}"),
    ("step, ms", lambda r: f"{r.values['step_ms']:.0f}"),
    ("peak memory, GiB", lambda r: f"{r.values['peak_GiB']:.1f}"),
)


def steps(records: Sequence[Record]) -> str:
    """Return the newest run of every model, number of GPUs and vocabulary, gathered as NVFP4 / in bf16."""
    chosen = counting([r for r in records if r.values["case"] == "zero/step"])
    columns = [
        (key, r, _plain(chosen, key)) for key, r in chosen.items() if r.values["weights"] == "nvfp4" and r.is_clean
    ]
    columns.sort(key=lambda c: (c[1].values["world"], -_vocabulary(c[1]), c[1].values["model"]))
    titles = [f"{r.values['model']}, {r.values['world']} GPUs, {_vocabulary(r):,} words" for _, r, _ in columns]
    lines = [["record", *(r.stamp for _, r, _ in columns)]]
    lines += [[name, *(f"{figure(r)} / {figure(p)}" for _, r, p in columns)] for name, figure in FIGURES]
    return rows(["", *titles], lines)


def runs(records: Sequence[Record]) -> str:
    """Return every run of a clean checkout with weights gathered as NVFP4."""
    lines = [
        [
            r.stamp,
            f"{r.values['model']}, {r.values['world']} GPUs, {_vocabulary(r):,} words",
            f"{r.values['gather_ms']:.1f}",
            f"{r.values['gather_kernels_ms']:.1f}",
            ", ".join(percent(share, 0) for share in r.values.get("hidden_shares", [r.values["hidden_share"]])),
            f"{r.values['reduce_kernels_ms']:.0f}",
            f"{r.values['step_ms']:.0f}",
        ]
        for r in records
        if r.values["case"] == "zero/step" and r.values["weights"] == "nvfp4" and r.is_clean
    ]
    columns = [
        "gather alone, ms",
        "its kernels in a step, ms",
        "beside others, by traced step",
        "reduces, ms",
        "step, ms",
    ]
    return rows(["record", "", *columns], lines)


def bitwise(records: Sequence[Record]) -> str:
    """Return every comparison of losses, bit for bit."""
    lines = [
        [
            r.stamp,
            f"{r.values['model']}, {r.values['world']} {'ranks on one GPU' if r.values.get('one_gpu') else 'GPUs'}",
            f"{r.values['steps']}",
            "every loss and norm equal" if r.values["equal"] else f"differ from step {r.values['first_difference']} on",
            f"{r.values['first_loss']:.3f} → {r.values['last_loss']:.3f}",
        ]
        for r in records
        if r.values["case"] == "zero/bitwise" and r.is_clean
    ]
    return rows(["record", "", "steps", "weights gathered as NVFP4 and quantized in every forward", "loss"], lines)


def planned(records: Sequence[Record]) -> str:
    """Return what a gather of a whole model takes, from storage plans."""
    chosen = [r for r in counting(records).values() if r.values["case"] == "zero/bytes"]
    chosen.sort(key=lambda r: (r.values["model"], r.values["vocabulary"], not r.values["tied"]))
    lines = [
        [
            r.values["model"],
            f"{r.values['vocabulary']:,}",
            "is the embedding" if r.values["tied"] else "its own",
            f"{r.values['parameters'] / 1e9:.2f}B",
            percent(1 - r.values["tiled_parameters"] / r.values["parameters"]),
            f"{r.values['whole_model_of_bf16']:.3f}{r.mark}",
        ]
        for r in chosen
        if "parameters" in r.values
    ]
    return rows(["preset", "vocabulary", "head", "parameters", "of them in bf16", "gather, of bf16's"], lines)


def _vocabulary(record: Record) -> int:
    return record.key[1][0]


def _plain(chosen: Mapping[Key, Record], key: Key) -> Record:
    return chosen[key[0], tuple("plain" if part == "nvfp4" else part for part in key[1])]


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {"zero": steps, "zero-runs": runs, "zero-bitwise": bitwise, "bytes": planned}
)
