"""What bench.gather derives: hidden time from kernels of a trace, and bytes from the calls of a step."""

import time

import pytest
import torch
import torch.distributed as dist

from bench import gather

KERNELS = [
    ("ncclDevKernel_AllGather_RING_LL", 0.0, 100.0),  # nothing ran beside the first 60
    ("gemm", 60.0, 150.0),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 150.0, 400.0),  # hides no gather
    ("ncclDevKernel_AllGather_RING_LL", 140.0, 180.0),
    ("quantize", 145.0, 170.0),
]


def test_what_no_other_kernel_hides_is_exposed():
    found = gather.exposed(KERNELS, steps=2)
    assert found["gather_kernels_ms"] == pytest.approx(140 / 2 / 1e3)
    assert found["exposed_ms"] == pytest.approx((60 + 10) / 2 / 1e3)
    assert found["most_exposed_ms"] == pytest.approx(60 / 1e3)
    assert found["hidden_share"] == pytest.approx(0.5)
    assert found["kernels_ms"] == pytest.approx((170 - 60) / 2 / 1e3)
    assert gather.exposed([("gemm", 0.0, 1.0)], steps=1)["hidden_share"] == 1.0


def test_all_gathers_are_counted_by_what_they_return(monkeypatch):
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    monkeypatch.setattr(dist, name, lambda *args, **options: "done")
    own = getattr(dist, name)
    with gather.counted() as counts:
        assert getattr(dist, name)(torch.empty(6), torch.empty(3)) == "done"
        assert getattr(dist, name)(output_tensor=torch.empty(8, dtype=torch.uint8), input_tensor=None) == "done"
    assert counts == {"gathered_bytes": 32, "gather_calls": 2} and getattr(dist, name) is own


def test_the_table_says_what_differs():
    step = {"case": "gather/step", "model": "1b", "layers": 8, "way": "codes", "step_ms": 12.5, "gathered_bytes": 2.5e6}
    same = {"case": "gather/bitwise", "model": "10m", "steps": 200, "equal": True, "last_loss": 1.5}
    other = {**same, "equal": False, "first_difference": 7}
    lines = gather.table([step, same, other]).splitlines()
    assert "12.50" in lines[1] and "2.50" in lines[1] and "nan" in lines[1]
    assert lines[2].startswith("10m: 200 steps equal") and "DIFFERENT from step 7" in lines[3]


def test_rounds_are_merged_to_the_median_step_and_its_spread():
    one = {"steps_ms": [10.0, 11.0, 400.0], "host_step_ms": 5.0, "peak_GiB": 2.0, "gather_calls": 3}
    other = {"steps_ms": [12.0, 13.0, 14.0], "host_step_ms": 7.0, "peak_GiB": 1.0, "gather_calls": 3}
    found = gather.merged([one, other])
    assert found["step_ms"] == pytest.approx(12.5)  # the step of a stall moves it by no more than any other
    assert found["spread"] == pytest.approx((13.75 - 11.25) / 12.5)
    assert found["rounds_ms"] == [11.0, 13.0] and found["steps_ms"] == [10.0, 11.0, 400.0, 12.0, 13.0, 14.0]
    assert found["host_step_ms"] == 6.0 and found["peak_GiB"] == 2.0 and found["gather_calls"] == 3


def test_ways_are_compared_round_by_round():
    lines = [
        {"way": "codes", "step_ms": 9.0, "rounds_ms": [8.0, 10.0]},
        {"way": "bf16", "step_ms": 10.0, "rounds_ms": [10.0, 10.0]},
    ]
    gather.beside_bf16(lines)
    assert lines[0]["step_of_bf16"] == pytest.approx(0.9) and lines[0]["rounds_of_bf16"] == [0.8, 1.0]
    assert lines[1]["step_of_bf16"] == 1.0


def test_every_step_is_timed_by_itself():
    class Slower:
        count = 0

        def step(self):
            self.count += 1
            time.sleep(0.05 if self.count == 3 else 0)

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        took = gather.step_times(Slower(), torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert len(took) == gather.TIMED >= 12 and took[2] >= 50 and max(took) == took[2]
