"""The statistics of two ranks are those of one process that sees the data of both."""

from __future__ import annotations

import pytest
import ranks
import stats_checks

import halfbyte as hb


@pytest.mark.parametrize("wrap", [False, True])
def test_two_ranks_are_one_process(wrap):
    found = ranks.run(2, stats_checks.of_a_rank, wrap)
    assert found[0] == found[1]
    model, _ = stats_checks.converted()
    assert len(found[0]) == 15
    compare(found[0], model, [(stats_checks.data(rank),) for rank in range(2)])


def test_a_group_adds_up_its_own_ranks_and_its_first_alone_writes_and_warns():
    """Stages of a pipeline are such groups: ranks 0 and 1 are one, 2 and 3 the other, with data of their own."""
    found = ranks.run(4, stats_checks.of_a_stage)
    for first in (0, 2):
        model, _ = stats_checks.converted()
        compare(found[first][0], model, [(stats_checks.data(rank),) for rank in (first, first + 1)])
        assert found[first][0] == found[first + 1][0]
    assert [who[1:] for who in found] == [(1, 1), (0, 0), (1, 1), (0, 0)]


def compare(found, model, batches):
    """Compare records of ranks with those of one process that sees what each of them saw."""
    statistics = hb.collect_stats(model)
    for batch in batches:
        model(*batch).square().mean().backward()
    step = statistics.advance()
    wanted = step.records()
    assert len(wanted) == len(found)
    for one, other in zip(found, wanted, strict=True):
        numbers = {key: value for key, value in other.items() if isinstance(value, float)}
        assert {key: one[key] for key in numbers} == pytest.approx(numbers, rel=1e-12)
        assert {key: one[key] for key in one if key not in numbers} == {k: other[k] for k in other if k not in numbers}
    return step


@pytest.mark.parametrize("wrap", [False, True])
def test_experts_whose_tokens_lie_on_two_ranks(wrap):
    found = ranks.run(2, stats_checks.experts_of_a_rank, wrap)
    records, each = found[0]
    assert found[0] == found[1] and len(records) == 15 and len(each) == 3 * len([r for r in records if "operand" in r])
    whole = compare(records, stats_checks.experts(), [stats_checks.tokens(rank) for rank in range(2)])
    wanted = stats_checks.of_each(whole)
    assert each.keys() == wanted.keys()
    assert all(each[name] == pytest.approx(values, rel=1e-12) for name, values in wanted.items())


def test_ranks_with_other_layers_are_refused():
    assert all("group=None" in message for message in ranks.run(2, stats_checks.of_other_layers))
