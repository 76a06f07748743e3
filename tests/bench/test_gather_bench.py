"""What bench.gather derives: hidden time from kernels of a trace, and bytes from the calls of a step."""

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
