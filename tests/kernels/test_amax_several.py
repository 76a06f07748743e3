"""What one launch finds: the amax that several tensors have together, and those of long rows, such as experts."""

from __future__ import annotations

import pytest
import torch
from repeating import check_repeats, kernels

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels import prepared
from halfbyte.kernels.amax import plain, route
from halfbyte.kernels.amax.plain import finite_amax
from halfbyte.kernels.amax.several import greatest_amax
from halfbyte.kernels.device import running_max
from halfbyte.kernels.launch import Launch

__all__ = ["kernels"]
SHAPES = {
    "siblings": ((384, 128), (64, 128), (64, 128)),
    "runs that end within": ((5, 8), (999, 88)),
    "one": ((3, 16),),
    "many runs of a small one": ((2, 8), (700, 512), (4, 8)),
}


def tensors(shapes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("bad", [None, float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("name", SHAPES)
def test_the_largest_of_all_wherever_it_is(name, bad, dtype):
    for i in range(len(SHAPES[name])):
        for place in (0, -1):
            xs = tensors(SHAPES[name], dtype)
            xs[i].view(-1)[place] = -77.5
            if bad is not None:
                xs[-1].view(-1)[1] = bad
            assert route.choose_several(route.AmaxOfSeveral(tuple(xs))).kernel == "amax_several_kernel"
            assert float(greatest_amax(xs)) == 77.5 == float(reference.greatest_amax(xs))


OTHERS = {
    "four": lambda: tensors([(2, 8)] * 4),
    "fp16": lambda: tensors([(2, 8), (3, 8)], torch.float16),
    "two dtypes": lambda: [*tensors([(2, 8)], torch.float32), *tensors([(3, 8)], seed=1)],
    "part of 16 bytes": lambda: tensors([(3, 6), (3, 8)], torch.float32),
    "columns": lambda: [tensors([(24, 16)])[0].T, *tensors([(3, 8)])],
    "misaligned": lambda: [torch.randn(65).bfloat16()[1:].view(8, 8), *tensors([(3, 8)])],
    "an odd number": lambda: tensors([(3, 5), (3, 8)]),
    "nothing": lambda: [torch.empty(0, 8).bfloat16(), *tensors([(3, 8)])],
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_others_one_by_one(name):
    xs = OTHERS[name]()
    assert route.choose_several(route.AmaxOfSeveral(tuple(xs))).kernel == route.ONE_BY_ONE
    assert torch.equal(greatest_amax(xs), reference.greatest_amax(xs))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_siblings_find_theirs_by_a_record_of_one_launch(dtype):
    """As often as the weights change; autograd sees nothing of it."""
    from halfbyte.nn.sibling_amax import shared_amax

    layers = [hb.nn.Linear(32, n, bias=False, dtype=dtype) for n in (48, 16, 16)]
    layers[0].amax_group = tuple(layers)

    def call(i):
        with torch.no_grad():
            layers[i % 3].weight[0, i] = 5.0 + i
        amax = shared_amax(layers[0], None)
        assert float(amax) == 5.0 + i and not amax.requires_grad
        return amax

    check_repeats(call, (1, 2, 3, 4))
    (record,) = prepared._RECORDS.values()
    assert [step.name for step in record.steps if isinstance(step, Launch)] == ["amax_several_kernel"]


@pytest.mark.parametrize("bad", [None, float("nan")])
@pytest.mark.parametrize("shape, dtype", [((3, 20_000), torch.bfloat16), ((5, 17_001), torch.float32)])
def test_rows_in_parts_meet_and_leave_zeros(shape, dtype, bad):
    """A row's maximum may be in any part; the next call finds nothing of this one's."""
    (x,) = tensors([shape], dtype)
    assert route.choose_amax(route.AmaxOfOne(x, hb.NVFP4(outer="row"))).constants["RESULT"] == route.OF_ROW_PARTS
    for scale in (1.0, 0.25):
        y = x * scale
        for row in range(shape[0]):
            y[row, (row * 7919) % shape[1]] = -9.0 * scale * (row + 1)
        if bad is not None:
            y[1, 3] = bad
        assert torch.equal(finite_amax(y, -1), reference.finite_amax(y, -1))
        assert not running_max.workspace_of_rows(shape[0], x.device).any()


def test_each_row_meets_in_a_place_of_its_own():
    """Programs of several rows run at once: the parts of one that is not through are found where no other row looks."""
    (x,) = tensors([(3, 20_000)])
    choice = route.choose_amax(route.AmaxOfOne(x, hb.NVFP4(outer="row")))
    _, parts = choice.facts
    space = running_max.workspace_of_rows(3, x.device)
    plain._launch_rows(choice._replace(grid=(3 * parts - 1,)), True)
    given = space.tolist()
    space.zero_()
    assert given[:4] == [0] * 4 and given[4] == parts - 1 and given[5] > 0


@pytest.mark.usefixtures("kernels")
def test_experts_are_quantized_without_a_fill():
    """No op beside the launches: zeros where programs meet are there already."""
    layer = hb.nn.GroupedLinear(3, 256, 64, dtype=torch.bfloat16, state=hb.RunState(0))
    offsets = torch.tensor([10, 10, 40], dtype=torch.int32)

    def call(i):
        with torch.no_grad():
            layer.weight[i % 3, 0, i] = 5.0 + i
            return layer(tensors([(40, 256)], seed=i)[0], offsets)

    check_repeats(call)
    steps = [step for record in prepared._RECORDS.values() for step in record.steps]
    assert "amax_rows_kernel" in [step.name for step in steps if isinstance(step, Launch)]
    assert not [step.function for step in steps if isinstance(step, prepared.Op)]
