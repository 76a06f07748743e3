"""Every operand of layers that 2 and 4 ranks share has the bytes of one process: recipes, shapes, any borders."""

import pytest
import ranks
import tensor_parallel_checks as checks
import tensor_parallel_models as models
import torch
from tensor_parallel_checks import Case

SIZES = [(64, 128, 64), (37, 40, 72), (33, 100, 19), (5, 3, 2), (130, 17, 48)]
MANY = [(m, n, k) for m in (1, 16, 34, 64) for n in (1, 31, 48, 80) for k in (4, 33, 96, 160)]


def cases(names, sizes, dtype=torch.float32):
    every = [Case(name, style, size, dtype) for name in names for style in checks.STYLES for size in sizes]
    return [case for case in every if case.style != "tokens" or not checks.ALL[case.recipe].splits_mean]  # refused


@pytest.mark.parametrize("world", [2, 4])
def test_every_recipe(world):
    names = list(checks.ALL)[::2] if world == 2 else list(checks.ALL)[1::2]
    assert ranks.run(world, checks.operands, cases(names, SIZES[1:2]), seconds=280)[0] == []


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_recipe_in_every_shape(world):
    assert ranks.run(world, checks.operands, cases(checks.ALL, SIZES), seconds=900)[0] == []


def test_bf16():
    assert ranks.run(2, checks.operands, cases(("nvfp4", "rl", "bf16"), SIZES[:2], torch.bfloat16))[0] == []


def test_a_llama_block_under_torchs_own_plan():
    every = [("nvfp4_mxfp8_bwd", torch.float32), ("quartet2", torch.float32)]
    every += [(name, torch.bfloat16) for name in ("four_over_six", "rl", "bf16")]
    assert ranks.run(4, models.each, models.block_operands, every)[0] == []


def travelling(world: int, sequences: int) -> list[Case]:
    """Return cases whose activations travel as codes, or would if blocks fitted."""
    names = ("nvfp4", "nvfp4_mxfp8_bwd", "rl", "rl_mxfp8", "quartet2", "row_scaled", "requantized", "saved_sr")
    sizes = [(128 * world * sequences, 40, 33), (3 * world * sequences, 64, 96)]
    of_sizes = [(name, style, size) for name in names for style in checks.TRAVELLING for size in sizes]
    return [Case(*one, sequences=sequences) for one in of_sizes]


@pytest.mark.parametrize("world, sequences", [(2, 3), pytest.param(4, 2, marks=pytest.mark.full)])
def test_operands_that_travel_as_codes(world, sequences):
    """Random places of several sequences; parts that blocks do not fit travel in their values."""
    assert ranks.run(world, checks.operands, travelling(world, sequences), seconds=280)[0] == []


def test_a_llama_block_whose_activations_travel_as_codes():
    every = [(name, torch.float32, 2) for name in ("nvfp4_mxfp8_bwd", "quartet2", "row_scaled")]
    assert ranks.run(4, models.each, models.codes_operands, every)[0] == []


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "rl", "quartet2", "row_scaled"])
def test_many_shapes(world, name):
    assert ranks.run(world, checks.operands, cases((name,), MANY), seconds=900)[0] == []


@pytest.mark.full
@pytest.mark.parametrize("codes", [False, True])
def test_a_compiled_block_has_the_bits_of_the_eager_one(codes):
    assert ranks.run(2, models.compiled_block, codes) == [[], []]


def test_operands_under_autocast_and_over_weights_that_fsdp2_shards():
    assert ranks.run(2, checks.operands_under_autocast, cases(("nvfp4",), SIZES[:2]))[0] == []
    assert ranks.run(4, models.block_operands, "nvfp4", torch.float32, 2)[0] == []


def test_a_recomputed_block_has_the_bits_of_the_kept_one():
    assert ranks.run(2, models.recomputed_block) == [[], []]


def test_a_fused_mlp_under_torchs_styles():
    assert ranks.run(2, models.fused_mlp) == [[], []]
