"""Experts that ranks share by features multiply the bytes that one process multiplies; more in tests/scale."""

import grouped_parts_checks as checks
import grouped_parts_models as models
import ranks
from grouped_parts_checks import part
from shared_experts import UNEVEN, check_refusals

WHOLE_BLOCKS, CUT_BLOCKS = (64, 96), (40, 72)
RECIPES = ("nvfp4", "rl", "quartet2", "fresh_everywhere", "row_scaled")
REFUSED = {
    "sections of a type": "TypeError: sections=2.0: give an int",
    "sections": "ValueError: sections=0: give 1, or 2 where gate and up are one weight",
    "linear": "TypeError: module=Linear: GroupedColwise is for hb.nn.GroupedLinear",
    "odd sections": "ValueError: .*out_features=64 fall in no sections=3 of one size",
    "few features": "ValueError: .*in_features=1 on 2 ranks would leave some without any; give a mesh of fewer",
    "mesh of two": r"ValueError: mesh=.*one dimension, such as mesh\['tp'\]",
    "shared twice": "ValueError: .*its weight is shared already; apply GroupedRowwise first",
    "fsdp2 first": "ValueError: .*its weight is shared already; apply GroupedColwise first, .* fully_shard",
    "cached": r"ValueError: .*has a cached weight: call release\(\)",
    "cached after": "ValueError: model: its weights are sharded",
    "delayed amaxes": r"ValueError: recipe.amax=.*: experts that ranks share by features quantize with",
    "main_grad": "ValueError: .*its weight has a main_grad",
    "observed": "ValueError: .*ranks share its experts: .*, GroupedColwise and GroupedRowwise have passes of their own",
    "zero": "ValueError: rank 0: model: .* is sharded already",
    "experts over the same ranks": r"ValueError: gate_up_proj: ranks \[0, 1\] share .*mesh\['ep', 'tp'\]",
    "experts that are whole": r"ValueError: gate_up_proj: .*its experts are whole; give mesh\['ep'\]",
    "one layer whole": "ValueError: gate_up_proj: .*its experts are whole; .*apply GroupedColwise",
    "rows of codes": "ValueError: down_proj: it reads tokens as codes.*use GroupedColwise for it, or dispatch='plain'",
    "after experts": "ValueError: .*its weight is shared already; apply GroupedRowwise first",
    "x in parts": r"ValueError: .*x.shape=\(24, 47\), and this rank multiplies features 0 to 48 of 48",
    "x whole": r"ValueError: .*x.shape=\(24, 32\), and this rank multiplies features . to .* of 32",
    "a DTensor": r"ValueError: .*x is a DTensor, .*: hand it what this rank holds, x.to_local\(\)",
    "main_grad later": "ValueError: .*its weight has a main_grad",
    "second derivative": "RuntimeError: .*cannot be differentiated twice",
}


def test_operands_have_the_bytes_of_one_process():
    sizes = (WHOLE_BLOCKS, CUT_BLOCKS)
    cases = [part(name, style, shape) for name in RECIPES for style in checks.STYLES for shape in sizes]
    assert ranks.run(2, checks.operands, cases)[0] == []


def test_operands_where_other_ranks_hold_other_experts_too():
    cases = [part("nvfp4", style, WHOLE_BLOCKS, UNEVEN) for style in checks.STYLES]
    cases += [part("nvfp4", "colwise", CUT_BLOCKS, UNEVEN, dispatch="nvfp4")]
    assert ranks.run(4, checks.operands, cases)[0] == []


def test_under_the_styles():
    assert ranks.run(2, models.under_the_styles) == [[], []]


def test_recomputed_and_loaded():
    assert ranks.run(2, models.in_other_ways, False) == [[], []]


def test_under_both_styles():
    assert ranks.run(4, models.under_both_styles) == [[]] * 4


def test_values_are_those_of_the_source_and_what_is_frozen_stays_so():
    for rank, found in enumerate(ranks.run(2, models.whose_values)):
        of = {"0": [[1.0], [1.0]], "None": [[rank + 1.0], [rank + 1.0]]}
        assert found == {f"{over} of {one}": (of[one], [True, False]) for over in ("tp", "ep") for one in of}


def test_what_is_refused():
    check_refusals(models.refusals, REFUSED)
