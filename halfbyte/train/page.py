"""`halfbyte report RUN`: a run, or a comparison of several, as one HTML page that needs nothing else.

The page has no script and loads nothing: charts are SVG, colours follow the system's light or dark theme, what is wider
than the page scrolls by itself, and everything is reached by the keyboard.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

from halfbyte import files
from halfbyte.arguments import ArgumentParser, given_path
from halfbyte.stats.figures import NOISE_LIMIT, PRODUCTS, SIDES
from halfbyte.train import divergence, folder, league, log, sampled
from halfbyte.train.compare import RESULTS
from halfbyte.train.drawing import Series, chart, heat_table, scrolled, text_table
from halfbyte.train.recorded import speed

NAME = "report.html"
OPERAND_FIGURES = (("snr_db", "SNR", "dB"), ("underflow", "values that become 0", "share"))
CURVES = 8
"""Layers whose curves are drawn at once."""

STYLE = """
:root { color-scheme: light dark; --text: #1d1d1f; --back: #fcfcfb; --soft: #6b6b70; --line: #dcdcd8;
  --heat-colour: #d55e00; --s0: #222222; --s1: #0072b2; --s2: #009e73; --s3: #b07800; --s4: #d55e00; --s5: #a8578a;
  --s6: #2a7fa8; --s7: #8b6f47; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8e6; --back: #17181a; --soft: #a3a3a8; --line: #3a3b3e;
  --heat-colour: #ff8a3d; --s0: #f2f2f2; --s1: #56b4e9; --s2: #3fd0a4; --s3: #e6b84d; --s4: #ff8a3d; --s5: #e39ac6;
  --s6: #8fd3f4; --s7: #c9ab7c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--text); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } .unit, .soft { color: var(--soft); }
a { color: var(--s1); } :focus-visible { outline: 3px solid var(--s1); outline-offset: 2px; }
nav ul, .legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; background: var(--back); padding: .4rem; }
.charts { display: grid; margin-top: 1rem; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } .grid { stroke: var(--line); }
polyline { fill: none; stroke: var(--mark); stroke-width: 2; } circle { fill: var(--mark); }
.legend li::before { content: ""; display: inline-block; width: 1rem; height: .2rem; margin-right: .4rem;
  vertical-align: middle; background: var(--mark); }
