"""`make figures` renews docs/agreement.md only where a figure is another."""

import pytest

from bench.agreement import renewed

TABLE = "**torchao 0.18.0** on 2026-11-22, torch 2.13:\n| data | {} % |\n"
PAGE = "Before.\n<!-- agreement: torchao -->\n" + TABLE.format(48) + "<!-- /agreement -->\nBehind.\n"


def test_another_day_alone_changes_nothing():
    assert renewed(PAGE, {"torchao": TABLE.format(48).replace("22", "29").rstrip("\n")}) == PAGE
    assert renewed(PAGE, {}) == PAGE


def test_another_figure_brings_its_day():
    found = renewed(PAGE, {"torchao": TABLE.format(47).replace("-22", "-29").rstrip("\n")})
    assert found == PAGE.replace("-22", "-29").replace("48", "47")
    with pytest.raises(ValueError, match="no place for modelopt: add <!-- agreement: NAME -->"):
        renewed(PAGE, {"modelopt": ""})
