"""The time that a kernel adds to a step, on intervals made by hand."""

from __future__ import annotations

from bench.exclusive import exclusive


def test_times_add_up_to_the_span_without_its_gaps():
    events = [(0, 10, "a"), (2, 6, "hidden"), (8, 15, "b"), (20, 24, "a"), (24, 25, "b")]
    found, idle = exclusive(reversed(events))
    assert found == {"a": (2, 14), "hidden": (1, 0), "b": (2, 6)}
    assert idle == 5 and sum(total for _, total in found.values()) + idle == 25
