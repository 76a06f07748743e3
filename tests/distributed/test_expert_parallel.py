"""Experts that ranks share multiply the bytes that one process multiplies; more in tests/scale."""

import expert_parallel_checks as checks
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
