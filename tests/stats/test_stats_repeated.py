"""What a sampled step measures is repeated from a record where kernels run, and is what it is when worked out anew."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from repeating import anew, kernels
from torch import nn

import halfbyte as hb
from halfbyte.kernels import prepared

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:step .. quantization noise"),
]
__all__ = ["kernels"]
K, N = 32, 16


def sampled(recipe: str, repeats: bool, first: int = 0) -> list[list[dict]]:
    """Return the figures of steps 0 and 1 of two layers that share an input, and of a third that is like the first.

    first: the step before which nothing is computed.
    """
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(K, n, bias=False) for n in (N, 2 * N, N)]).bfloat16()
    state = hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0)).state
    statistics = hb.collect_stats(model, every=1)
    found = []
    for step in range(2):
        if step < first:
            state.advance()
            statistics.advance()
            continue
        g = torch.Generator().manual_seed(step)
        x = torch.randn(17, K, generator=g).bfloat16().requires_grad_()
        with nullcontext() if repeats else anew():
            one, two = hb.nn.forward_shared(x, model[:2])
            sum(y.float().square().sum() for y in (one, two, model[2](x))).backward()
        state.advance()
        found.append(statistics.advance().records())
    return found


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2"])
def test_repeated_figures_are_those_of_a_first_call(recipe):
    found = sampled(recipe, repeats=True)
    records = [record for key, record in prepared._RECORDS.items() if key[0].__module__ == "halfbyte.stats.measure"]
    assert len(records) >= 8 and all(isinstance(record, prepared.Record) for record in records), records
    (wanted,) = sampled(recipe, repeats=False, first=1)  # the third layer of step 0 was a repetition, all of step 1 is
    assert list(map(str, found[1])) == list(map(str, wanted))
    assert {one["layer"] for one in found[0]} == {"0", "1", "2"} and str(found[0]) != str(found[1])
