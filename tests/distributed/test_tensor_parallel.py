"""Layers that ranks share multiply the bytes that one process multiplies; more in tests/scale."""

import ranks
import tensor_parallel_checks as checks
import tensor_parallel_models as models
import torch
from tensor_parallel_checks import Case

WHOLE_BLOCKS, CUT_BLOCKS = (32, 64, 96), (37, 40, 72)
RECIPES = ("nvfp4", "nvfp4_mxfp8_bwd", "rl", "quartet2", "row_scaled")


def test_operands_have_the_bytes_of_one_process():
    sizes = (WHOLE_BLOCKS, CUT_BLOCKS)
    cases = [Case(name, style, size) for name in RECIPES for style in checks.STYLES for size in sizes]
    cases += [Case("rl_tiles", "colwise", CUT_BLOCKS), Case("four_over_six", "rowwise", (5, 3, 33))]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_a_llama_block_under_torchs_own_plan():
    assert ranks.run(2, models.block_operands, "nvfp4", torch.float32)[0] == []
