"""The picture of a comparison: loss against tokens, and the distance of every recipe to the first."""

from __future__ import annotations

import io
from pathlib import Path

from halfbyte import files
from halfbyte.stats.pictures import empty_figure
from halfbyte.train import divergence, log

COLOURS = ("#222222", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#8B6F47")
"""The first recipe black, the others from Okabe and Ito's palette, told apart by colour-blind readers too."""
SMOOTHING = 0.95
BAND = 2.0
"""Percent of the baseline's loss that a recipe may lose."""
LEAGUE_BAND = 1.5
"""Percent up to which the gaps of many recipes are drawn to scale."""
LABEL_PITCH = 0.045
"""Height of a label as a share of the panel."""


def curves(path: Path, results: list[dict], *, tokens_per_step: int, title: str) -> None:
    """Draw the runs that lie beside `path`, one folder a recipe, to `path`; one that diverged has no line of gaps.

    Args:
        path: of the picture, a PNG.
        results: the result of each run, the baseline first.
        tokens_per_step: of one optimizer step.
        title: one line above both panels.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = empty_figure(12, 4.8)
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    _losses(left, path.parent, results, tokens_per_step)
    _gaps(right, path.parent, results, tokens_per_step)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    with files.atomic(path) as file:
        file.write(buffer.getvalue())


def _losses(axes, folder: Path, results: list[dict], tokens_per_step: int) -> None:
    lowest, highest = float("inf"), 0.0
    for colour, result in zip(_colours(results), results, strict=True):
        run = folder / result["recipe"]
        steps, losses = log.curve(run, "step")
        axes.plot(_thousands(steps, tokens_per_step), smooth(losses), color=colour, alpha=0.35, linewidth=1)
        steps, losses = log.curve(run, "eval")
        axes.plot(_thousands(steps, tokens_per_step), losses, "o-", color=colour, label=_label(result), markersize=4)
        if losses:
            lowest, highest = min(lowest, *losses), max(highest, losses[0])
    axes.set(xlabel="tokens (thousands)", ylabel="loss (nats per token)", title="held-out loss; thin: training loss")
    if highest:
        margin = 0.1 * (highest - lowest) + 0.05
        axes.set_ylim(lowest - margin, highest + 3 * margin)
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    _tidy(axes)


def _gaps(axes, folder: Path, results: list[dict], tokens_per_step: int) -> None:
    lost = divergence.of(results[0])
    baseline = {} if lost else dict(zip(*log.curve(folder / results[0]["recipe"], "eval"), strict=True))
    axes.axhspan(-BAND, BAND, color="#222222", alpha=0.06, linewidth=0)
    axes.axhline(0, color=COLOURS[0], linewidth=1)
    ends = []
    for colour, result in list(zip(_colours(results), results, strict=True))[1:]:
        if divergence.of(result):
            continue
        points = zip(*log.curve(folder / result["recipe"], "eval"), strict=True)
        gaps = [(step, 100 * (loss / baseline[step] - 1)) for step, loss in points if step in baseline]
        if gaps:
            steps, values = zip(*gaps, strict=True)
            axes.plot(_thousands(steps, tokens_per_step), values, "o-", color=colour, markersize=4)
            ends.append((values[-1], f"{result['recipe']} {values[-1]:+.2f} %", colour))
    axes.set(xlabel="tokens (thousands)", ylabel=f"gap to {results[0]['recipe']} (%)")
    axes.set_title(
        f"gap in held-out loss; grey: ±{BAND:g} %" + (f"; none: {results[0]['recipe']} {lost}" if lost else "")
    )
    axes.set_xlim(left=0)
    axes.set_yscale("symlog", linthresh=BAND, linscale=1.5)  # a control that fails must not flatten the others
    _set_ticks(axes, (-30, -10, -5, -2, -1, 0, 1, 2, 5, 10, 30, 100))
    _label_ends(axes, ends)
    _tidy(axes)


def _set_ticks(axes, values: tuple[float, ...]) -> None:
    """Mark those of some gaps that the panel shows."""
    low, high = axes.get_ylim()
    ticks = [value for value in values if low <= value <= high]
    axes.set_yticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
    axes.minorticks_off()


def _label_ends(axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each label beside the end of its line, moved up where it would touch the one below."""
    last = -float("inf")
    for value, text, colour in sorted(ends):
        height = axes.transAxes.inverted().transform(axes.transData.transform((0, value)))[1]
        last = max(height, last + LABEL_PITCH)
        axes.annotate(text, (1.01, last), xycoords="axes fraction", color=colour, va="center", fontsize=9)


def smooth(losses: list[float]) -> list[float]:
    """Return the exponential mean, corrected for its start."""
    means, mean, weight = [], 0.0, 0.0
    for loss in losses:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(mean / weight)
    return means


def _colours(results: list[dict]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(results))]


def _thousands(steps, tokens_per_step: int) -> list[float]:
    return [step * tokens_per_step / 1e3 for step in steps]


def _label(result: dict) -> str:
    diverged = divergence.of(result)
    return f"{result['recipe']}  " + (str(diverged) if diverged else f"{result['held_out_loss']:.3f}")


def _tidy(axes) -> None:
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def gap_lines(path: Path, lines: list[tuple[str, list[tuple[float, float]]]], *, base: str, title: str) -> None:
    """Draw the gaps of many recipes to `path`, named beside it in the order of their last gaps.

    Args:
        path: of the picture, a PNG.
        lines: for every recipe, points (millions of tokens, gap in percent).
        base: what gaps are measured against.
        title: one line above.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = empty_figure(11, 6.5)
    axes = figure.subplots()
    axes.axhline(0, color=COLOURS[0], linewidth=1)
    ends = []
    for i, (name, points) in enumerate(lines):
        colour, style = COLOURS[1 + i % (len(COLOURS) - 1)], ("-", "--", ":")[i // (len(COLOURS) - 1) % 3]
        tokens, gaps = zip(*points, strict=True)
        (line,) = axes.plot(tokens, gaps, style, color=colour, marker="o", markersize=3)
        line.set_label(f"{gaps[-1]:+.2f} %  {name}")
        ends.append((gaps[-1], line))
    axes.set(xlabel="tokens (millions)", ylabel=f"gap to {base} (%)", title=title)
    axes.set_yscale("symlog", linthresh=LEAGUE_BAND, linscale=3.0)  # a control that fails must not flatten the others
    _set_ticks(axes, (-10, -3, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100))
    _tidy(axes)
    if ends:
        found = [line for _, line in sorted(ends, key=lambda end: -end[0])]
        figure.legend(handles=found, loc="outside right center", frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    with files.atomic(path) as file:
        file.write(buffer.getvalue())
