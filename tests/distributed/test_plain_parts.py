"""Layers that are handed plain parts, as spmd_types has them, multiply the bytes that one process multiplies."""

import plain_parts_checks as checks
import pytest
import ranks
from tensor_parallel_checks import Case

from halfbyte.distributed.plain_parts import PlainParts

SIZES = ((32, 64, 96), (37, 40, 72), (64, 3, 5))
RECIPES = ("nvfp4", "nvfp4_mxfp8_bwd", "rl", "quartet2", "row_scaled", "mean_split")


@pytest.mark.parametrize("world", [2, 3])
def test_operands_have_the_bytes_of_one_process(world):
    cases = [Case(name, style, size) for name in RECIPES for style in checks.STYLES for size in SIZES]
    cases += [Case("nvfp4", style, (64, 48, 96), sequences=2) for style in checks.STYLES]
    assert ranks.run(world, checks.operands, cases)[0] == []


def test_siblings_find_the_amax_that_they_share_in_one_message():
    (differing, arrived), _ = ranks.run(2, checks.siblings, "nvfp4")
    assert differing == []
    assert arrived["forward", "all_reduce", "float32"] == 4  # one amax of the other rank


def test_other_parameters_pass_and_high_precision_is_that_of_one_process():
    assert ranks.run(2, checks.passes_on) == [[], []]


def test_what_is_no_part_of_a_linear_layer_is_refused():
    with pytest.raises(ValueError, match="dim=2: of a weight .* 0 or 1 is in parts"):
        PlainParts(None, 4, 4, 2)
