"""Every operand of experts that 2 and 4 ranks share has the bytes of one process: recipes, sizes of groups, shapes."""

import expert_parallel_checks as checks
import expert_parallel_models as models
import pytest
import ranks
import torch
from expert_parallel_checks import Case

UNEVEN = {
    2: ((17, 0, 3), (1, 0, 34)),
    4: ((17, 0, 3, 1, 0, 2, 0), (1, 0, 34, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0), (5, 16, 0, 32, 1, 0, 7)),
}
SHAPES = [(24, 40), (1, 1), (17, 33), (64, 128)]


def drawn(world: int, count: int, seed: int) -> list[tuple]:
    """Return sizes of groups: none, one and many tokens, of as many experts as ranks or more."""
    generator, found = torch.Generator().manual_seed(seed), []
    for i in range(count):
        experts = world + i % 4
        if -(-experts // world) * (world - 1) >= experts:  # the last rank would have none
            experts = world
        picks = torch.randint(5, (world, experts), generator=generator)
        found.append(tuple(tuple((0, 1, 16, 33, 5)[i] for i in of_rank) for of_rank in picks.tolist()))
    return found


def many_shapes(world: int, name: str) -> list[Case]:
    """Return cases of drawn sizes in every way that tokens travel."""
    cases = []
    for i, sizes in enumerate(drawn(world, 60, seed=world)):
        dispatch, room = ("plain", "nvfp4")[i % 2], (None, 33 * len(sizes[0]))[i % 3 == 0]
        cases.append(Case(name, sizes, SHAPES[i % 4], padding=i % 3, dispatch=dispatch, capacity=room))
    return cases


@pytest.mark.parametrize("dispatch", ["plain", "nvfp4"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_recipe(world, dispatch):
    names = checks.ALL if dispatch == "plain" else checks.TRAVELLING
    cases = [Case(name, UNEVEN[world], padding=2, dispatch=dispatch) for name in names]
    assert ranks.run(world, checks.operands, cases, seconds=280)[0] == []


def test_bf16_on_four_ranks():
    cases = [
        Case(name, UNEVEN[4], (24, 48), dtype=torch.bfloat16, dispatch=dispatch, capacity=capacity)
        for name, capacity in (("nvfp4", None), ("rl", 70))
        for dispatch in ("plain", "nvfp4")
    ]
    assert ranks.run(4, checks.operands, cases)[0] == []


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "rl", "quartet2", "row_scaled"])
def test_many_shapes(world, name):
    assert ranks.run(world, checks.operands, many_shapes(world, name), seconds=900)[0] == []


@pytest.mark.full
def test_a_compiled_module_has_the_bits_of_the_eager_one():
    assert ranks.run(2, models.in_other_ways, True) == [[], []]
