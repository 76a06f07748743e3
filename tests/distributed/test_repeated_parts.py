"""Layers that ranks share are repeated from a record, like any other: with what ranks tell each other in between."""

import pytest
import ranks
import repeated_parts_checks as checks
import torch
from tensor_parallel_checks import Case

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is chosen where there is no GPU", allow_module_level=True)


WHOLE_BLOCKS, CUT_BLOCKS = (32, 32, 32), (40, 24, 48)


def test_a_layers_second_call_repeats_the_first():
    cases = [Case("nvfp4", style, WHOLE_BLOCKS) for style in checks.PLACES]
    cases += [Case("nvfp4", "colwise", CUT_BLOCKS), Case("rl", "rowwise", CUT_BLOCKS)]
    assert ranks.run(2, checks.layers, cases, seconds=240)[0] == []


def test_so_do_experts():
    assert ranks.run(2, checks.experts, "nvfp4", seconds=240)[0] == []


def test_what_other_ranks_wait_for_is_done_though_nobody_reads_it():
    assert [problem for one in ranks.run(2, checks.pruned) for problem in one] == []
