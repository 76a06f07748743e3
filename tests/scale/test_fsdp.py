"""A 4-bit gather of FSDP2 and its bf16 gather: losses, gradients, masters and operands have the same bits."""

from functools import cache

import fsdp_cases
import fsdp_checks
import fsdp_matrix
import fsdp_wrapping
import pytest
import ranks

import halfbyte as hb
from halfbyte.plan import PlanRequest, plan

IN_THE_MATRIX = [row.case for row in fsdp_matrix.ROWS]  # test_fsdp_matrix.py runs them
HSDP = [name for name in fsdp_cases.CASES if name.startswith("HSDP")]
APART = [name for name in fsdp_cases.CASES if name.startswith("apart, ")]
UNEVEN = [name for name in APART if "uneven" in name or "empty" in name]
ELSEWHERE = [*HSDP, *UNEVEN[3:]]
ONE_DIMENSION = [n for n, case in fsdp_cases.CASES.items() if n not in ELSEWHERE and case not in IN_THE_MATRIX]
SMALL = [
    "rows, uneven",
    "uneven rows",
    "empty shards",
    "one row",
    "fp32 masters",
    "four over six, uneven",
    "decoder",
    "experts, fp32 masters, more ranks than experts",
]
CASES = {
    1: ["even", "decoder, fp32 masters", *UNEVEN[:3]],
    2: ONE_DIMENSION,
    3: [*SMALL, *UNEVEN],
    4: [*SMALL, *UNEVEN, "accumulated", HSDP[-1]],
}
SIZES = [(37, 40), (83, 37), (3, 83), (1, 3), (48, 1), (16, 48)]


@cache
def found(world: int) -> list[dict]:
    """What every rank found, all cases in one set of processes."""
    return ranks.run(world, fsdp_checks.cases, CASES[world], seconds=300)


@pytest.mark.parametrize("world, name", [(world, name) for world in CASES for name in CASES[world]])
def test_4_bit_gather_is_bf16_gather_and_local_quantization(world, name):
    for rank, all_cases in enumerate(found(world)):
        case = all_cases[name]
        assert case["differs"] == [], f"rank {rank}"
        assert case["finite"] and case["moved"]
        assert case["casts"] == 0, "once after the weights changed, no more and no less"


@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six", "rl"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_arrives_is_the_quantized_weight_and_no_weight_is_quantized_again(world, recipe):
    for rank in ranks.run(world, fsdp_checks.arrived, SIZES, recipe):
        assert all(rank["equal"]) and len(rank["equal"]) == (1 if recipe == "rl" else 4) * len(SIZES)
        in_bf16, as_codes = (rank["quantized"][how] for how in ("in bf16", "as codes"))
        assert all(shape in in_bf16 for shape in rank["shapes"])
        cast = rank["held"] if recipe == "rl" else []  # 1x16 blocks: each rank's rows, once
        assert as_codes and all(as_codes.count(s) == cast.count(s) for s in (*rank["shapes"], *rank["held"]))


