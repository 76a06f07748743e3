"""q, k and v that a model runs with `forward_shared`, under torch's own styles."""

import ranks
import together_checks as checks


def test_layers_run_together_have_the_bits_of_one_process():
    assert ranks.run(2, checks.bits)[0] == []


def test_ranks_meet_once_in_a_forward_and_once_in_a_backward():
    assert ranks.run(2, checks.meetings)[0] == [(1, 1), (1, 3)]


def test_what_hooks_change_is_seen():
    assert ranks.run(2, checks.hooks)[0] == []
