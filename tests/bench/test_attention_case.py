"""The benchmark's attention case: right on a CPU, and no figure for another function."""

import pytest
import torch

from bench.cases import attention
from bench.registry import Setting, Unequal, all_cases, select
from halfbyte.verify.timing import Ceilings

SETTING = Setting(device=torch.device("cpu"), backend="reference", ceilings=Ceilings(1e9, 1e9), budget=0.0)


def test_attention_is_compared_with_its_definition_and_timed(monkeypatch):
    (case,) = select(all_cases(), ["attention/*"])
    found = case.run(SETTING, case.small)
    sequences, tokens, heads, _, width = case.small
    assert found.work == 3.5 * 4 * sequences * heads * width * tokens * tokens / 2 and found.rate > 0
    monkeypatch.setattr(attention, "_forward", lambda q, k, v: q)
    with pytest.raises(Unequal, match="relative error"):
        case.run(SETTING, case.small)
