"""The self-test of E2M1 conversions, with a conversion that is ours or wrong in place of the GPU's."""

import re
from types import SimpleNamespace

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.device import hardware_cast
from halfbyte.kernels.target import INTERPRETER, amd, nvidia
from halfbyte.verify import casts, record


class Gpu:
    type = "cuda"


def a_gpu(monkeypatch, capability):
    facts = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)


@pytest.mark.parametrize(
    ("capability", "names"),
    [((9, 0), {}), ((10, 0), {"nearest": True, "stochastic": False}), ((12, 0), {"nearest": True})],
)
def test_which_gpus_convert(capability, names, monkeypatch):
    a_gpu(monkeypatch, capability)
    assert hardware_cast.conversions(Gpu()) == names


@pytest.mark.parametrize(
    ("capability", "native", "casts"),
    [
        ((9, 0), False, "nearest in integer .*sm_90 has no cvt.rn.*; stochastic in integer .*sm_90 has no cvt.rs"),
        ((10, 3), True, "nearest by cvt.rn; stochastic in integer .*cvt.rs is compared .* but not used, because"),
        ((12, 0), True, "nearest by cvt.rn; stochastic in integer .*sm_120 has no cvt.rs"),
    ],
)
def test_backends_say_how_they_convert(capability, native, casts, monkeypatch):
    a_gpu(monkeypatch, capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    statuses = {status.name: status for status in hb.backends()}
    assert statuses["native"].available == native and not statuses["reference"].casts
    for name in ("triton", "native")[: 1 + native]:
        assert re.fullmatch(casts + ".*", statuses[name].casts)


@pytest.mark.parametrize(("name", "wrong", "outcome"), [
    ("nearest", 0, record.PASSED), ("nearest", 1, record.FAILED), ("stochastic", 1, record.NOT_RUN)
])  # fmt: skip
def test_a_difference_is_reported(name, wrong, outcome, monkeypatch):
    ours = torch.arange(8)
    monkeypatch.setattr(hardware_cast, "conversions", lambda _: {name: name == "nearest"})
    monkeypatch.setattr(hardware_cast, "compare_conversions", lambda *_: (ours, ours + (ours < wrong)))
    (check,) = casts.casts(Gpu())
    assert check.outcome == outcome and (not wrong or "1 of 8" in check.detail)


def test_a_gpu_without_one_says_so(monkeypatch):
    a_gpu(monkeypatch, (9, 0))
    (check,) = casts.casts(Gpu())
    assert check.outcome == record.NOT_RUN and "sm_90" in check.detail


@pytest.mark.parametrize(("capability", "level"), [(80, 0), (86, 0), (89, 89), (90, 90), (100, 100), (120, 100)])
def test_levels(capability, level):
    assert nvidia(capability, 8).level == level


def test_no_level_elsewhere():
    assert [target.level for target in (amd("gfx950", 8), INTERPRETER)] == [0, 0]
