"""What the 4-bit gather goes with and what it refuses is what docs/fsdp2.md says."""

import fsdp_matrix
import pytest


@pytest.fixture(scope="module")
def found(request):
    """What the rows came to whose tests run: all together, since each set of ranks takes a while to start."""
    tests = [item for item in request.session.items if item.fspath == request.node.fspath]
    return fsdp_matrix.matrix({item.callspec.params["row"].name for item in tests if hasattr(item, "callspec")})


@pytest.mark.parametrize("row", fsdp_matrix.ROWS, ids=lambda row: row.name)
def test_row(row, found):
    expected = "exact" if row.case is not None else "refused"
    assert found[row.name] == [expected] * row.world


def test_the_page_has_the_table():
    assert fsdp_matrix.table() in fsdp_matrix.PAGE.read_text(encoding="utf-8")


def test_what_was_run_is_of_the_table():
    names = [row.name for row in fsdp_matrix.ROWS]
    runs = fsdp_matrix.runs()
    assert set(runs) == {"2.11", "2.13", "2.15"}
    for version, run in runs.items():
        assert run["torch"].startswith(version) and run["tree"] and not run["tree"].endswith("dirty")
        assert set(run["rows"]) <= set(names), "a row has another name now: run it again"
