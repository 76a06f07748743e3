"""Experts that ranks share multiply the bytes that one process multiplies; more in tests/scale."""

import expert_parallel_checks as checks
import expert_parallel_models as models
import pytest
import ranks
from expert_parallel_checks import Case
from shared_experts import UNEVEN, check_refusals

RECIPES = ("bf16", "nvfp4", "nvfp4_mxfp8_bwd", "rl", "quartet2", "fresh_everywhere", "dequantized")
SEVERAL = ((3, 17, 0, 5), (40, 4, 1, 2))
"""Sizes of groups of which a rank has several with tokens."""
REFUSED = {
    "no experts": "ValueError: module=Linear: it has no hb.nn.GroupedLinear",
    "weights of another": "TypeError: 0=GroupedRecipe: its weights belong to another module",
    "mesh of two": r"ValueError: mesh=.*one dimension, such as mesh\['ep'\]",
    "few experts": "ValueError: mesh: 2 ranks cannot share 1 experts",
    "other numbers": "ValueError: 1.gate_up_proj has 2 experts, another layer 4",
    "dispatch": "ValueError: dispatch='fp8': give 'plain' or 'nvfp4'",
    "capacity": "ValueError: capacity=0: give at least one token",
    "type of capacity": "TypeError: capacity=1.5: give an int",
    "reduce": "ValueError: reduce='avg': give 'sum' or 'mean'",
    "other dispatch": r"shard_experts_: .* differ: \['dispatch', 'plain'\] on rank 0, \['dispatch', 'nvfp4'\] on",
    "other capacity": r"ValueError: .* differ: \['capacity', 'None'\] on rank 0, \['capacity', '8'\] on rank 1",
    "other reduce": r"ValueError: .* differ: \['reduce', 'sum'\] on rank 0, \['reduce', 'mean'\] on rank 1",
    "other recipe": r"ValueError: .* differ: \['down_proj', '.*nvfp4'\] on rank 0, \['down_proj', '.*four_over_six'\]",
    "nobody reads": "ValueError: dispatch='nvfp4': name the layers that read the tokens",
    "reader": "ValueError: readers: 'up_proj' is no hb.nn.GroupedLinear",
    "strange bias": "ValueError: down_proj: its bias is a StrangeBias; ranks share plain biases",
    "mxfp8": "ValueError: gate_up_proj: fprop.a=MXFP8.*use dispatch='plain'",
    "weight only": "ValueError: gate_up_proj: fprop.a=None.*use dispatch='plain'",
    "shared twice": "ValueError: gate_up_proj: its weight is shared already",
    "fsdp2 first": "ValueError: gate_up_proj: its weight is shared already.*then apply fully_shard",
    "tensor parallel": "ValueError: down_proj: its weight is shared already",
    "tensor parallel after": "TypeError: module=GroupedLinear: the style is for hb.nn.Linear",
    "cached": r"ValueError: gate_up_proj has a cached weight: call release\(\)",
    "cached after": "ValueError: model: its weights are sharded",
    "main_grad": "ValueError: down_proj: its weight has a main_grad",
    "tied": "ValueError: 0.down_proj.weight and 1.down_proj.weight are one parameter, .* give each its own",
    "tied to another": "ValueError: 0.down_proj.weight and 1.kept are one parameter, .* give each its own",
    "integers": "TypeError: x.dtype=torch.int64: tokens travel in bf16, fp16 or fp32; cast them",
    "two names": "nothing",
    "zero": "ValueError: rank 0: model: .* is sharded already",
    "offsets": r"ValueError: x.shape=\(.*offsets.shape=\(2,\).*all 4 experts",
    "one argument": "TypeError: offsets is missing: .* ends of the groups of all experts as 'x' and 'offsets'",
    "another name": "TypeError: offsets is missing: .* as 'x' and 'offsets'",
    "not what arrived": "ValueError: .*x is not what arrived as codes",
    "a copy": "ValueError: .*x is not what arrived as codes; hand it send.* unchanged, or use dispatch='plain'",
    "other strides": "ValueError: .*x is not what arrived as codes",
    "another layer": "nothing",
    "other rows": r"ValueError: y.shape=\(.*tokens arrived; give a row for each",
    "changed in place": "ValueError: .*x is not what arrived as codes",
    "on its way back": "ValueError: .*x is not what arrived as codes",
    "mxfp8 later": "ValueError: fprop.a=MXFP8.*tokens cannot travel so",
    "two recipes": "ValueError: .* read nvfp4/.* and nvfp4/.*need one recipe",
    "ends behind the tokens": "ValueError: offsets: they end at .* give the cumulative ends of the groups",
    "main_grad later": "ValueError: .*its weight has a main_grad",
    "second derivative": "RuntimeError: .*cannot be differentiated twice",
}


def test_operands_have_the_bytes_of_one_process():
    cases = [Case(name, UNEVEN, padding=2) for name in RECIPES]
    cases += [Case("nvfp4", UNEVEN, capacity=40), Case("nvfp4", ((0, 0, 0), (0, 5, 0)))]
    cases += [Case("nvfp4", SEVERAL), Case("nvfp4", SEVERAL, capacity=60)]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_tokens_that_travel_as_codes_have_the_bytes_of_one_process_with_that_rule():
    cases = [Case(name, UNEVEN, padding=2, dispatch="nvfp4") for name in RECIPES if name in checks.TRAVELLING]
    cases += [Case("nvfp4", UNEVEN, capacity=40, dispatch="nvfp4"), Case("nvfp4", SEVERAL, dispatch="nvfp4")]
    assert ranks.run(2, checks.operands, cases)[0] == []


