"""Heat-maps and histograms of statistics, drawn by matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte import files

SMALLEST = -20
"""The lowest power of 2, relative to the largest magnitude, that a histogram shows."""
NAME_WIDTH = 46


def empty_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches, which needs no display.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need the package `matplotlib`: pip install 'halfbyte[train]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def paths_in(folder: str | Path, *names: str) -> list[list[Path]]:
    """Make a folder and return where each picture goes, as PNG and SVG."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [[folder / f"{name}.{end}" for end in ("png", "svg")] for name in names]


def short_name(name: str) -> str:
    """Return a layer's name, its beginning left out where it is long."""
    return name if len(name) <= NAME_WIDTH else "…" + name[1 - NAME_WIDTH :]


def heat_map(
    paths: Sequence[Path], rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], title: str
) -> None:
    """Draw a table of numbers as colours, a NaN grey, to each path in the format that its ending names.

    Args:
        paths: such as a.png and a.svg.
        rows, columns: names of the two directions.
        values: [rows][columns].
        title: one line above.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = empty_figure(3.6 + 0.62 * len(columns) + 0.06 * max(map(len, rows)), 1.6 + 0.26 * len(rows))
    axes = figure.subplots()
    numbers = [[value if math.isfinite(value) else math.nan for value in row] for row in values]
    axes.set_facecolor("#d9d9d9")
    image = axes.imshow(numbers, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, rotation=35, ha="right")
    axes.set_yticks(range(len(rows)), [short_name(row) for row in rows], fontsize=8)
    figure.colorbar(image, ax=axes)
    axes.set_title(title, fontsize=10)
    _save(figure, paths)


def _save(figure: Any, paths: Sequence[Path]) -> None:
    """Write a figure to each path, whole or not at all, in the format that its ending names."""
    for path in paths:
        with files.atomic(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix("."), dpi=140)


def magnitudes(t: Tensor) -> list[float]:
    """Return which share of the values lies in every power of 2 below the largest finite one, the lowest first."""
    size = t.detach().float().abs()
    filled = size[(size > 0) & size.isfinite()]
    exponents = torch.floor(torch.log2(filled / filled.max())).clamp(SMALLEST, -1) if filled.numel() else filled
    counts = torch.bincount((exponents - SMALLEST).long(), minlength=-SMALLEST)
    return (counts / max(1, size.numel())).tolist()


def histograms(paths: Sequence[Path], shares: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw what `magnitudes` returned of several tensors, one panel each, to each path.

    Raises:
        ImportError: matplotlib is missing.
    """
    columns = min(3, len(shares))
    rows = math.ceil(len(shares) / columns)
    figure = empty_figure(3.8 * columns, 2.3 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    for axes, (name, values) in zip(panels, shares.items(), strict=False):
        axes.bar(range(SMALLEST, 0), values, width=0.9, color="#0072B2")
        axes.set_title(short_name(name), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(shares) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("log₂ of the magnitude over the largest", fontsize=9)
    _save(figure, paths)
