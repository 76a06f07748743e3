"""What several seeds of several recipes say together: gaps paired by seed, with intervals, and who is before whom.

The gap of a recipe is measured against the baseline of the same seed, whose weights and data are the same. How far gaps
scatter from seed to seed is pooled over all recipes but controls, so that two or three seeds each give an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte import files
from halfbyte.train import divergence, log, treatment
from halfbyte.train.recorded import LEAGUE, PROCESSOR, RESULT, read_result, speed

TABLE, VALUES, FIGURE = "league.md", LEAGUE, "league.png"
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class LeagueRow:
    """A recipe of a study.

    Args:
        recipe: as it was named.
        seeds: of its runs that ended.
        loss: their mean held-out loss, None if one diverged.
        gap: mean of the gaps in percent, None without a loss or a baseline.
        half: half the width of the gap's interval, None where nothing says how gaps scatter.
        place: in the order of gaps, from 1; rows that the intervals do not tell apart share the first one's.
        speed, memory: tokens per second and peak memory relative to the baseline's; None, of speed, where no run of the
            baseline with that seed was on the same kind of device and CPU.
        four_bit: share of the FLOPs of the blocks' linear layers whose operands are both NVFP4, over the whole run.
        diverged: how many of the runs did.
    """

    recipe: str
    seeds: tuple[int, ...]
    loss: float | None
    gap: float | None
    half: float | None
    place: int | None
    speed: float | None
    memory: float | None
    four_bit: float
    diverged: int


@dataclass(frozen=True, kw_only=True)
class League:
    """The rows, baseline first, then by gap, controls last; `deviation` of gaps in percent with its `freedom`."""

    rows: tuple[LeagueRow, ...]
    deviation: float | None
    freedom: int
    pooled_from: str


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return t with P(|T| < t) = level for Student's T (Abramowitz and Stegun 26.7.3, 26.7.4).

    Args:
        freedom: degrees of freedom, at least 1.
        level: between 0 and 1.

    Raises:
        ValueError: there are no degrees of freedom.
    """
    if freedom < 1:
        raise ValueError(f"freedom={freedom}: give at least 1, two runs of a recipe")
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _inside(t: float, freedom: int) -> float:
    """Return P(|T| < t)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (1.0, 1.0) if freedom % 2 == 0 else (cosine, cosine)
    for k in range(2 if freedom % 2 == 0 else 3, freedom, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    if freedom % 2 == 0:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))


def read_results(folder: Path, recipes: Sequence[str], seeds: Sequence[int]) -> dict[tuple[str, int], dict]:
    """Return the results of the runs in `folder`/seed-N/recipe that ended."""
    places = {(recipe, seed): run_folder(folder, recipe, seed) for recipe in recipes for seed in seeds}
    return {key: read_result(path / RESULT) for key, path in places.items() if (path / RESULT).exists()}


def run_folder(folder: Path, recipe: str, seed: int) -> Path:
    """Return where the run of a recipe and a seed lies."""
    return folder / f"seed-{seed}" / recipe


def league(
    results: Mapping[tuple[str, int], dict],
    recipes: Sequence[str],
    shares: Mapping[str, float],
    *,
    pooled: tuple[float, int, str] | None = None,
) -> League:
    """Return the table of a study.

    Args:
        results: of the runs that ended, by recipe and seed.
        recipes: the baseline first.
        shares: for every recipe, see `LeagueRow.four_bit`.
        pooled: the deviation of gaps, its degrees of freedom and where it is from, for a study whose own runs are one
            of each.
    """
    base = recipes[0]
    gaps = {recipe: _gaps(results, recipe, base) for recipe in recipes}
    # Runs that are the baseline's to the bit, as with another order where none shows, are no sample of the scatter.
    deviation, freedom = _scatter(
        [found for recipe, found in gaps.items() if recipe != base and not _control(recipe) and any(found)]
    )
    source = "its own runs"
    if deviation is None and pooled is not None:
        deviation, freedom, source = pooled
    rows = [_row(results, recipe, base, gaps[recipe], (deviation, freedom), shares[recipe]) for recipe in recipes]
    rest = sorted(rows[1:], key=lambda row: (_control(row.recipe), row.gap is None, row.gap or 0.0))
    return League(
        rows=(rows[0], *_placed(rest)), deviation=deviation, freedom=freedom, pooled_from=source if deviation else ""
    )


def _control(recipe: str) -> bool:
    return treatment.treatment_of(recipe).is_control


def _gaps(results: Mapping[tuple[str, int], dict], recipe: str, base: str) -> list[float]:
    """Return the gaps in percent of one recipe's seeds to the same seeds of the baseline."""
    found = []
    for name, seed in results:
        if name == recipe and (base, seed) in results:
            own, other = (divergence.loss(results[key, seed]) for key in (recipe, base))
            if own is not None and other:
                found.append(100 * (own / other - 1))
    return found