.scroll { overflow-x: auto; max-width: 100%; } table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.heat td { background: color-mix(in srgb, var(--heat-colour) var(--heat, 0%), transparent); }
pre { font-size: .8rem; margin: 0; } details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
""" + "".join(f".s{i} {{ --mark: var(--s{i}); }}\n" for i in range(8))


def main(arguments: list[str]) -> int:
    """Run `halfbyte report`; returns 0."""
    parser = ArgumentParser(
        prog="halfbyte report",
        description="Write a run, or a comparison, as one HTML page: losses, gaps, statistics over steps, layers, "
        "where it ran.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=given_path, help="the folder of `halfbyte train` or `halfbyte compare`")
    parser.add_argument("--out", type=given_path, help=f"the page; by default {NAME} in that folder")
    options = parser.parse_args(arguments)
    target = options.out or options.run / NAME
    files.write_text(target, page(options.run))
    print(f"written to {target}")
    return 0


def page(source: Path) -> str:
    """Return the page of a run's folder, or of a comparison's.

    Raises:
        ValueError: there is neither, or a file of it is damaged.
    """
    if not source.is_dir():
        raise ValueError(f"{source}: is no folder; give that of `halfbyte train` or `halfbyte compare`")
    runs = _runs(source)
    losses = [*_loss_charts(source, runs)]
    sections = {
        "Losses": f'<div class="charts">{"".join(losses)}</div>' + _results(runs),
        "Statistics": "".join(_statistics(name, path, len(runs) > 1) for name, path in runs.items()),
        "Layers": "".join(_layers(name, path) for name, path in runs.items()),
        "Where it ran": "".join(_environment(name, path) for name, path in runs.items()),
    }
    shown = {title: content for title, content in sections.items() if content}
    links = "".join(f'<li><a href="#{_anchor(title)}">{title}</a></li>' for title in shown)
    body = "".join(f'<section id="{_anchor(title)}"><h2>{title}</h2>{text}</section>' for title, text in shown.items())
    title = escape(f"{source.resolve().name}: {', '.join(runs)}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{title}</title><style>{STYLE}</style></head><body>'
        f'<a class="skip" href="#losses">to the losses</a><header><h1>{title}</h1>'
        f'<nav aria-label="sections"><ul>{links}</ul></nav></header><main>{body}</main></body></html>\n'
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _runs(source: Path) -> dict[str, Path]:
    """Return the folders of runs by the names of their recipes, the baseline first."""
    if (source / folder.CONFIG).exists():
        return {str(folder.recorded_config(source)["identity"].get("recipe", source.name)): source}
    found = {path.name: path for path in sorted(source.iterdir()) if (path / folder.CONFIG).exists()}
    ordered = _order(source)
    found |= {name: source / name for name in ordered if (source / name / folder.CONFIG).exists()}  # "A/B" lies deeper
    seeds = sorted({str(path.parent.parent) for path in source.glob(f"seed-*/*/{folder.CONFIG}")})
    if not found and seeds:
        raise ValueError(f"{source}: several seeds, and a page shows one; give one of {', '.join(seeds)}")
    if not found:
        raise ValueError(f"{source}: holds no run; give the folder of `halfbyte train` or `halfbyte compare`")
    return {name: found[name] for name in ordered if name in found} | found


def _order(source: Path) -> list[str]:
    """Return the recipes of a comparison, or of the comparison of which it is a seed, the baseline first."""
    if (source / RESULTS).exists():
        rows = files.read_json(source / RESULTS).get("results", [])
    elif (source.parent / league.VALUES).exists():
        rows = files.read_json(source.parent / league.VALUES).get("rows", [])
    else:
        rows = []
    return [str(row.get("recipe")) for row in rows]


def _loss_charts(source: Path, runs: dict[str, Path]) -> list[str]:
    curves = {name: {kind: log.curve(path, kind) for kind in ("step", "eval")} for name, path in runs.items()}
    training = [Series(name, list(zip(*one["step"], strict=True))) for name, one in curves.items()]
    held_out = [Series(name, list(zip(*one["eval"], strict=True))) for name, one in curves.items()]
    first = dict(held_out[0].points)
    gaps = [
        Series(one.name, [(step, 100 * (loss / first[step] - 1)) for step, loss in one.points if first.get(step)])
        for one in held_out
    ]
    return [
        chart("Held-out loss", held_out, "nats per token"),
        chart("Training loss", training, "nats per token"),
        chart(f"Gap to {held_out[0].name}", gaps, "percent of held-out loss") if len(runs) > 1 else "",
    ]


def _results(runs: dict[str, Path]) -> str:
    rows = []
    for name, path in runs.items():
        if not (path / folder.RESULT).exists():
            rows.append((name, "has not ended", "", "", ""))
            continue
        found = folder.read_result(path / folder.RESULT)
        diverged = divergence.of(found)
        shown = _until(diverged, path) if diverged else f"{found['held_out_loss']:.4f}"
        memory = f"{found['peak_memory_bytes'] / 2**20:,.0f} MiB"
        rows.append((name, shown, str(found["steps"]), f"{speed(found):,.0f}", memory))
    return text_table("results", ("recipe", "held-out loss", "steps", "tokens/s", "peak memory"), rows)


def _until(diverged: divergence.Divergence, path: Path) -> str:
    """Return where a run diverged, and the last loss of its log that is a number."""
    steps, losses = log.curve(path, "step")
    last = (
        f"last finite training loss {losses[-1]:.4f} at step {steps[-1]}"
        if steps
        else "its log has no finite training loss"
    )
    return f"{diverged.in_full()}; {last}"


def _statistics(name: str, path: Path, is_one_of_several: bool) -> str:
    """Return the statistics of one run over its sampled steps."""
    records = sampled.read_statistics(path)
    if not records:
        return ""
    layers = list(dict.fromkeys(record["layer"] for record in records))
    last = max(record["step"] for record in records)
    snr = {(r["layer"], r["operand"]): r["snr_db"] for r in records if r["step"] == last and "operand" in r}
    sides = [side for side in SIDES if any(operand == side for _, operand in snr)]
    rows = [(layer, [snr.get((layer, side)) for side in sides]) for layer in layers]
    parts = [f"<h3>{escape(name)}</h3>" if is_one_of_several else ""]
    parts.append(f"<p>SNR in dB at step {last}; the stronger the colour, the more is lost.</p>")
    parts.append(heat_table(f"SNR of {name}", sides, rows))
    worst = sorted(layers, key=lambda layer: _ratio_at(records, layer, last), reverse=True)[:CURVES]
    curves = [Series(layer, _points(records, layer, "product", "dw", "noise_ratio")) for layer in worst]
    cosines = [Series(layer, _points(records, layer, "product", "dw", "cosine")) for layer in worst]
    caption = f"Noise of the weight gradient over the gradient; beyond {NOISE_LIMIT:.3f} training in FP4 stalls"
    parts.append(f'<div class="charts">{chart(caption, curves, "ratio")}{chart("Cosine of dw", cosines, "")}</div>')
    parts += [_layer_details(records, layer) for layer in layers]
    return "".join(parts)


def _ratio_at(records: list[dict[str, Any]], layer: str, step: int) -> float:
    points = dict(_points(records, layer, "product", "dw", "noise_ratio"))
    return points.get(step, -math.inf)


def _points(records: list[dict[str, Any]], layer: str, kind: str, which: str, figure: str) -> list[tuple[float, float]]:
    return [
        (record["step"], record[figure])
        for record in records
        if record["layer"] == layer and record.get(kind) == which and record.get(figure) is not None
    ]


def _layer_details(records: list[dict[str, Any]], layer: str) -> str:
    charts = [
        chart(title, [Series(side, _points(records, layer, "operand", side, figure)) for side in SIDES], unit)
        for figure, title, unit in OPERAND_FIGURES
    ]
    charts.append(
        chart("cosine", [Series(name, _points(records, layer, "product", name, "cosine")) for name in PRODUCTS], "")
    )
    return f'<details><summary>{escape(layer)}</summary><div class="charts">{"".join(charts)}</div></details>'


def _layers(name: str, path: Path) -> str:
    if not (path / folder.LAYERS).exists():
        return ""
    text = escape(files.read_text(path / folder.LAYERS))
    title = f"layers of {name}"
    return f"<details open><summary>{escape(name)}</summary>{scrolled(title, f'<pre>{text}</pre>')}</details>"


def _environment(name: str, path: Path) -> str:
    recorded = folder.recorded_config(path)
    facts = dict(recorded.get("environment", {})) | {
        "dtype": recorded.get("dtype", ""),
        "mesh": recorded.get("mesh", ""),
    }
    rows = [(key, _words(value)) for key, value in facts.items()]
    for one in recorded.get("environments", [])[1:]:
        rows.append((f"from step {one['step']}", _words({k: v for k, v in one.items() if k != "step"})))
    summary = f"<summary>{escape(name)}</summary>"
    return f"<details open>{summary}{text_table(f'environment of {name}', ('what', 'value'), rows)}</details>"


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items() if one is not None)
    return str(value)
