"""Ranks that share linear layers meet for amaxes as seldom as they can: each time costs the host a dozen launches."""

import meeting_checks as checks
import pytest
import ranks


@pytest.mark.parametrize(
    ("way", "wanted"), [("codes", (1, 1)), ("values", (1, 3))], ids=("in codes, one pass", "in values, one by one")
)
def test_siblings_meet_once_in_a_pass(way, wanted):
    assert ranks.run(2, checks.siblings_meet, way, wanted)[0] == []


def test_what_one_sibling_found_is_no_more_once_a_weight_changed():
    assert ranks.run(2, checks.found_again)[0] == []
