"""What the documentation says is true: its worked example holds, the tests and options it names exist.

Its code blocks run in `make test-docs` (tests/docs).
"""

import ast
import re
from pathlib import Path

import pytest
import torch

import halfbyte as hb
from halfbyte import cli
from halfbyte.reference.philox import block_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+)(?:::(\w+))?)?`")
INTERNALS = [page for page in PAGES if page.parent.name == "internals"]
WIDEST = 100
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def defined(path: Path) -> set[str]:
    """Return the names of a test file's functions, and of its classes' methods as Class::method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_tests_exist(page):
    for path, *parts in TEST_NAME.findall(page.read_text()):
        assert (ROOT / path).is_file(), path
        wanted = "::".join(filter(None, parts))
        assert not wanted or wanted in defined(ROOT / path), f"{path}::{wanted}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", INTERNALS, ids=name)
def test_tables_of_internals_fit_a_screen(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    wide = [line for line in text.splitlines() if line.startswith("|") and len(line) > WIDEST]
    assert not wide, f"{len(wide)} lines of more than {WIDEST} columns; the first: {wide[0]}"


def test_documented_options_exist(capsys):
    commands = re.findall(
        r"halfbyte (train|compare|plan) ([^`\n]*--[^`\n]*)", "\n".join(page.read_text() for page in PAGES)
    )
    assert commands
    for command, options in commands:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        known = capsys.readouterr().out
        assert not [option for option in re.findall(r"--[\w-]+", options) if option not in known]


def test_every_recipe_is_in_the_table():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert not [preset for preset in hb.recipes.PRESETS if f"| `{preset}` |" not in page]


class TestWorkedExample:
    """Section 10 of numerics.md, and the numbers in section 4."""

    page = (ROOT / "docs" / "numerics.md").read_text()
    x = torch.arange(16) / 8

    def test_codes(self):
        q = hb.quantize(self.x, hb.NVFP4())
        assert f"`{q.qdata.numpy().tobytes().hex(' ')}`" in self.page
        assert q.block_scale.view(torch.uint8).tolist() == [[0x7E]]
        row = re.search(r"^code  = (\d.*)$", self.page, re.MULTILINE).group(1)
        assert hb.layout.unpack(q.qdata).flatten().tolist() == [int(code) for code in row.split()]

    def test_values(self):
        row = re.search(r"^value = (\d.*)$", self.page, re.MULTILINE).group(1)
        values = hb.quantize(self.x, hb.NVFP4()).dequantize(torch.float32)
        assert values.tolist() == [float(value) * 0.3125 for value in row.split()]

    def test_random_bytes(self):
        drawn = block_bytes(torch.tensor([0]), hb.Philox(1234, 5).on(torch.device("cpu"))).flatten().tolist()
        assert f"`{' '.join(map(str, drawn))}`" in self.page
        assert drawn[1] == 116
        code = hb.layout.unpack(hb.quantize(self.x, hb.NVFP4(rounding="stochastic"), rng=hb.Philox(1234, 5)).qdata)
        assert code.flatten()[1] == 1  # 0.5
