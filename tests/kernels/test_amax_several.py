"""The amax that several tensors have together: one launch for weights of siblings, whatever their sizes."""

from __future__ import annotations

import pytest
import torch
from repeating import check_repeats, kernels

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels import prepared
from halfbyte.kernels.amax import route
from halfbyte.kernels.amax.several import greatest_amax
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


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("name", SHAPES)
def test_the_largest_of_all_wherever_it_is(name, bad):
    for i in range(len(SHAPES[name])):
        for place in (0, -1):
            xs = tensors(SHAPES[name])
            xs[i].view(-1)[place] = -77.5
            if bad is not None:
                xs[-1].view(-1)[1] = bad
            assert route.choose_several(route.AmaxOfSeveral(tuple(xs))).kernel == "amax_several_kernel"
            assert float(greatest_amax(xs)) == 77.5 == float(reference.greatest_amax(xs))


OTHERS = {
    "four": lambda: tensors([(2, 8)] * 4),
    "fp32": lambda: tensors([(2, 8), (3, 8)], torch.float32),
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
def test_siblings_find_theirs_by_a_record_of_one_launch():
    """As often as the weights change; autograd sees nothing of it."""
    from halfbyte.nn.linear import shared_amax

    layers = [hb.nn.Linear(32, n, bias=False, dtype=torch.bfloat16) for n in (48, 16, 16)]
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
