"""The table of a conversion names every recipe so that it can be read, and read back."""

from __future__ import annotations

import html
import re

import pytest
from torch import nn

import halfbyte as hb
from halfbyte.recipes import read_recipe

SPLIT = hb.recipes.nvfp4(activation_mean="split")
LATER = hb.recipes.delayed_amax(every=16)
RULES = {"1": LATER, "2": None, "3": "rl/mxfp8", "4": "mxfp8", "6": LATER}
"""By rules two recipes without a name, one of a forward and a backward, a preset; the others follow SPLIT."""


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))


def read_table(text: str) -> dict[str, hb.Recipe | None]:
    """Return the recipe of every layer as the text of a report says it."""
    head, _, *lines = text.splitlines()
    begin, end = head.index("recipe"), head.index("why")
    rows = [line for line in lines if re.match(r"\d+ +32 x 32 ", line)]
    keys = dict(line.split(": ") for line in lines if re.match(r"recipe \d+: ", line))
    cells = {line.split()[0]: line[begin:end].strip() for line in rows}
    return {
        layer: None if cell == "high precision" else read_recipe(keys.get(cell, cell)) for layer, cell in cells.items()
    }


def test_a_reader_finds_the_recipe_of_every_layer():
    converted = model()
    report = hb.quantize_(converted, SPLIT, rules=RULES, keep=hb.Keep(last_fraction=0))
    expected = {str(i): getattr(layer, "recipe", None) for i, layer in enumerate(converted)}
    assert [expected[i] for i in "0123"] == [SPLIT, LATER, None, read_recipe("rl/mxfp8")]
    assert read_table(str(report)) == expected


def test_a_key_is_said_once_and_rows_stay_short():
    report = hb.quantize_(model(), SPLIT, rules=RULES, keep=hb.Keep(last_fraction=0))
    lines = str(report).splitlines()
    assert [line.split(":")[0] for line in lines[10:12]] == ["recipe 1", "recipe 2"]
    assert lines[10].endswith(SPLIT.key) and lines[11].endswith(LATER.key)
    assert max(map(len, lines[:10])) < 60 and str(report).count("fprop=") == 2
    page = html.unescape(report._repr_html_())
    assert page.count(SPLIT.key) == page.count(LATER.key) == 1 and page.count("<td>recipe 1</td>") == 3


def test_layers_converted_before_have_numbers_too():
    converted = model()
    hb.quantize_(converted, "mxfp8", rules={"0": LATER, "1": SPLIT}, keep=hb.Keep(last_fraction=0))
    converted.append(nn.Linear(32, 32, bias=False))
    report = hb.quantize_(converted, SPLIT, keep=hb.Keep(last_fraction=0))
    assert report.converted == ("8",)
    expected = {"0": LATER, "1": SPLIT, "8": SPLIT} | {str(i): hb.recipes.mxfp8() for i in range(2, 8)}
    assert read_table(str(report)) == expected


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8/nvfp4"])
def test_recipes_with_names_need_no_line_below(name):
    lines = str(hb.quantize_(model(), name, keep=hb.Keep(last_fraction=0))).splitlines()
    assert len(lines) == 11 and all(f"  {name}  " in line for line in lines[2:10])
    assert lines[10] == "8 of 8 linear layers converted, 100.0 % of their weights"
