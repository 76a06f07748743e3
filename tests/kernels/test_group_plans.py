"""Plans of groups: one launch of a pass says where tiles of both sizes lie, and its products ask for no other."""

from __future__ import annotations

import pytest
import torch
from repeating import check_repeats, kernels

import halfbyte as hb
from halfbyte.kernels import prepared
from halfbyte.kernels.groups import PRODUCT_ROWS, keep_plan, most_tiles, plan_groups, plan_of_products, tiles_of_pass
from halfbyte.kernels.launch import Launch
from halfbyte.layout import GroupEnds

__all__ = ["kernels"]
CPU = torch.device("cpu")
ENDS = {
    "uneven": ([70, 70, 300, 900], 1000),
    "all in one": ([0, 0, 0, 640], 640),
    "many tiles": ([5000, 9000, 9001, 9100], 20_000),
    "no tokens": ([0, 0, 0, 0], 0),
}


def by_hand(ends, total, rows):
    """Return the table and the group of every tile."""
    starts, first, table, of_tile = [0, *ends], 0, [], []
    for i, (start, end) in enumerate(zip(starts, [*ends, total], strict=True)):
        table.append([start, end, first])
        count = -(-(end - start) // rows) if i < len(ends) else most_tiles(len(ends), total, rows) - first
        of_tile += [i] * count
        first += count
    return table, of_tile


@pytest.mark.parametrize("name", ENDS)
def test_both_plans_of_one_launch(name):
    ends, total = ENDS[name]
    plan = plan_groups(torch.tensor(ends, dtype=torch.int32), 4, total, (64, PRODUCT_ROWS), CPU)
    (other,) = plan.others
    assert (plan.tile_rows, other.tile_rows) == (64, PRODUCT_ROWS)
    for one in (plan, other):
        table, of_tile = by_hand(ends, total, one.tile_rows)
        assert one.table.tolist() == table and one.tile_group.tolist() == of_tile


def test_what_a_pass_has_planned_is_found():
    offsets = torch.tensor([70, 300], dtype=torch.int32)
    ends = GroupEnds(offsets)
    assert tiles_of_pass(offsets, 64) == 64 == tiles_of_pass(None, 64) and tiles_of_pass(ends, 128) == 128
    plan = keep_plan(ends, plan_groups(offsets, 2, 400, tiles_of_pass(ends, 64), CPU))
    assert plan_of_products(ends, 2, 400, 64, CPU) is plan
    assert plan_of_products(ends, 2, 400, PRODUCT_ROWS, CPU) is plan.others[0]
    assert plan_of_products(ends, 2, 400, 32, CPU) is plan_of_products(ends, 2, 400, 32, CPU)
    assert plan_of_products(offsets, 2, 400, 32, CPU) is not plan_of_products(offsets, 2, 400, 32, CPU)
    with pytest.raises(AssertionError, match="as many tokens"):
        plan_of_products(ends, 2, 4000, 64, CPU)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd"])
def test_a_pass_of_experts_plans_its_groups_once(recipe):
    """With the same bits as where each kernel plans for itself."""
    layer = hb.nn.GroupedLinear(3, 64, 48, dtype=torch.bfloat16, recipe=recipe, state=hb.RunState(0))

    def call(i):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(200, 64, generator=generator).bfloat16().requires_grad_()
        offsets = torch.tensor([[10, 10, 40], [0, 130, 190], [200, 200, 200]][i % 3], dtype=torch.int32)
        layer.weight.grad = None
        y = layer(x, offsets)
        y.backward(torch.randn(200, 48, generator=generator).bfloat16())
        return y, x.grad, layer.weight.grad

    check_repeats(call)
    for record in prepared._RECORDS.values():
        launches = [step._launched for step in record.steps if isinstance(step, Launch)]
        plans = [one for one in launches if one.kernel.__name__ == "plan_kernel" and not one.arguments["UNIFORM"]]
        assert len(plans) == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("signs, clones", [("fixed", 0), ("fresh", 1)])
def test_a_state_may_advance_before_the_backward(signs, clones):
    """The plan of the forward brings a copy of the place where the backward draws, without an op; of signs an op."""
    state, generator = hb.RunState(3, rank=0), torch.Generator().manual_seed(0)
    recipe = hb.recipes.nvfp4(hadamard=hb.Hadamard(signs=signs))
    layer = hb.nn.GroupedLinear(3, 64, 48, dtype=torch.bfloat16, recipe=recipe, state=state)
    x, dy = (torch.randn(200, n, generator=generator).bfloat16() for n in (64, 48))
    offsets = torch.tensor([0, 130, 190], dtype=torch.int32)

    def gradients(position, is_early):
        state._places[:, 1] = position << 32
        leaf = x.clone().requires_grad_()
        y, layer.weight.grad = layer(leaf, offsets), None
        if is_early:
            state.advance()
        y.backward(dy)
        return leaf.grad, layer.weight.grad

    found = [[gradients(position, early) for early in (False, True, True)] for position in (1, 2)]
    for late, *early in found:
        assert all(torch.equal(one, other) for again in early for one, other in zip(late, again, strict=True))
    assert not torch.equal(found[0][0][1], found[1][0][1]), "another position draws other bits"
    ops = [step.function for record in prepared._RECORDS.values() for step in record.steps if type(step) is prepared.Op]
    assert ops.count(torch.ops.aten.clone.default) == clones