def _scatter(groups: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """Return the pooled standard deviation of groups, each about its own mean, and its degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups if group)
    squares = sum((gap - sum(group) / len(group)) ** 2 for group in groups for gap in group)
    return (math.sqrt(squares / freedom) if freedom else None), freedom


def _row(
    results: Mapping[tuple[str, int], dict],
    recipe: str,
    base: str,
    gaps: list[float],
    scatter: tuple[float | None, int],
    share: float,
) -> LeagueRow:
    seeds = tuple(seed for name, seed in results if name == recipe)
    own = [results[recipe, seed] for seed in seeds]
    losses = [divergence.loss(result) for result in own]
    finite = [loss for loss in losses if loss is not None]
    whole = len(finite) == len(losses) and bool(finite)
    deviation, freedom = scatter
    half = None
    if whole and gaps and deviation is not None and recipe != base:
        half = t_quantile(freedom) * deviation / math.sqrt(len(gaps))
    return LeagueRow(
        recipe=recipe,
        seeds=seeds,
        loss=sum(finite) / len(finite) if whole else None,
        gap=sum(gaps) / len(gaps) if whole and gaps else None,
        half=half,
        place=None,
        speed=_relative(results, recipe, base, speed, alike=_machine),
        memory=_relative(results, recipe, base, _peak),
        four_bit=share,
        diverged=len(losses) - len(finite),
    )


def _peak(result: dict) -> float:
    return result["peak_memory_bytes"]


def _machine(result: dict) -> tuple[set[str], str | None]:
    """Return the devices of a run and its CPU, which sets the pace of small models; None: it was not noted then."""
    return {place.get("device", "") for place in result.get("environments", [])}, result.get(PROCESSOR)


def _relative(
    results: Mapping[tuple[str, int], dict],
    recipe: str,
    base: str,
    figure: Callable[[dict], float],
    alike: Callable[[dict], object] = lambda _: None,
) -> float | None:
    beside = [
        (result, results[base, seed])
        for (name, seed), result in results.items()
        if name == recipe and (base, seed) in results
    ]
    pairs = [(figure(own), figure(other)) for own, other in beside if alike(own) == alike(other)]
    ratios = [own / other for own, other in pairs if other]
    return sum(ratios) / len(ratios) if ratios else None


def _placed(rows: list[LeagueRow]) -> list[LeagueRow]:
    """Give places: a row whose interval contains the next row's mean shares its place with it."""
    placed: list[LeagueRow] = []
    place = 1
    for i, row in enumerate(rows):
        if row.gap is None or _control(row.recipe):
            placed.append(row)
            continue
        before = rows[i - 1] if i else None
        is_apart = before is None or before.half is None or before.gap is None or row.gap > before.gap + before.half
        place = i + 1 if is_apart else place
        placed.append(LeagueRow(**{**asdict(row), "place": place}))
    return placed


def league_table(found: League) -> str:
    """Return the league as a Markdown table, with a sentence on its intervals."""
    base = found.rows[0].recipe
    lines = [
        f"| | recipe | seeds | held-out loss | gap to {base} | tokens/s | memory | 4-bit FLOPs |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in filter(lambda row: row.seeds, found.rows):
        loss = "-" if row.loss is None else f"{row.loss:.4f}"
        if row.diverged:
            loss = f"{row.diverged} of {len(row.seeds)} diverged"
        gap = "-" if row.gap is None or row.recipe == base else f"{row.gap:+.3f} %"
        gap += "" if row.half is None else f" ± {row.half:.3f}"
        ratios = ("-" if one is None else f"{one:.2f}x" for one in (row.speed, row.memory))
        cells = ("" if row.place is None else str(row.place), f"`{row.recipe}`", str(len(row.seeds)), loss, gap)
        lines.append("| " + " | ".join((*cells, *ratios, f"{100 * row.four_bit:.0f} %")) + " |")
    missing = [f"`{row.recipe}`" for row in found.rows if not row.seeds]
    said = [f"Not trained yet: {', '.join(missing)}."] if missing else []
    elsewhere = [f"`{row.recipe}`" for row in found.rows if row.memory is not None and row.speed is None]
    if elsewhere:
        there = f"Trained on another device or CPU than {base}, so that speeds do not compare"
        said.append(f"{there}: {', '.join(elsewhere)}.")
    return "\n".join((*lines, "", *said, intervals_in_words(found)))


def intervals_in_words(found: League) -> str:
    """Return what the intervals are."""
    if found.deviation is None:
        return "One run of each recipe: there are no intervals, and rows near each other are not told apart."
    return (
        f"±: {100 * LEVEL:.0f} % intervals of Student's t, paired by seed; the gaps of one recipe scatter by "
        f"{found.deviation:.3f} % from seed to seed, pooled over recipes but controls ({found.freedom} degrees of "
        f"freedom, from {found.pooled_from}). Rows that share a place are not told apart: the interval of one holds "
        "the mean of the next."
    )


def write(folder: Path, found: League, title: str) -> None:
    """Write table and values to `folder`."""
    files.write_text(folder / TABLE, f"{title}\n\n{league_table(found)}\n")
    files.write_json(folder / VALUES, {"title": title, **asdict(found)})


def read_values(folder: Path) -> dict[str, Any]:
    """Return what `write` wrote.

    Raises:
        ValueError: there is nothing of it.
    """
    path = folder / VALUES
    if not path.exists():
        raise ValueError(f"{path}: is not there; run that study first")
    return files.read_json(path)


def best(values: dict[str, Any], count: int, but: Sequence[str]) -> list[str]:
    """Return the recipes of a study with the smallest mean gaps that are no control, no noise row and not among `but`.

    Raises:
        ValueError: there are not so many.
    """
    names = [
        row["recipe"]
        for row in sorted(values["rows"][1:], key=lambda row: (row["gap"] is None, row["gap"] or 0))
        if row["gap"] is not None
    ]
    chosen = []
    for name in names:
        one = treatment.treatment_of(name)
        if not (one.is_control or one.bits or one.halves or name in but):
            chosen.append(name)
    if len(chosen) < count:
        raise ValueError(
            f"best({count}): the study {values.get('title', '')!r} has {len(chosen)} such recipes; run more of it"
        )
    return chosen[:count]


def draw_league(folder: Path, found: League, *, tokens_per_step: int, title: str) -> None:
    """Draw gap over tokens of every recipe, the mean of its seeds, to `folder`/league.png.

    Raises:
        ImportError: matplotlib is missing.
    """
    from halfbyte.train import plot

    base = found.rows[0].recipe
    lines = []
    for row in found.rows[1:]:
        by_step: dict[int, list[float]] = {}
        for seed in row.seeds:
            own = dict(zip(*log.curve(run_folder(folder, row.recipe, seed), "eval"), strict=True))
            other = dict(zip(*log.curve(run_folder(folder, base, seed), "eval"), strict=True))
            for step in own.keys() & other.keys():
                by_step.setdefault(step, []).append(100 * (own[step] / other[step] - 1))
        points = [(step * tokens_per_step / 1e6, sum(values) / len(values)) for step, values in sorted(by_step.items())]
        if points:
            lines.append((row.recipe, points))
    plot.gap_lines(folder / FIGURE, lines, base=base, title=title)
