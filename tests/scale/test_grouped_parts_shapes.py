"""Every operand of experts that ranks share by features has the bytes of one process: recipes, shapes, any borders."""

import grouped_parts_checks as checks
import grouped_parts_models as models
import pytest
import ranks
import torch
from expert_parallel_checks import ALL, TRAVELLING
from grouped_parts_checks import part

SHAPES = [(64, 96), (40, 72), (33, 19), (130, 48)]
SIZES = ((17, 0, 3),)
UNEVEN = ((17, 0, 3, 1), (1, 0, 34, 0))


def cases(names, shapes, sizes=SIZES, **more):
    return [part(name, style, shape, sizes, **more) for name in names for style in checks.STYLES for shape in shapes]


def test_every_recipe():
    """Each in one style, neighbours in the other one, in parts that cut blocks."""
    every = [part(name, list(checks.STYLES)[i % 2], SHAPES[1], SIZES) for i, name in enumerate(ALL)]
    assert ranks.run(2, checks.operands, every, seconds=280)[0] == []


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_recipe_in_every_shape(world):
    assert ranks.run(world, checks.operands, cases(ALL, SHAPES), seconds=900)[0] == []


@pytest.mark.full
def test_every_recipe_with_other_experts_on_other_ranks():
    every = cases(ALL, SHAPES[:2], UNEVEN)
    every += [part(name, "colwise", SHAPES[1], UNEVEN, dispatch="nvfp4") for name in TRAVELLING]
    assert ranks.run(4, checks.operands, every, seconds=900)[0] == []


def test_groups_without_tokens_and_bf16():
    every = []
    for sizes in (((0, 0, 0),), ((0, 40, 0),), ((1, 1, 1),)):
        every += cases(("nvfp4",), SHAPES[:1], sizes) + cases(("quartet2",), SHAPES[:1], sizes, dtype=torch.bfloat16)
    assert ranks.run(2, checks.operands, every)[0] == []


def test_under_the_styles_on_three_ranks():
    """The second holds gate's last rows and up's first ones: what it sends goes to higher ranks, then to lower ones."""
    assert ranks.run(3, models.under_the_styles) == [[]] * 3


@pytest.mark.full
def test_a_compiled_module_has_the_bits_of_the_eager_one():
    assert ranks.run(2, models.in_other_ways, True) == [[], []]