@pytest.mark.parametrize("recipe", ["nvfp4_mxfp8_bwd", "naive_fp4"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_a_backward_is_sent_is_the_quantized_transpose(world, recipe):
    for rank in ranks.run(world, fsdp_checks.columns_arrived, SIZES, recipe):
        assert all(rank["equal"]) and len(rank["equal"]) == 3 * len(SIZES)
        assert rank["moved"] or world == 1, "forward's message, then backward's"


@pytest.mark.parametrize("world", [2, 4])
def test_200_steps(world):
    for rank in ranks.run(world, fsdp_checks.long_run, 200, seconds=200):
        assert rank["differs"] == [] and rank["finite"]
        assert rank["losses"][-1] < 0.5 * rank["losses"][0], "it trains"
        assert rank["traffic"]["casts"] == 200


def test_nothing_whole_is_held_between_forward_and_backward_and_a_state_dict_is_plain():
    for rank in ranks.run(2, fsdp_checks.between):
        assert rank["after forward"] == [0] * 8 and rank["sharded"]
        assert rank["gathers"] == 4, "each weight once for forward and once for backward"
        assert rank["keys"] and rank["values"]
        assert rank["types"] == {"DTensor", "Tensor"} and not any(rank["attributes"])


@pytest.mark.parametrize("name", ["apart, checkpointed", "apart, checkpointed around FSDP2's hooks"])
def test_a_backward_that_runs_the_forward_again_asks_for_more_once_and_all_is_freed(name):
    """The first has been sent the operands of a backward alone; then it is known that both are needed."""
    assert ranks.run(2, fsdp_wrapping.left_behind, name) == [[(False, True), (False, False)]] * 2


@pytest.mark.parametrize("layers", [2, 9])
def test_what_a_gather_launches_does_not_depend_on_the_number_of_weights(layers):
    for rank in ranks.run(2, fsdp_checks.launched, layers):
        assert rank["messages"] == layers + 1, "scales of all weights are one"
        assert rank["forward"] == rank["backward"] == ["index_select.out"], "the scales of all weights"
        assert rank["turned after forward"] == (0, 0), "a forward reads one orientation"
        assert rank["turns"] == [layers], "all weights at once"


def test_a_model_compiled_as_a_whole():
    assert ranks.run(2, fsdp_checks.compiled_whole) == [[], []]


@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six", "rl"])
def test_nan_and_inf_arrive_as_they_are_quantized(recipe):
    for rank in ranks.run(3, fsdp_checks.arrived, SIZES, recipe, True):
        assert all(rank["equal"])


def test_a_write_that_leaves_no_trace_is_told_by_mark_changed():
    assert ranks.run(2, fsdp_checks.told, True) == [True, True]
    assert ranks.run(2, fsdp_checks.told, False) == [False, False], "else mark_changed would not be needed"


@pytest.mark.parametrize("world, recipe", [(2, "nvfp4"), (2, "rl@all"), (5, "nvfp4@all"), (5, "nvfp4_mxfp8_bwd@all")])
def test_a_plan_counts_what_travels(world, recipe):
    """Embedding, last norm and head are gathered for the forward alone; no matrix has rows that five ranks divide."""
    request = PlanRequest(model="2m", gpus=world, mesh=f"dp_shard={world}", recipe=recipe, sequence=64)
    planned = {c.phase: c.message for c in plan(request).collectives if c.what == "weights"}
    assert ranks.run(world, fsdp_checks.sent, "2m", recipe) == [(planned["forward"], planned["backward"])] * world


PRESETS = hb.recipes.PRESETS
OPTIONS = {
    'nvfp4_forward(backward="dequantized")': hb.recipes.nvfp4_forward(backward="dequantized"),
    "nvfp4(weight_block=(1, 16))": hb.recipes.nvfp4(weight_block=(1, 16)),
}
CODES = {"nvfp4": ("0.252", "0.252"), "four_over_six": ("0.252", "0.252"), "nvfp4_mxfp8_bwd": ("0.281", "0.516")}
CODES |= dict.fromkeys(("rl", "quartet2", "qat", "naive_fp4", *OPTIONS), ("0.281", "0.281"))
CODES["nvfp4_forward"] = ("0.281", "1.000")
"""The page's table: what a gather of a recipe's weight takes of bf16, forward and backward; 1.000 of all others."""


def test_the_table_of_recipes_is_what_travels():
    page = fsdp_matrix.PAGE.read_text(encoding="utf-8").partition("<!-- recipes")[2].partition("\n\n")[2]
    said = {}
    for line in page.partition("\n\n")[0].splitlines()[2:]:
        names, _, _, forward, backward, exact = (cell.strip() for cell in line.strip("| ").split(" | "))
        assert exact == "yes", "every row is one of test_4_bit_gather…'s or in values"
        said |= {name.strip("`"): (forward, backward) for name in names.split("`, `")}
    assert said == {name: CODES.get(name, ("1.000", "1.000")) for name in (*PRESETS, *OPTIONS)}
    recipes = {**OPTIONS, **{name: preset() for name, preset in PRESETS.items()}}
    for rank in ranks.run(2, fsdp_checks.ratios, recipes):
        assert {name: tuple(f"{ratio:.3f}" for ratio in both) for name, (both, _) in rank.items()} == said
        assert all(counted == expected for _, (counted, expected) in rank.values())


def test_ranks_that_differ_are_told_the_difference():
    first, second = ranks.run(2, fsdp_checks.disagreements)
    assert first == second and len(first) == 5
    shapes, recipes, dtypes, nothing, tokens = first
    assert (
        shapes.startswith("fsdp_gather_nvfp4_: the parameters differ: ['0.weight', '(64, 32) as nvfp4/16x16")
        and "['0.weight', '(48, 32) as nvfp4/16x16" in shapes
    )
    assert "nvfp4/16x16" in recipes and "nvfp4/1x16" in recipes and "on rank 1" in recipes
    assert "of None'] on rank 0" in dtypes and "of torch.bfloat16'] on rank 1" in dtypes
    assert nothing.startswith("rank 1: model: none of its weights can be gathered as NVFP4; none of its layers")
    assert tokens.startswith("shard_embedding_: the parameters differ: ['0.weight'") and "on rank 1" in tokens


def test_pickles_and_copies_of_a_shard_have_nothing_of_the_gather():
    assert ranks.run(2, fsdp_wrapping.taken_along) == [[["own"], ["own"]]] * 2


def test_models_that_are_converted_after_they_were_wrapped_and_blocks_of_one_call():
    for found in ranks.run(2, fsdp_wrapping.wrapped_otherwise):
        assert found == {"converted later": [], "half of it later": [], "blocks of one call": []}


def test_blocks_that_are_longer_than_ranks_have_rows_are_said_to_take_more_than_values():
    """Each of two ranks has room for a block of 33 bytes in each of 64 columns, where it has 8 rows or 64."""
    for said, sizes in ranks.run(2, fsdp_wrapping.shorter_than_a_block, 16):
        assert sizes == (2 * 64 * 33, 16 * 64 * 2)
        assert (
            "0.weight takes 2.1 times the bytes of its values before the backward, as mxfp8/e4m3: its ranks hold"
            in said
        )
    for said, sizes in ranks.run(2, fsdp_wrapping.shorter_than_a_block, 128):
        assert sizes == (2 * 64 * 2 * 33, 128 * 64 * 2) and said == ""


def test_of_several_such_weights_the_one_that_takes_most_is_named():
    """A block of 33 bytes in each of 64 columns for 12 rows, or of 24 columns for 8."""
    for said in ranks.run(2, fsdp_wrapping.two_shorter_than_a_block):
        assert "1.weight takes 2.1 times the bytes of its values before the backward" in said and "0.weight" not in said


def test_what_a_module_further_up_gathers_stays_in_its_values_and_is_named():
    for beside, alone in ranks.run(2, fsdp_wrapping.without_its_group):
        assert beside.startswith(
            "['1.0.weight', '1.2.weight']: fsdp_gather_nvfp4_: gathered in their values: 1.0.weight: "
        )
        assert "no module that fully_shard wrapped gathers it here; give fsdp_gather_nvfp4_ the one that does" in beside
        assert "fully_shard has wrapped nothing of it" in alone
