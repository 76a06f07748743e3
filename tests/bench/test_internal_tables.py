"""A table of figures in docs/internals is printed from records or listings, or names the experiment that it is of."""

from __future__ import annotations

import re

import pytest

from bench import listing_tables, tables

PAGES = [page for page in tables.PAGES if page.parent.name == "internals"]
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
FIGURE = re.compile(r"[−+-]?\d")
EXPERIMENT = re.compile(
    r"Experiment of 20\d\d-\d\d-\d\d, [^.;]*(?:NVIDIA|EPYC|Xeon)[^.;]*, "
    r"written down at [0-9a-f]{7}; no record is kept[^.]*:\n\n$"
)


def undated(text: str) -> list[str]:
    """Return the first lines of tables of figures that no record prints and that no line above calls an experiment."""
    text = tables.BLOCK.sub("", text)
    found = []
    for match in TABLE.finditer(text):
        head, _, *body = match.group().splitlines()
        cells = [cell.strip() for line in body for cell in line.strip("|").split("|")[1:] if cell.strip()]
        figures = sum(bool(FIGURE.match(cell)) for cell in cells)
        if 2 * figures > len(cells) and not EXPERIMENT.search(text[: match.start()]):
            found.append(head)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_figures_are_printed_or_name_their_experiment(page):
    assert undated(page.read_text(encoding="utf-8")) == []


def test_an_undated_table_is_seen():
    table = "|  | µs |\n|---|---|\n| a | 3.5 |\n"
    dated = "Experiment of 2026-01-02, one NVIDIA H200, written down at abcdef0; no record is kept:\n\n"
    assert undated(f"Measured:\n\n{table}") == ["|  | µs |"]
    assert undated(f"Experiment of 2026-01-02:\n\n{table}") == ["|  | µs |"]
    assert undated(dated + table) == [] and undated(f"<!-- results: a -->\n{table}<!-- /results -->") == []
    assert undated("| file | what |\n|---|---|\n| a | casts |\n") == []


def test_listings_are_added_up_as_by_hand():
    """1B by its listing: sums that were made with a pocket calculator."""
    assert "| products | 167.1 | 339 | 164.8 | 339 |" in listing_tables.kinds(())
    assert "| norms | 5.0 | 63 | 6.2 | 64 |" in listing_tables.kinds(())
    assert listing_tables.both_orientations(()) == "18.6 ms in 143 launches"
    assert "| 60m | 32,768 | own loop | 0489305 | 40.9 | 56.1 | 1.374 |" in listing_tables.steps(())
    assert "| 300m | 32,768 | CUDA graph | 611c496 |  | 180.6 | 1.138 |" in listing_tables.steps(())
    assert "| 125m | 4 × 32,768 | `compare` | 35a82c9 |  |  | 1.138 |" in listing_tables.steps(())
    assert "| 1b | 32,768 | `compare` | 35a82c9 |  |  | 1.056 |" in listing_tables.steps(())
    assert "| 768×768×32768 | 57.3 | 66.2 (128×256, 7 parts) | 58.3 |  |" in listing_tables.products(())


def test_a_changed_listing_changes_the_table_and_an_empty_one_is_refused(tmp_path, monkeypatch):
    for path in listing_tables.FOLDER.iterdir():
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8").replace("  7.84   110 ", "  9.99   110 "))
    before = listing_tables.kernels(())
    monkeypatch.setattr(listing_tables, "FOLDER", tmp_path)
    assert listing_tables.kernels(()) == before.replace("| 7.84 |", "| 9.99 |") != before
    (tmp_path / listing_tables.VALUES).write_text("nothing\n")
    with pytest.raises(ValueError, match="no line is .*; the table wants another listing"):
        listing_tables.values(())
