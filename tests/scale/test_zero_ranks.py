"""ZeroOptimizer on more ranks and for more steps than tests/distributed has time for."""

import pytest
import ranks
import zero_checks
import zero_expert_checks


def test_500_steps_have_the_same_losses():
    ranks.run(2, zero_checks.same_losses, 500, zero_checks.LEAN, {"blocks": 0}, seconds=600)


def test_four_ranks():
    ranks.run(4, zero_checks.four_ranks)


@pytest.mark.parametrize("world", [3, 4])
def test_experts_in_codes_train_as_in_bf16(world):
    zero_expert_checks.train_alike(world)
