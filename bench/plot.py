"""A picture of results: shares of the ceilings beside their bars, and multiples of bf16."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import results

MET, MISSED, UNBARRED = "#2a7f62", "#b23a48", "#7a869a"


def main(arguments: list[str]) -> int:
    """Draw result files into one PNG."""
    parser = argparse.ArgumentParser(prog="halfbyte bench plot", description="Draw benchmark results.")
    parser.add_argument("files", nargs="+", type=Path, help=".jsonl files; later ones replace equal cases of earlier")
    parser.add_argument("--out", type=Path, help="the PNG; beside the last file by default")
    options = parser.parse_args(arguments)
    out = options.out or options.files[-1].with_suffix(".png")
    draw(options.files, out)
    print(out)
    return 0


def draw(files: list[Path], out: Path) -> None:
    """Write a PNG of the newest value of every case and shape.

    Raises:
        ValueError: a file is no result, or none holds a figure.
    """
    # Without a display, and without matplotlib for those who only run.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    newest: dict[tuple, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    for file in files:
        facts, lines = results.read(file)
        newest |= {(line["case"], tuple(line["shape"])): line for line in lines if "value" in line}
    panels = [
        ("share of the device's ceiling", [r for r in newest.values() if r["metric"] in ("of copy", "of bf16")]),
        ("time as a multiple of bf16's", [r for r in newest.values() if r["metric"] == "x bf16"]),
    ]
    panels = [(title, rows) for title, rows in panels if rows]
    if not panels:
        raise ValueError(f"{', '.join(map(str, files))}: no case has a figure with a ceiling; run more of them")
    heights = [len(rows) + 1.5 for _, rows in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 0.24 * sum(heights) + 1), height_ratios=heights, squeeze=False
    )
    for axis, (title, rows) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, title, rows)
    figure.suptitle(
        f"{facts['device']}: copy {facts['copy_TB_s']:.2f} TB/s, bf16 GEMM {facts['bf16_TFLOP_s']:.0f} TFLOP/s\n"
        f"torch {facts['torch']}, commit {facts['commit']}, {facts['time'][:10]}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _panel(axis, title: str, rows: list[dict[str, Any]]) -> None:
    rows = rows[::-1]
    colors = [MISSED if r.get("verdict") == "missed" else MET if "verdict" in r else UNBARRED for r in rows]
    axis.barh(range(len(rows)), [r["value"] for r in rows], color=colors, height=0.7)
    for y, r in enumerate(rows):
        axis.text(r["value"], y, f" {r['value']:.2f}", va="center", fontsize=6)
        if "least" in r:
            axis.plot([r["least"]] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1.5)
            axis.plot([r["aim"]] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1, linestyle=":")
    if rows[0]["metric"] != "x bf16":
        axis.axvline(results.FIELD_BAR, color="#999999", linewidth=0.7)
    axis.set_yticks(range(len(rows)), [f"{r['case']}  {'x'.join(map(str, r['shape']))}" for r in rows], fontsize=6)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel(f"{title} (solid: at least, dotted: aim)", fontsize=7)
    axis.margins(y=0.01)
