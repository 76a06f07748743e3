"""What a trace says of all-gathers: hidden time, and what no rank waits for another in."""

from __future__ import annotations

import pytest

from bench import exposure
from bench.exposure import Gather

KERNELS = [
    ("ncclDevKernel_AllGather_RING_LL", 0.0, 100.0),  # nothing ran beside the first 60
    ("gemm", 60.0, 150.0),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 150.0, 400.0),  # hides no gather
    ("ncclDevKernel_AllGather_RING_LL", 140.0, 180.0),
    ("quantize", 145.0, 170.0),
]


def test_what_no_other_kernel_hides_is_exposed():
    found = exposure.exposed(KERNELS, steps=2)
    assert found["gather_kernels_ms"] == pytest.approx(140 / 2 / 1e3)
    assert found["exposed_ms"] == pytest.approx((60 + 10) / 2 / 1e3)
    assert found["most_exposed_ms"] == pytest.approx(60 / 1e3)
    assert found["hidden_share"] == pytest.approx(0.5)
    assert found["kernels_ms"] == pytest.approx((170 - 60) / 2 / 1e3)
    assert exposure.exposed([("gemm", 0.0, 1.0)], steps=1)["hidden_share"] == 1.0


def test_gathers_come_in_their_order_with_what_ran_beside():
    assert exposure.gathers_of(KERNELS) == [Gather(took=100.0, alone=60.0), Gather(took=40.0, alone=10.0)]


def test_waiting_for_a_late_rank_is_no_communication():
    """Two steps of three gathers; who comes last differs, and only what that one ran alone counts."""
    early = [Gather(90, 80), Gather(5, 5), Gather(50, 50), Gather(10, 2), Gather(70, 70), Gather(4, 0)]
    late = [Gather(10, 4), Gather(60, 60), Gather(8, 0), Gather(200, 200), Gather(6, 6), Gather(40, 0)]
    found = exposure.of_the_last([early, late], steps=2, first=2)
    assert found["wires_ms"] == pytest.approx((10 + 5 + 8 + 10 + 6 + 4) / 2 / 1e3)
    assert found["wires_alone_ms"] == pytest.approx((4 + 5 + 0 + 2 + 6 + 0) / 2 / 1e3)
    assert found["wires_hidden_share"] == pytest.approx(1 - 17 / 43)
    assert found["first_wires_ms"] == pytest.approx((15 + 16) / 2 / 1e3)
    assert found["others_hidden_share"] == 1.0  # the third of each step
    beside = exposure.of_the_last([early, late], steps=2, first=1)
    assert beside["others_hidden_share"] == pytest.approx(1 - (5 + 0 + 6 + 0) / (5 + 8 + 6 + 4))


@pytest.mark.parametrize("ranks", [[[Gather(1, 1)] * 4, [Gather(1, 1)] * 2], [[Gather(1, 1)] * 3] * 2])
def test_steps_that_are_not_whole_are_refused(ranks):
    with pytest.raises(ValueError, match=r"^ranks: gathers of 2 steps, but they have \[\d, \d\]$"):
        exposure.of_the_last(ranks, steps=2, first=1)


def test_a_step_without_a_gather_hides_all_of_it():
    found = exposure.of_the_last([[], []], steps=3, first=2)
    assert found["wires_hidden_share"] == found["others_hidden_share"] == 1.0
