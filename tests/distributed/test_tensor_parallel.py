"""Layers that ranks share multiply the bytes that one process multiplies; more in tests/scale."""

import ranks
import tensor_parallel_checks as checks
import tensor_parallel_models as models
import torch
from shared_experts import check_refusals
from tensor_parallel_checks import Case

WHOLE_BLOCKS, CUT_BLOCKS = (32, 64, 96), (37, 40, 72)
RECIPES = ("nvfp4", "nvfp4_mxfp8_bwd", "rl", "quartet2", "row_scaled")
REFUSED = {
    "a name twice": r"ValueError: names=\('q_proj', 'q_proj'\): 'q_proj' stands there twice; name every layer once",
    "a layer twice": "ValueError: q_proj and k_proj are one layer; name it once",
    "tied": "ValueError: q_proj.weight and k_proj.weight are one parameter, .* give each its own",
    "tied to another": "ValueError: q_proj.weight and v_proj.weight are one parameter, .* give each its own",
    "nothing": "TypeError: up_proj=NoneType: the style is for hb.nn.Linear",
    "nothing twice": "TypeError: up_proj=NoneType: the style is for hb.nn.Linear",
    "mesh of two": r"ValueError: mesh=.*: give a mesh of one dimension, such as mesh\['tp'\]",
    "fused": "ValueError: .* shares its input in a fused module: parallelize before hb.nn.fuse_, not after",
    "cached": r"ValueError: .* has a cached weight: call release\(\) on the cache first",
    "main_grad": "ValueError: .*: its weight has a main_grad, which parts on several ranks do not add to",
    "two styles": "ValueError: .*: its weight is shared already; give each layer one style",
    "other recipe": r"ValueError: .* differ: \['.*', '.*nvfp4'\] on rank 0, \['.*', '.*mxfp8'\] on rank 1",
}


def test_operands_have_the_bytes_of_one_process():
    sizes = (WHOLE_BLOCKS, CUT_BLOCKS)
    cases = [Case(name, style, size) for name in RECIPES for style in checks.STYLES for size in sizes]
    cases += [Case("rl_tiles", "colwise", CUT_BLOCKS), Case("four_over_six", "rowwise", (5, 3, 33))]
    cases += [Case(name, style, (64, 48, 33), sequences=2) for name in ("nvfp4", "rl") for style in checks.TRAVELLING]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_a_llama_block_under_torchs_own_plan():
    assert ranks.run(2, models.block_operands, "nvfp4", torch.float32)[0] == []


def test_a_llama_block_whose_activations_travel_as_codes():
    assert ranks.run(2, models.codes_operands, "nvfp4", torch.bfloat16, 1)[0] == []


def test_what_is_refused():
    check_refusals(models.refusals, REFUSED)


def test_operands_that_travel_as_codes_take_at_most_0_29_of_the_bytes_of_bf16():
    gathered = 2 * 128 * 256 * 2  # for q/k/v and for gate/up 128 tokens of the other rank, 256 wide, in bf16
    plain, codes = (ranks.run(2, models.traffic, "row_scaled", as_codes, 256)[0] for as_codes in (False, True))
    for stage, times in (("forward", 1), ("backward", 3)):
        assert plain[stage, "reduce_scatter_tensor", "bfloat16"] == codes[stage, "reduce_scatter_tensor", "bfloat16"]
        assert plain[stage, "all_gather_into_tensor", "bfloat16"] == gathered
        assert (stage, "all_gather_into_tensor", "bfloat16") not in codes
        assert codes[stage, "all_gather_into_tensor", "uint8"] <= 0.29 * times * gathered
        assert codes[stage, "all_reduce", "float32"] < 0.1 * gathered


def test_siblings_learn_the_amax_that_they_share_in_one_message():
    found = ranks.run(2, models.traffic, "nvfp4", False, 256)[0]
    siblings = 2  # q, k, v and gate, up, which torch's styles call one by one: the first asks for its group's
    others = 2 * (2 + 1)  # o and down: rows and rotated columns of x, one amax of the tiles of w
    assert found["forward", "all_reduce", "float32"] == 4 * (siblings + others)


def test_values_are_those_of_the_rank_that_is_named_or_each_ranks_own():
    for found in ranks.run(2, models.values_of):
        assert len(found) == 6 and all(found.values()), found


def test_tokens_that_are_whole_on_every_rank_are_multiplied_as_those_in_parts():
    assert ranks.run(2, models.whole_tokens) == [[], []]
