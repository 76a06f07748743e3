"""The committed figures are those that their script draws, and every one is on a page."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from pages import ROOT

DRAWN = ROOT / "docs" / "assets" / "concepts"
NAMES = sorted(path.name for path in DRAWN.glob("*.svg"))


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """Return a folder with the figures drawn anew."""
    folder = tmp_path_factory.mktemp("figures")
    script = str(ROOT / "docs" / "figures" / "draw.py")
    done = subprocess.run([sys.executable, script, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_script_draws_what_is_there(again):
    assert sorted(path.name for path in again.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_is_equal(again, name):
    assert (again / name).read_bytes() == (DRAWN / name).read_bytes(), "run `make figures` and look at the difference"


@pytest.mark.parametrize("name", NAMES)
def test_each_is_on_the_page_and_says_what_it_shows(name):
    assert f"assets/concepts/{name})" in (ROOT / "docs" / "concepts.md").read_text()
    root = ElementTree.parse(DRAWN / name).getroot()
    (title,) = root.findall("{http://www.w3.org/2000/svg}title")
    assert len(title.text.split()) > 5


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_drawn_outside(name):
    """Boxes, dots and anchors of text lie within the picture."""
    root = ElementTree.parse(DRAWN / name).getroot()
    width, height = map(float, root.get("viewBox").split()[2:])
    for shape in root.iter():
        x, y = (shape.get(key) or shape.get(f"c{key}") for key in "xy")
        if x is not None:
            right, bottom = (float(a) + float(shape.get(b, 0)) for a, b in ((x, "width"), (y, "height")))
            assert float(x) >= 0 and right <= width and float(y) >= 0 and bottom <= height, ElementTree.tostring(shape)
