"""The page of `halfbyte report` in Chromium: two widths, light and dark, the keyboard, nothing from a network."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from chromium import THEMES, WIDTHS, answers_of_frames, chromium

from halfbyte.train import page

STEPS = range(50, 401, 50)

ASK = """
<script>
const root = document.documentElement, inside = e => e.closest('.scroll') !== null;
for (const one of document.querySelectorAll('details')) one.open = true;
const parse = c => c.match(/[\\d.]+/g).map(Number).slice(0, 3);
const light = c => c.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
const back = parse(getComputedStyle(document.body).backgroundColor);
const contrast = e => { const a = light(parse(getComputedStyle(e).fill !== 'rgb(0, 0, 0)' && e.ownerSVGElement
  ? getComputedStyle(e).fill : getComputedStyle(e).color)), b = light(back);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
const texts = [...document.querySelectorAll('h1,h2,p,li,figcaption,summary,text,th,pre,a')];
root.dataset.answer = JSON.stringify({
  overflow: root.scrollWidth - root.clientWidth,
  wide: [...document.body.querySelectorAll('*')].filter(e => !inside(e)
    && e.getBoundingClientRect().right > innerWidth + 1 && !e.classList.contains('skip')).map(e => e.tagName),
  back, contrast: Math.min(...texts.map(contrast)), width: innerWidth,
  fetched: performance.getEntriesByType('resource').map(e => e.name),
  reached: [...document.querySelectorAll('a[href],summary,[tabindex="0"]')].filter(e => { e.focus();
    return document.activeElement === e; }).length,
  reachable: document.querySelectorAll('a[href],summary,[tabindex="0"]').length,
  scrolls: [...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0 && e.getAttribute('aria-label')),
});
</script>
"""


def write_run(folder: Path, recipe: str, offset: float) -> None:
    """Write what a run of `halfbyte train --stats-every 50` leaves."""
    folder.mkdir(parents=True)
    identity = {"recipe": recipe}
    facts = {
        "identity": identity,
        "environment": {"torch": "2.13", "gpu": "none", "cpu": "x86_64"},
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(facts))
    lines = [{"kind": "step", "step": s, "loss": 5 - s / 200 + offset} for s in range(1, 401)]
    lines += [{"kind": "eval", "step": s, "loss": 5.1 - s / 200 + offset} for s in STEPS]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    layers = [
        f"model.layers.{i}.a_module_with_a_long_name.{name}" for i in range(4) for name in ("up_proj", "down_proj")
    ]
    with (folder / "stats.jsonl").open("w") as file:
        for step in STEPS:
            for i, layer in enumerate(layers):
                for side in ("x.row", "w.row", "dy.row", "w.col", "dy.col", "x.col"):
                    record = {"step": step, "layer": layer, "operand": side, "snr_db": 15 + i, "underflow": i / 100}
                    file.write(json.dumps(record) + "\n")
                ratio = {"step": step, "layer": layer, "product": "dw", "cosine": 0.9 + i / 100, "noise_ratio": 0.1 * i}
                file.write(json.dumps(ratio) + "\n")
    (folder / "layers.txt").write_text("\n".join(f"{layer}  4096 x 4096  {recipe}  " + "why " * 20 for layer in layers))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    write_run(folder / "bf16", "bf16", 0.0)
    write_run(folder / "nvfp4", "nvfp4", 0.03)
    return folder


@pytest.fixture(scope="module")
def answers(source, tmp_path_factory) -> dict:
    """Return what Chromium says of the page, by theme and width; a frame sets it, for windows have a smallest one."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "page.html").write_text(page.page(source).replace("</body>", ASK + "</body>"))
    found = {}
    for theme in THEMES:
        frames = [f"<iframe src=page.html style='border:0;width:{width}px;height:2000px'></iframe>" for width in WIDTHS]
        (folder / "frame.html").write_text(f"<!doctype html><body style='margin:0'>{''.join(frames)}")
        answers = answers_of_frames(folder / "frame.html", theme)
        found |= {(theme, width): answer for width, answer in zip(WIDTHS, answers, strict=True)}
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_nothing_overflows_and_everything_can_be_read(answers, theme, width):
    answer = answers[theme, width]
    assert answer["width"] == width and answer["overflow"] <= 0 and answer["wide"] == []
    assert answer["contrast"] >= 4.5
    assert (sum(answer["back"]) < 150) == (theme == "dark")


def test_the_keyboard_reaches_everything_and_nothing_is_fetched(answers):
    for answer in answers.values():
        assert answer["reached"] == answer["reachable"] > 20 and answer["scrolls"] and answer["fetched"] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screenshot_shows_it(source, tmp_path, width):
    (tmp_path / "page.html").write_text(page.page(source))
    picture = tmp_path / f"{width}.png"
    chromium(f"--window-size={max(width, 500)},1600", f"--screenshot={picture}", (tmp_path / "page.html").as_uri())
    assert picture.stat().st_size > 20_000


def test_an_overflow_would_be_noticed(source, tmp_path):
    broken = page.page(source).replace("</main>", "<p style='width:3000px'>wide</p></main>")
    (tmp_path / "page.html").write_text(broken.replace("</body>", ASK + "</body>"))
    dom = chromium("--window-size=1280,800", "--dump-dom", (tmp_path / "page.html").as_uri())
    answer = json.loads(html.unescape(re.search('data-answer="(.*?)"', dom)[1]))
    assert answer["overflow"] > 0 and "P" in answer["wide"]
