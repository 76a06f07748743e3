"""What a host does in a step, by name."""

import time

import pytest
import torch

from bench.host_profile import Share, shares, text


def test_calls_are_those_of_one_step_and_time_is_each_ones_own():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.02)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy

    x = torch.ones(4, requires_grad=True)

    def step():
        Slow.apply(x).sum().backward()
        torch.ones(3).cos_().cos_()

    found, launching = shares(step, torch.device("cpu"), steps=3)
    named = {share.name: share for share in found}
    assert named["aten::cos_"].calls == 2 and named["aten::mul"].calls == 1
    assert found[0].name == "Slow" and named["Slow"].ms == pytest.approx(20, rel=0.5)
    assert named["aten::mul"].ms < 5 and sum(share.ms for share in found) <= launching


def test_the_rest_is_added_up():
    lines = text([Share("a", 3.0, 2), Share("b", 2.0, 1), Share("c", 0.5, 4)], 7.25, most=1).splitlines()
    assert lines[0].split()[0] == "7.250" and lines[1].split() == ["3.000", "ms", "2.0", "x", "a"]
    assert lines[2].split() == ["2.500", "ms", "5.0", "x", "others"] and len(lines) == 3
