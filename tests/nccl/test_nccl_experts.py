"""Over NCCL too, experts that ranks share, whole or by features, multiply the bytes that one process multiplies."""

import expert_parallel_checks as checks
import expert_parallel_models as models
import grouped_parts_checks as parts
import grouped_parts_models as part_models
import test_expert_parallel as small
import test_expert_parallel_shapes as shapes
import test_grouped_parts_shapes as part_shapes
import torch
from expert_parallel_checks import Case
from jobs import asks, job

PARTS = 8
"""Jobs into which the recipes fall: each has kernels of its own to compile."""
WORLDS = (2, 4)


def of_recipes(world: int, dispatch: str, part: int):
    names = (checks.ALL if dispatch == "plain" else checks.TRAVELLING) if world == 2 else small.RECIPES
    cases = [Case(name, shapes.UNEVEN[world], padding=2, dispatch=dispatch) for name in list(names)[part::PARTS]]
    cases = [case for case in cases if dispatch == "plain" or case.recipe in checks.TRAVELLING]
    return job(world, checks.operands, cases, name=f"{dispatch}, part {part}")


@asks(*[of_recipes(world, how, part) for world in WORLDS for how in ("plain", "nvfp4") for part in range(PARTS)])
def test_every_recipe(found):
    assert found[0] == []


@asks(job(2, checks.operands, small.small_shapes()), job(4, checks.operands, shapes.many_shapes(4, "nvfp4")))
def test_every_small_shape(found):
    assert found[0] == []


def in_bf16(world: int) -> list[Case]:
    rooms, ways = (("nvfp4", None), ("rl", 70)), ("plain", "nvfp4")
    sizes = {"sizes": shapes.UNEVEN[world], "shape": (24, 48), "dtype": torch.bfloat16}
    return [Case(name, dispatch=way, capacity=room, **sizes) for name, room in rooms for way in ways]


@asks(*[job(world, checks.operands, in_bf16(world)) for world in WORLDS])
def test_bf16_and_a_capacity(found):
    assert found[0] == []


@asks(job(4, checks.operands_of_two_groups, "nvfp4"))
def test_groups_of_ranks_that_see_other_data(found):
    assert found == [[]] * 4


@asks(*[job(world, models.under_the_style) for world in WORLDS])
def test_under_the_style(found):
    assert found == [[]] * len(found)


@asks(*[job(world, models.in_other_ways, False) for world in WORLDS])
def test_recomputed_and_with_room_for_all(found):
    assert found == [[]] * len(found)


@asks(*[job(2, models.beyond_the_capacity, how, name=how) for how in ("plain", "nvfp4")])
def test_tokens_beyond_the_capacity_get_zeros(found):
    assert found == [(18, [*range(3, 5), *range(8, 24)]), (28, [*range(3, 31)])]


@asks(job(2, models.waits, "nvfp4", None), job(2, models.waits, "nvfp4", 40, name="capacity"))
def test_the_host_asks_for_counts_once_and_not_where_a_capacity_is_given(found, request):
    assert found == ([0, 0] if request.node.name.endswith("capacity]") else [1, 1])


def by_features(world: int, part: int):
    names = list(checks.ALL)[part::PARTS] if world == 2 else small.RECIPES[part::PARTS]
    cases = part_shapes.cases(names, [(128, 128) if part % 2 else (40, 72)])
    return job(world, parts.operands, cases, name=f"part {part}")


@asks(
    *[by_features(world, part) for world in WORLDS for part in range(PARTS) if world == 2 or part < len(small.RECIPES)]
)
def test_every_recipe_by_features(found):
    assert found[0] == []


def by_both() -> list:
    names, shapes_ = ("nvfp4", "quartet2"), part_shapes.SHAPES[:2]
    more = [parts.part(name, "colwise", shapes_[1], part_shapes.UNEVEN, dispatch="nvfp4") for name in names]
    return part_shapes.cases(names, shapes_, part_shapes.UNEVEN) + more


@asks(job(4, parts.operands, by_both()))
def test_other_experts_on_other_ranks(found):
    assert found[0] == []


@asks(*[job(world, part_models.under_the_styles) for world in WORLDS], job(4, part_models.under_both_styles, name="ep"))
def test_a_module_by_features(found):
    assert found == [[]] * len(found)
