"""A day's draw of the families that `make test` takes a fourth of."""

import ast
from pathlib import Path

import pytest
import sampling

TESTS = Path(__file__).parent
CASES = [f"tests/nn/test_a.py::test_b[{n}]" for n in range(10)]
OTHERS = ["tests/nn/test_a.py::test_c[1]", "tests/nn/test_a.py::test_b_too[1]"]
FAMILIES = ("nn/test_a.py::test_b",)


def test_a_day_keeps_a_fourth_rounded_up_and_all_of_other_tests():
    out = sampling.left_out([*CASES, *OTHERS], FAMILIES, "2026-11-27")
    assert len(out) == 7
    assert out < set(CASES)


def test_a_day_draws_alike_in_whatever_order_and_other_days_others():
    days = [f"2026-11-{day:02d}" for day in range(1, 31)]
    kept = {day: set(CASES) - sampling.left_out(CASES, FAMILIES, day) for day in days}
    assert kept == {day: set(CASES) - sampling.left_out(CASES[::-1], FAMILIES, day) for day in days}
    assert set.union(*kept.values()) == set(CASES), "a case that thirty days leave out"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_family_is_never_left_out_whole(count):
    assert len(sampling.left_out(CASES[:count], FAMILIES, "2026-11-27")) == count - (count + 3) // 4


def test_what_is_listed_exists():
    for name in sampling.listed():
        path, *owners, function = name.split("::")
        body = ast.parse((TESTS / path).read_text(encoding="utf-8")).body
        for owner in owners:
            (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in body), name
