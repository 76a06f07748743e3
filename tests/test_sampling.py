"""A day's draw of the families that `make test` takes a fourth of."""

import ast
from pathlib import Path

import pytest
import sampling

TESTS = Path(__file__).parent
CASES = [f"tests/nn/test_a.py::test_b[{n}]" for n in range(10)]
OTHERS = ["tests/nn/test_a.py::test_c[1]", "tests/nn/test_a.py::test_b_too[1]"]
FAMILIES = {"nn/test_a.py::test_b": None}


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


def test_a_number_is_how_many_a_day_runs(tmp_path):
    (tmp_path / "list").write_text("# families\nnn/test_a.py::test_b 2\nnn/test_a.py::test_c\n")
    families = sampling.numbered(tmp_path / "list")
    assert families == {"nn/test_a.py::test_b": 2, "nn/test_a.py::test_c": None}
    assert sampling.listed(tmp_path / "list") == set(families)
    days = [f"2026-11-{day:02d}" for day in range(1, 31)]
    kept = [set(CASES) - sampling.left_out([*CASES, *OTHERS], families, day) for day in days]
    assert {len(found) for found in kept} == {2} and set.union(*kept) == set(CASES)


LONG = ["a/test_b.py", "a/test_c.py::test_d", "a/test_c.py::test_e", "a/test_f.py", "a/test_g.py"]
LONG_ONES = [f"tests/{name}" for name in LONG[1:3]]
LONG_ONES += [f"tests/{path}::test_{n}" for path in (LONG[0], *LONG[3:]) for n in range(3)]
SHORT = ["tests/a/test_c.py::test_other", "tests/a/test_c.py::test_d_too", "tests/b/test_b.py::test_0"]


def test_a_day_keeps_a_fourth_of_what_is_long_by_itself_files_as_a_whole():
    days = [f"2026-11-{day:02d}" for day in range(1, 31)]
    kept = [set(LONG_ONES) - sampling.left_out_of_long([*LONG_ONES, *SHORT], LONG, day) for day in days]
    for day, found in zip(days, kept, strict=True):
        units = {name for name in LONG for nodeid in found if nodeid.startswith(f"tests/{name}")}
        assert len(units) == 2, "five, a fourth rounded up"
        assert found == {nodeid for nodeid in LONG_ONES if any(nodeid.startswith(f"tests/{name}") for name in units)}
        out = sampling.left_out_of_long([*SHORT, *LONG_ONES[::-1]], LONG, day)
        assert out == set(LONG_ONES) - found, "alike in whatever order"
        assert sampling.left_out_of_long(LONG_ONES[:1], LONG, day) == out & set(LONG_ONES[:1]), "whatever else is run"
    assert set.union(*kept) == set(LONG_ONES), "one that thirty days leave out"


def test_what_is_listed_exists():
    for name in (*sampling.listed(), *sampling.listed(sampling.LONG)):
        if "::" not in name:
            assert (TESTS / name).is_file(), name
            continue
        path, *owners, function = name.split("::")
        body = ast.parse((TESTS / path).read_text(encoding="utf-8")).body
        for owner in owners:
            (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in body), name
