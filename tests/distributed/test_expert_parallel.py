"""Experts that ranks share multiply the bytes that one process multiplies; more in tests/scale."""

import expert_parallel_checks as checks
import expert_parallel_models as models
import pytest
import ranks
from expert_parallel_checks import Case

UNEVEN = ((17, 0, 3), (1, 0, 34))


def test_operands_have_the_bytes_of_one_process():
    cases = [Case(name, UNEVEN, padding=2) for name in checks.ALL]
    cases += [Case("nvfp4", UNEVEN, capacity=40), Case("nvfp4", ((0, 0, 0), (0, 5, 0)))]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_tokens_that_travel_as_codes_have_the_bytes_of_one_process_with_that_rule():
    cases = [Case(name, UNEVEN, padding=2, dispatch="nvfp4") for name in checks.TRAVELLING]
    cases += [Case("nvfp4", UNEVEN, capacity=40, dispatch="nvfp4")]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_every_small_shape():
    """All sizes of two groups on two ranks, with codes and without; odd numbers of features."""
    few = (0, 1, 17)
    every = [((a, b), (c, d)) for a in few for b in few for c in few for d in few]
    shapes = ((1, 1), (5, 33), (17, 16))
    cases = [
        Case("nvfp4", sizes, shapes[i % 3], padding=i % 2, dispatch=("plain", "nvfp4")[i // 3 % 2], capacity=(None, 34)[i % 5 == 0])
        for i, sizes in enumerate(every)
    ]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_under_the_style():
    assert ranks.run(2, models.under_the_style) == [[], []]


def test_recomputed_compiled_and_with_room_for_all():
    assert ranks.run(2, models.in_other_ways) == [[], []]


@pytest.mark.parametrize("dispatch", ["plain", "nvfp4"])
def test_tokens_beyond_the_capacity_get_zeros(dispatch):
    found = ranks.run(2, models.beyond_the_capacity, dispatch)
    assert found == [(18, [*range(3, 5), *range(8, 24)]), (28, [*range(3, 31)])]


def test_codes_take_at_most_0_29_of_the_bytes_of_bf16():
    plain, codes = (ranks.run(2, models.traffic, dispatch, 256)[0] for dispatch in ("plain", "nvfp4"))
    way, sent, back = "all_to_all_single", 96 * 256 * 2, 80 * 256 * 2
    sizes = {("forward", way, "int64"): 4 * 8}  # of the groups, of every expert
    gradients = {("backward", way, "bfloat16"): sent + back}
    assert plain == sizes | {("forward", way, "bfloat16"): sent + back} | gradients
    as_codes = 96 * (128 + 16 + 4)
    assert as_codes <= 0.29 * sent
    assert codes == sizes | {("forward", way, "uint8"): as_codes, ("forward", way, "bfloat16"): back} | gradients


@pytest.mark.parametrize("dispatch", ["plain", "nvfp4"])
def test_the_host_asks_for_counts_once_and_not_where_a_capacity_is_given(dispatch):
    assert ranks.run(2, models.waits, dispatch, None) == [1, 1]
    assert ranks.run(2, models.waits, dispatch, 40) == [0, 0]
