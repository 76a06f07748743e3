"""Layers that ranks share quantize x and dy with the amax of the whole of an earlier step; more in tests/scale."""

import delayed_expert_checks as experts
import delayed_parts_checks as checks
import numpy as np
import ranks
from delayed_parts_checks import Case

WHOLE_BLOCKS, CUT_BLOCKS = (32, 64, 96), (19, 24, 40)


def test_operands_and_states_are_those_of_one_process():
    cases = [Case("every2", style, CUT_BLOCKS) for style in ("colwise", "rowwise", "tokens")]
    cases += [Case("every1", style, WHOLE_BLOCKS) for style in ("rowwise", "x in codes", "dy in codes")]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_experts_that_ranks_share_have_the_bytes_and_the_state_of_one_process():
    assert ranks.run(2, experts.operands)[0] == []


def test_what_calls_note_of_layers_that_ranks_share():
    """The greatest x is the last rank's."""
    found, other = ranks.run(2, checks.noted)
    assert found == other
    assert found["plain"][0] == float(np.float32(70.1)) and found["autocast"][0] == 70.0
    assert all(found["plain"]) and all(found["autocast"])
    assert not any(found["without gradients"]) and not any(found["eval"])
    assert [bool(one) for one in found["frozen"]] == [True, False, True, False]
    assert "begin_step was never called" in found["unbegun"][0]
