"""Over NCCL too, layers that ranks share multiply the bytes that one process multiplies, in every recipe and style."""

import tensor_parallel_checks as checks
import tensor_parallel_models as models
import test_tensor_parallel_shapes as shapes
import torch
from jobs import asks, job

WHOLE_BLOCKS, CUT_BLOCKS = (128, 128, 128), (37, 40, 72)
PARTS = 12
"""Jobs into which the recipes fall: each has kernels of its own to compile."""
SMALL = [(m, n, k) for m in (1, 16, 34) for n in (1, 31, 48) for k in (4, 33, 96)]


def recipes(part: int) -> list[str]:
    return list(checks.ALL)[part::PARTS]


def of_recipes(world: int, part: int):
    sizes = (WHOLE_BLOCKS, CUT_BLOCKS) if (part + world // 2) % 2 else (WHOLE_BLOCKS,)
    return job(world, checks.operands, shapes.cases(recipes(part), sizes), name=f"part {part}")


@asks(*[of_recipes(world, part) for world in (2, 4) for part in range(PARTS)])
def test_every_recipe(found):
    assert found[0] == []


@asks(*[job(world, checks.operands, shapes.cases(("nvfp4",), SMALL)) for world in (2, 4)])
def test_every_small_shape(found):
    assert found[0] == []


@asks(*[job(world, checks.operands, shapes.travelling(world, n)) for world, n in ((2, 3), (4, 2))])
def test_operands_that_travel_as_codes(found):
    assert found[0] == []


@asks(
    *[job(n, checks.operands, shapes.cases(("nvfp4", "rl", "bf16"), (WHOLE_BLOCKS,), torch.bfloat16)) for n in (2, 4)]
)
def test_bf16(found):
    assert found[0] == []


@asks(*[job(n, checks.operands_under_autocast, shapes.cases(("nvfp4",), (WHOLE_BLOCKS, CUT_BLOCKS))) for n in (2, 4)])
def test_under_autocast(found):
    assert found[0] == []


BLOCKS = [("nvfp4", torch.bfloat16), ("nvfp4_mxfp8_bwd", torch.float32), ("quartet2", torch.float32)]
BLOCKS += [("rl", torch.bfloat16), ("bf16", torch.bfloat16)]
TRAVELLING = [("nvfp4", torch.bfloat16, 1), ("quartet2", torch.float32, 2), ("row_scaled", torch.float32, 2)]


@asks(*[job(world, models.each, models.block_operands, BLOCKS) for world in (2, 4)])
def test_a_llama_block_under_torchs_own_plan(found):
    assert found[0] == []


@asks(*[job(world, models.each, models.codes_operands, TRAVELLING) for world in (2, 4)])
def test_a_llama_block_whose_activations_travel_as_codes(found):
    assert found[0] == []


@asks(job(4, models.block_operands, "nvfp4", torch.float32, 2))
def test_over_weights_that_fsdp2_shards(found):
    assert found[0] == []


@asks(*[job(world, models.recomputed_block) for world in (2, 4)])
def test_a_recomputed_block_has_the_bits_of_the_kept_one(found):
    assert found == [[]] * len(found)


@asks(*[job(world, models.fused_mlp) for world in (2, 4)])
def test_a_fused_mlp_under_torchs_styles(found):
    assert found == [[]] * len(found)
