"""The committed figures are those that their script draws, and every one is on a page."""

import json
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from pages import ROOT

ASSETS = ROOT / "docs" / "assets"
PAGES = {"concepts": "docs/concepts.md", "leagues": "docs/which_recipe.md"}
SCRIPTS = {"draw.py": "concepts", "leagues.py": "leagues"}
NAMES = sorted(str(path.relative_to(ASSETS)) for folder in PAGES for path in (ASSETS / folder).glob("*.svg"))


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """Return a folder with the figures drawn anew."""
    folder = tmp_path_factory.mktemp("figures")
    for name, to in SCRIPTS.items():
        command = [sys.executable, str(ROOT / "docs" / "figures" / name), str(folder / to)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    return folder


def test_the_scripts_draw_what_is_there(again):
    assert sorted(str(path.relative_to(again)) for path in again.glob("*/*")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_is_equal(again, name):
    assert (again / name).read_bytes() == (ASSETS / name).read_bytes(), "run `make figures` and look at the difference"


@pytest.mark.parametrize("name", NAMES)
def test_each_is_on_its_page_and_says_what_it_shows(name):
    assert f"assets/{name})" in (ROOT / PAGES[name.partition("/")[0]]).read_text()
    root = ElementTree.parse(ASSETS / name).getroot()
    (title,) = root.findall("{http://www.w3.org/2000/svg}title")
    assert len(title.text.split()) > 5


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_drawn_outside(name):
    """Boxes, dots and anchors of text lie within the picture."""
    root = ElementTree.parse(ASSETS / name).getroot()
    width, height = map(float, root.get("viewBox").split()[2:])
    for shape in root.iter():
        x, y = (shape.get(key) or shape.get(f"c{key}") for key in "xy")
        if x is not None:
            right, bottom = (float(a) + float(shape.get(b, 0)) for a, b in ((x, "width"), (y, "height")))
            assert float(x) >= 0 and right <= width and float(y) >= 0 and bottom <= height, ElementTree.tostring(shape)


def test_the_first_screen_shows_the_league():
    text = (ROOT / "README.md").read_text()
    assert text.index("(docs/assets/leagues/which-recipe.svg)") < text.index("## Who needs it")


@pytest.mark.parametrize("study", ["screen", "final"])
def test_dots_lie_where_the_studies_ended(study):
    """Each gap that was recorded, measured by the axis of the figure; what is behind its end is written in figures."""
    root = ElementTree.parse(ASSETS / "leagues" / "which-recipe.svg").getroot()
    texts = [
        (shape.text, float(shape.get("x")), float(shape.get("y"))) for shape in root.iter() if shape.get("text-anchor")
    ]
    zero, one = (next(x for text, x, _ in texts if text == end) for end in ("bf16", "1 %"))
    gaps = _gaps(ROOT / "experiments" / "results" / study)
    dots = [(float(s.get("cx")), float(s.get("cy")), float(s.get("r"))) for s in root.iter() if s.get("cx")]
    seen = 0
    for text, x, y in texts:
        name = text.removesuffix("  (noise)")
        name = name.replace("four scales to choose from", "four_over_six(scope=weights,candidates=0.875:1:1.25:1.5)")
        if x < zero and name in gaps:
            gap = gaps[name]
            (dot,) = [cx for cx, cy, r in dots if abs(cy - y + 4) < 1 and (r > 5) == (study == "final")]
            at = (dot - zero) / (one - zero)
            assert at == pytest.approx(gap, abs=0.01) or (
                at < gap and f"{gap:+.1f} % →" in [text for text, _, _ in texts]
            )
            seen += 1
    assert seen == len(gaps) > 0


def _gaps(study):
    """Return the mean gap of each recipe to bf16 of the same seeds, percent, from the results of its runs."""
    losses = {}
    for path in study.glob("seed-*/*/result.json"):
        losses.setdefault(path.parent.name, {})[path.parents[1]] = json.loads(path.read_text())["held_out_loss"]
    base = losses.pop("bf16")
    return {name: statistics.mean(100 * (own[k] / base[k] - 1) for k in own) for name, own in losses.items()}
