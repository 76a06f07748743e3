"""The figures of docs/which_recipe.md and README.md, of what studies recorded: python docs/figures/leagues.py [FOLDER].

which-recipe: a row is a recipe, a dot the gap in held-out loss that it ended with: filled in the screen, a ring in the
final, with its interval where there are several seeds. over-steps: gaps in the validations before, the mean of seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from svg import Drawing, Plot

from halfbyte.train import log

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
OUT = ROOT / "docs" / "assets" / "leagues"
PITCH, TOP = 19, 64
MOST = 2.5
"""Percent behind which gaps are written at the edge: a control must not flatten the others."""
MANY = 0.5
"""Share of the FLOPs in 4 bits from which a recipe multiplies in them backward too: the forward alone is a third."""
KINDS = {
    "a": "4 bits in all three GEMMs",
    "c": "4 bits forward, more backward",
    "plain": "no 4 bits",
    "b": "control, built to lose",
}
OF_SCREEN = ("bf16+order", "nvfp4_forward", "mxfp8", "quartet2", "row_scaled", "nvfp4", "nvfp4+late(0.2)")
"""Of 23 rows as many as lines can be told apart, those that the text below the figure compares."""
DASHED = ("nvfp4+late(0.2)", "bf16+order", "quartet2+late(0.2)")


def rows(study: str) -> dict[str, dict[str, Any]]:
    """Return the trained rows of a study's league by recipe, but for the baseline; none of a study that never ran."""
    path = RESULTS / study / "league.json"
    found = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return {row["recipe"]: row for row in found[1:] if row["gap"] is not None}


def kind(row: dict[str, Any]) -> str:
    if row["place"] is None:
        return "b"
    return "a" if row["four_bit"] >= MANY else "c" if row["four_bit"] > 0 else "plain"


def mark(plot: Plot, y: float, row: dict[str, Any], ring: bool) -> None:
    """Draw where a row ended, at the edge with its number where that is far away."""
    drawing, css = plot.drawing, kind(row)
    x = plot.at(min(row["gap"], MOST), 0)[0]
    if row["half"] is not None:
        low, high = (plot.at(min(row["gap"] + side * row["half"], MOST), 0)[0] for side in (-1, 1))
        drawing.line(low, y, high, y, f"{css}-line")
    drawing.dot(x, y, f"{css}-line" if ring else css, 5.5 if ring else 4)
    if row["gap"] > MOST:
        drawing.text(x - 10, y + 4, f"{row['gap']:+.1f} % →", "small", "end")


def which_recipe() -> Drawing:
    """Gaps to bf16 of every recipe that the studies trained."""
    screen, final = rows("screen"), rows("final")
    names = [*screen, *(name for name in final if name not in screen)]
    drawing = Drawing(
        TOP + PITCH * len(names) + 34, "Gap to bf16 in held-out loss of each recipe, at 60 and 125 million parameters"
    )
    plot = Plot(
        drawing=drawing, left=300, top=TOP, width=380, height=PITCH * len(names), x=(-0.1, MOST), y=(0, len(names))
    )
    drawing.text(0, 16, "How far behind bf16 does each recipe end?", "bold")
    drawing.text(
        0, 36, "Gap in held-out loss, %. Filled: 60M parameters, 66M tokens. Ring: 125M, 197M tokens.", "small"
    )
    x = 0.0
    for css, words in KINDS.items():
        drawing.dot(x + 5, 50, css, 4)
        drawing.text(x + 14, 54, words, "small")
        x += 30 + 6.2 * len(words)
    drawing.text(756, TOP - 4, "FLOPs in 4 bits", "small", "end")
    bottom = TOP + plot.height
    for gap in (0, 0.5, 1, 1.5, 2, MOST):
        x = plot.at(gap, 0)[0]
        drawing.line(x, TOP, x, bottom, "faint" if gap else "line")
        drawing.text(x, bottom + 16, f"{gap:g} %" if gap else "bf16", "small", "middle")
    for i, name in enumerate(names):
        y = TOP + PITCH * (i + 0.5)
        row = screen.get(name) or final[name]
        shown = name.replace("four_over_six(scope=weights,candidates=0.875:1:1.25:1.5)", "four scales to choose from")
        noise = "  (noise)" if "+order" in name or "+bits" in name else ""
        drawing.text(290, y + 4, shown + noise, "small", "end")
        drawing.line(plot.left, y, plot.left + plot.width, y, "faint")
        for found, ring in ((screen, False), (final, True)):
            if name in found:
                mark(plot, y, found[name], ring)
        drawing.text(756, y + 4, f"{100 * row['four_bit']:.0f} %", "small", "end")
    return drawing


def gaps(study: str, name: str) -> list[tuple[float, float]]:
    """Return (share of the steps in percent, mean gap in percent) of each validation of a recipe."""
    found: dict[float, list[float]] = {}
    for base in sorted((RESULTS / study).glob("seed-*/bf16/log.jsonl")):
        own = base.parents[1] / name / "log.jsonl"
        if own.exists():
            losses, others = (dict(zip(*log.curve(run.parent, "eval"), strict=True)) for run in (own, base))
            for step in losses:
                found.setdefault(100 * step / max(others), []).append(100 * (losses[step] / others[step] - 1))
    return [(share, sum(values) / len(values)) for share, values in sorted(found.items())]


def over_steps() -> Drawing:
    """Gaps to bf16 of some recipes from validation to validation, in the screen and in the final."""
    drawing = Drawing(
        330,
        "Gap to bf16 in held-out loss over the steps of a training, of some recipes at 60 and 125 million parameters",
    )
    drawing.text(0, 16, "Gaps of recipes with a 4-bit forward grow at the end", "bold")
    drawing.text(0, 36, "Gap in held-out loss, %, over the steps. Grey: the learning rate decays.", "small")
    panels = (("60M parameters, 66M tokens", "screen", OF_SCREEN, 40.0), ("125M, 197M tokens", "final", (), 420.0))
    for title, study, chosen, left in panels:
        plot = Plot(drawing=drawing, left=left, top=70, width=215, height=220, x=(0, 100), y=(-0.25, 1.9))
        (decay, top), (end, bottom) = plot.at(80, plot.y[1]), plot.at(100, plot.y[0])
        drawing.box(decay, top, end - decay, bottom - top, "pale")
        drawing.text(left, 62, title, "small")
        plot.ticks((0, 0.5, 1, 1.5), "{:g}")
        for share in (0, 50, 80, 100):
            drawing.text(plot.at(share, 0)[0], bottom + 16, f"{share} %", "small", "middle")
        ends = []
        for name, row in rows(study).items():
            if row["place"] is not None and (not chosen or name in chosen):
                points = gaps(study, name)
                css = kind(row)
                plot.line(*zip(*points, strict=True), css=f"{css}-line" + (" dashed" if name in DASHED else ""))
                for point in points:
                    drawing.dot(*plot.at(*point), css, 2.5)
                ends.append((points[-1][1], name))
        last = float("inf")
        for gap, name in sorted(ends):  # from the bottom up, none over another
            last = min(plot.at(100, gap)[1] + 4, last - 13)
            drawing.text(end + 6, last, f"{gap:.2f} {name}", "small")
    return drawing


def main(folder: Path) -> int:
    """Draw the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    which_recipe().save(folder / "which-recipe.svg")
    over_steps().save(folder / "over-steps.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT))
