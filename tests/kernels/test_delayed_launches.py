"""What an amax of an earlier step saves: the launch that looks for one (docs/recipes.md)."""

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels import backend
from halfbyte.kernels.launch import rehearsing
from halfbyte.kernels.record import TARGETS
from halfbyte.kernels.scenario_values import places, tensor
from halfbyte.kernels.target import assumed
from halfbyte.sides import both_sides


def launches(shape: tuple[int, int], specs: tuple, amax: torch.Tensor | None) -> list[str]:
    given = both_sides(*specs, row_amax=amax, col_amax=amax, **places(*specs))
    with assumed(TARGETS["sm_90"]), rehearsing() as events:
        backend.quantize_row_col(tensor(*shape), *given)
    return [event.kernel.__name__ for event in events if hasattr(event, "arguments")]


@pytest.mark.parametrize("shape", [(512, 768), (4096, 2048), (16384, 2880)])
@pytest.mark.parametrize("operand", ["x", "dy"])
def test_one_launch_less_for_x_and_for_dy(operand, shape):
    recipe = hb.recipes.nvfp4()
    specs = (recipe.fprop.a, recipe.wgrad.b) if operand == "x" else (recipe.dgrad.a, recipe.wgrad.a)
    own, given = (launches(shape, specs, amax) for amax in (None, torch.empty((), device="meta")))
    assert len(own) == 2 and own[0].startswith("amax") and given == ["quantize_row_col_kernel"]
