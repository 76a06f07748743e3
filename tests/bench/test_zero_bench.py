"""What bench.zero derives: bytes from the storage plan, hidden time from a trace."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import zero, zero_tables
from bench.exposure import kernels_of
from bench.records import Record


@pytest.mark.parametrize("name, whole", (("1b", 0.2992), ("3b", 0.2772), ("8b", 0.2658)))
def test_bytes_of_the_whole_model_are_those_of_codes_and_of_the_embedding(name, whole):
    values = zero.planned(name, 32_000, tied=True, world=2)
    plain = 1 - values["tiled_parameters"] / values["parameters"]
    assert values["tiled_weights_of_bf16"] == pytest.approx(0.252, abs=1e-4)
    assert values["whole_model_of_bf16"] == pytest.approx(whole, abs=1e-4)
    assert values["whole_model_of_bf16"] == pytest.approx(0.252 + 0.748 * plain, abs=1e-4)


def zero_of(buckets: dict[str, bool], casts: int) -> Any:
    """Return what the trace needs of an optimizer: buckets by their first parameter, and whether they hold codes."""

    def bucket(name, coded):
        place = SimpleNamespace(item=SimpleNamespace(name=name))
        return SimpleNamespace(quantized=coded, plan=SimpleNamespace(places=[place]))

    return SimpleNamespace(buckets=[bucket(*item) for item in buckets.items()], scales=[None] * casts)


def test_messages_are_named_in_the_order_in_which_they_are_sent():
    optimizer = zero_of({"embed": False, "a": True, "norm": False, "b": True}, casts=1)
    assert zero.messages(optimizer) == ["embed", "norm", "scales", "a", "b"]


def test_the_hidden_share_is_of_the_time_beside_other_kernels():
    def kernel(name, start, end):
        return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}

    optimizer = zero_of({"e": False}, casts=0)
    events = [
        kernel("ncclDevKernel_AllGather_RING_LL", 0, 100),
        kernel("gemm", 20, 50),
        kernel("gemm", 40, 60),
        kernel("ncclDevKernel_ReduceScatter_Sum", 60, 160),
        kernel("ncclDevKernel_AllGather_RING_LL", 200, 300),
        kernel("gemm", 190, 310),
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 400},
    ]
    values = zero.hidden_share(kernels_of(events), optimizer, steps=2)
    assert values["hidden_shares"] == [0.4, 1.0] and values["hidden_share"] == pytest.approx(0.7)
    assert values["gather_kernels_ms"] == pytest.approx(0.1) and values["exposed_ms"] == pytest.approx(0.03)
    assert values["most_exposed_ms"] == {"e": 0.03} and values["reduce_kernels_ms"] == pytest.approx(0.05)
    assert zero.hidden_share(kernels_of(events[1:4]), optimizer, steps=2) == {}


def test_one_late_host_does_not_decide_the_hidden_share():
    optimizer = zero_of({"e": False}, casts=0)
    gathers = [{"cat": "kernel", "name": "ncclAllGather", "ts": start, "dur": 10} for start in (0, 100, 200)]
    beside = [{"cat": "kernel", "name": "gemm", "ts": start, "dur": 9} for start in (0, 100)]
    values = zero.hidden_share(kernels_of(gathers + beside), optimizer, steps=3)
    assert values["hidden_shares"] == [0.9, 0.9, 0.0] and values["hidden_share"] == pytest.approx(0.9)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_measured_step_names_what_it_was_measured_with(one_process):
    """Two runs can be compared only where these are equal."""
    values = zero.measure("tiny", "nvfp4", (2, 24), torch.device("cpu"), vocabulary=64)
    assert values["tokens"] == [2, 24] and values["vocabulary"] == 64 and values["step_ms"] > 0


@pytest.mark.parametrize("wrong", (None, 1))
def test_losses_are_compared_bit_for_bit(one_process, monkeypatch, wrong):
    step = zero.Trainer.step

    def differing(self):
        loss, norm = step(self)
        is_wrong = self.count - 1 == wrong and self.zero.config.weights == "plain"
        return (loss.nextafter(loss + 1) if is_wrong else loss), norm

    monkeypatch.setattr(zero.Trainer, "step", differing)
    values = zero.bitwise("tiny", 3, (1, 16), torch.device("cpu"))
    assert (values["steps"], values["equal"], values["first_difference"]) == (3, wrong is None, wrong)


@pytest.mark.parametrize(
    "one_gpu, device, backend", ((True, "cuda:0", ("gloo", None)), (False, "cuda:1", ("nccl", "cuda:1")))
)
def test_where_a_rank_runs(monkeypatch, one_gpu, device, backend):
    """NCCL refuses two ranks on one GPU."""
    begun = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: begun.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", lambda name, device_id: begun.append((name, device_id)))
    assert zero.start(one_gpu=one_gpu) == torch.device(device)
    assert begun[0] == device and begun[1] == (backend[0], backend[1] and torch.device(backend[1]))


@pytest.mark.parametrize(
    "more, has_gpu, message",
    (
        (("--models", "tiny"), True, "--one-gpu: ranks that share a GPU wait for each other"),
        (("--bitwise", "tiny"), False, "--one-gpu: torch sees no GPU"),
    ),
)
def test_one_gpu_is_for_bits(monkeypatch, capsys, more, has_gpu, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(SystemExit):
        zero.main(["--one-gpu", *more])
    assert message in capsys.readouterr().err


def test_tables_tell_ranks_that_shared_a_gpu_from_gpus():
    line = {"case": "zero/bitwise", "model": "10m", "world": 2, "steps": 500, "equal": True}
    line |= {"first_loss": 10.0, "last_loss": 6.0}
    records = [
        Record(
            key=("zero/bitwise", ()),
            run={"commit": "abcdef0", "time": "2026"},
            values=values,
            file="zero-gpu-20260101T000000-abcdef0.jsonl",
        )
        for values in (line, line | {"one_gpu": True})
    ]
    several, shared = zero_tables.bitwise(records).splitlines()[-2:]
    assert "| 10m, 2 GPUs |" in several and "| 10m, 2 ranks on one GPU |" in shared