def small_shapes() -> list[Case]:
    """Return all sizes of two groups on two ranks, with codes and without; odd numbers of features."""
    few = (0, 1, 17)
    every = [((a, b), (c, d)) for a in few for b in few for c in few for d in few]
    shapes = ((1, 1), (5, 33), (17, 16))
    return [
        Case(
            "nvfp4",
            sizes,
            shapes[i % 3],
            padding=i % 2,
            dispatch=("plain", "nvfp4")[i // 3 % 2],
            capacity=(None, 34)[i % 5 == 0],
        )
        for i, sizes in enumerate(every)
    ]


def test_every_small_shape():
    assert ranks.run(2, checks.operands, small_shapes())[0] == []


def test_under_the_style():
    assert ranks.run(2, models.under_the_style) == [[], []]


def test_tokens_that_are_handed_by_name():
    assert ranks.run(2, models.called_by_name) == [[], []]


def test_nobody_reads_offsets_that_have_no_values():
    assert all(got == tokens for got, tokens in ranks.run(2, models.without_values))


def test_recomputed_and_with_room_for_all():
    assert ranks.run(2, models.in_other_ways, False) == [[], []]


def test_what_is_refused():
    check_refusals(models.refusals, REFUSED)


def test_offsets_that_one_rank_has_wrong_raise_on_every_rank():
    other, own = ranks.run(2, models.wrong_on_one, seconds=60)
    assert len(other) == 10 and {text.partition(" of those")[0] for text in other} == {"ValueError: rank 1"}
    starts = ("ValueError: offsets: group", "ValueError: offsets: they end at", "ValueError: x.shape=", "TypeError")
    assert all(text.startswith(start) for text, start in zip(own, (*starts, "TypeError") * 2, strict=True)), own


def test_other_tokens_or_arguments_on_one_rank_raise_on_every_rank():
    other, own = ranks.run(2, models.other_tokens_on_one, seconds=60)
    assert len(other) == len(own) == 12 and other[6:] == other[:6] and own[6:] == own[:6]
    dtype, single, width, plain, x, ends = own[:6]
    assert dtype.startswith("TypeError: x.dtype=torch.float64") and plain.startswith("TypeError: x=list: give tokens")
    assert single.startswith("ValueError: x: ") and width.startswith("ValueError: x: ")
    assert (x.split()[1], ends.split()[1]) == ("x", "offsets") and x.startswith("TypeError") and "missing" in ends
    refused = "ValueError: rank 1 of those that share the experts has no tokens"
    assert [text.startswith(refused) for text in other[:6]] == [True, False, False, True, True, True]
    assert "rank 1 torch.bfloat16 with" in other[1] and "rank 1 torch.float32 with" in other[2]


@pytest.mark.parametrize("dispatch", ["plain", "nvfp4"])
def test_tokens_beyond_the_capacity_get_zeros(dispatch):
    found = ranks.run(2, models.beyond_the_capacity, dispatch)
    assert found == [(18, [*range(3, 5), *range(8, 24)]), (28, [*range(3, 31)])]


def test_codes_take_at_most_0_29_of_the_bytes_of_bf16():
    plain, codes = (ranks.run(2, models.traffic, dispatch, 256)[0] for dispatch in ("plain", "nvfp4"))
    way, sent, back = "all_to_all_single", 96 * 256 * 2, 80 * 256 * 2
    sizes = {("forward", way, "int64"): (4 + 2) * 8}  # of the groups, of every expert, and what each rank's tokens are
    gradients = {("backward", way, "bfloat16"): sent + back}
    assert plain == sizes | {("forward", way, "bfloat16"): sent + back} | gradients
    as_codes = 96 * (128 + 16 + 4)
    assert as_codes <= 0.29 * sent
    assert codes == sizes | {("forward", way, "uint8"): as_codes, ("forward", way, "bfloat16"): back} | gradients


@pytest.mark.parametrize("dispatch", ["plain", "nvfp4"])
def test_the_host_asks_for_counts_once_and_not_where_a_capacity_is_given(dispatch):
    assert ranks.run(2, models.waits, dispatch, None) == [1, 1]
    assert ranks.run(2, models.waits, dispatch, 40) == [0, 0]


def test_ranks_that_see_other_data_and_experts_of_other_ranks():
    """2 x 2 ranks as `place_ranks_` places them: a group of experts draws with its first rank."""
    assert ranks.run(4, checks.operands_of_two_groups, "nvfp4") == [[]] * 4
    assert all("ranks that share experts are neighbours" in text for text in ranks.run(4, models.unlike_neighbours))


def test_neighbours_that_do_not_begin_at_a_multiple_of_their_number_are_refused():
    """A rank draws as the first of its group, which it finds by dividing."""
    alone, *others = ranks.run(3, models.behind_a_rank_of_their_own)
    assert alone == "" and all("ranks that share experts are neighbours" in text for text in others)
