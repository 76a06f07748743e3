"""Recipes, reports and statistics show tables in a notebook: every cell that their text has."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.notebook import spec_words
from halfbyte.plan import PlanRequest, plan


class Cells(HTMLParser):
    """The cells of the tables of a page, row by row; refuses what is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows, self.open, self.text = [], [], ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_a_recipe_is_a_row_for_each_gemm():
    rows = Cells(hb.recipes.nvfp4()._repr_html_()).rows
    assert rows[0] == ["GEMM", "left operand", "right operand"]
    assert rows[1] == ["fprop", "x: NVFP4 1x16, nearest", "w: NVFP4 16x16, nearest"]
    assert rows[2] == ["dgrad", "dy: NVFP4 1x16, stochastic", "w: NVFP4 16x16, nearest"]
    assert rows[3][0] == "wgrad" and rows[3][1].startswith("dy: NVFP4 1x16, stochastic, Hadamard(size=16")


@pytest.mark.parametrize("name", hb.recipes.PRESETS)
def test_recipes_that_differ_look_different(name):
    page = hb.recipes.get(name)._repr_html_()
    assert len(Cells(page).rows) == 4
    others = {other: hb.recipes.get(other) for other in hb.recipes.PRESETS}
    assert [other for other, recipe in others.items() if recipe._repr_html_() == page] == [
        other for other, recipe in others.items() if recipe == hb.recipes.get(name)
    ]


def test_fields_that_are_not_the_default_are_said():
    assert spec_words(None) == "high precision"
    assert spec_words(hb.MXFP8(element="e5m2")).startswith("MXFP8 e5m2")
    assert spec_words(hb.NVFP4(outer="row", e4m3_max=256.0)) == "NVFP4 1x16, nearest, outer='row', e4m3_max=256.0"
    split = hb.recipes.nvfp4(activation_mean="split")._repr_html_()
    assert "activation_mean=&#x27;split&#x27;" in split
    assert "rows do not depend on their batch" in hb.recipes.rl()._repr_html_()
    assert "backward=&#x27;dequantized&#x27;" in hb.recipes.rl()._repr_html_()


def test_a_plan_has_the_tables_of_the_command():
    made = plan(PlanRequest(model="1b", gpus=8, mesh="dp_shard=8"))
    found = Cells(made._repr_html_())
    by_name = {row[0]: row[1:] for row in found.rows}
    assert by_name["GiB a GPU"] == [moment.moment for moment in made.moments]
    assert by_name["in all"] == [f"{moment.total / 2**30:.2f}" for moment in made.moments]
    shares = [by_name[what] for what in made.step.seconds]
    assert shares == [[f"{s * 1000:,.1f}", f"{s / made.step.total:.0%}"] for s in made.step.seconds.values()]
    assert [c.what for c in made.collectives] == [row[0] for row in found.rows if len(row) == 7][1:]
    assert "1b, 1.2B parameters, recipe nvfp4, 8 x h200" in found.text and "fits" in found.text


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Conv1d(2, 2, 1))


def test_a_report_of_a_conversion_has_the_cells_of_its_text():
    report = hb.quantize_(model(), "nvfp4", rules={"2": None})
    found = Cells(report._repr_html_())
    lines = str(report).split("\n")
    assert found.rows == [re.split(" {2,}", line.strip()) for line in (lines[0], *lines[2:4])]
    for line in lines[4:]:
        assert line in found.text
    assert "1 of 2 linear layers converted" in found.text and "Conv1d" in found.text


def test_other_reports_show_their_text():
    converted = nn.Sequential(nn.Linear(32, 32))
    hb.quantize_(converted, "nvfp4", keep=hb.Keep(last_fraction=0))
    memory = hb.memory_report(converted, torch.randn(4, 32))
    frozen = hb.freeze_(converted)
    for report in (memory, frozen):
        page = report._repr_html_()
        assert page.startswith("<pre>") and Cells(page).text == str(report)


def test_names_of_layers_are_no_html():
    parent = nn.ModuleDict({"<b>&": nn.Linear(32, 32)})
    report = hb.quantize_(parent, "nvfp4", keep=hb.Keep(last_fraction=0))
    assert "<b>" not in report._repr_html_() and Cells(report._repr_html_()).rows[1][0] == "<b>&"
