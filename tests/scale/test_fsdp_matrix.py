"""What the 4-bit gather goes with and what it refuses is what docs/fsdp2.md says."""

from functools import cache

import fsdp_matrix
import pytest

found = cache(fsdp_matrix.matrix)


@pytest.mark.parametrize("row", fsdp_matrix.ROWS, ids=lambda row: row.name)
def test_row(row):
    expected = "exact" if row.case is not None else "refused"
    assert found()[row.name] == [expected] * row.world


def test_the_page_has_the_table():
    assert fsdp_matrix.table() in fsdp_matrix.PAGE.read_text(encoding="utf-8")
