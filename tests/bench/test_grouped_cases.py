"""The cases of mixtures of experts check themselves and measure, on the reference."""

from __future__ import annotations

import pytest
import torch

from bench.cases import grouped
from bench.registry import Setting, Unequal
from halfbyte.verify.timing import Ceilings

SETTING = Setting(device=torch.device("cpu"), backend="reference", ceilings=Ceilings(1e9, 1e9), plain=False, budget=0.0)


@pytest.mark.parametrize("case", grouped.CASES, ids=lambda case: case.name)
def test_case(case):
    result = case.run(SETTING, case.small)
    assert result.seconds > 0 and result.value > 0 and result.checked


def test_a_product_that_is_off_gets_no_figure(monkeypatch):
    monkeypatch.setattr(grouped, "_errors", lambda *arguments: [0.1])
    with pytest.raises(Unequal, match=r"relative error 1.00e-01"):
        grouped.product(SETTING, grouped.SMALL, gemm="fprop")


def test_groups_are_uneven_and_hold_all_tokens():
    sizes = grouped.ends(64, 32768, torch.device("cpu")).diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert sizes.sum() == 32768 and sizes.max() > 5 * sizes.min() > 0
