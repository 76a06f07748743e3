"""What bench.gather derives: bytes from the calls of a step, and its table."""

import time

import pytest
import torch
import torch.distributed as dist

from bench import gather, gather_tables


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


@pytest.fixture
def alone():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Slower:
    """A trainer whose third step takes 50 ms and more."""

    count = 0

    def step(self):
        self.count += 1
        time.sleep(0.05 if self.count == 3 else 0)


def test_every_step_is_timed_by_itself(alone):
    took = gather.step_times(Slower(), torch.device("cpu"))
    assert len(took) == gather.TIMED >= 12 and took[2] >= 50 and max(took) == took[2]


def test_ranks_tell_each_other_their_gathers(alone, monkeypatch):
    """Of traces of one step and of all, the second counts; its gathers are those of every rank, here of one."""
    trainer, found = Slower(), []
    trace = [("ncclDevKernel_AllGather_RING_LL", 10.0 * i, 10.0 * i + 4.0) for i in range(2 * gather.TRACED)]

    def traced_kernels(run):
        before = trainer.count
        run()
        found.append(trainer.count - before)
        return trace if len(found) == 2 else [("ncclDevKernel_AllGather_RING_LL", 0.0, 1.0)]

    monkeypatch.setattr(gather, "traced_kernels", traced_kernels)
    traced = gather.traced(trainer, torch.device("cpu"))
    assert found == [1, gather.TRACED]
    assert traced["wires_ms"] == traced["wires_alone_ms"] == traced["exposed_ms"] == pytest.approx(8e-3)
    assert traced["first_wires_ms"] == pytest.approx(8e-3)


@pytest.mark.parametrize(
    ("model", "blocks", "dim", "hidden", "heads", "kept", "tied"),
    [
        ("1b", 16, 2048, 8192, 32, 3, True),
        ("3b", 28, 3072, 8192, 24, 5, True),
        ("8b", 32, 4096, 14_336, 32, 5, False),
    ],
)
def test_what_a_whole_model_gathers_adds_up_by_hand(model, blocks, dim, hidden, heads, kept, tied):
    """A code and its share of a tile's scale are 0.504 bytes; by default the last 15 % of the blocks come as values."""
    block, norms, table = 2 * dim**2 + 2 * dim * 8 * dim // heads + 3 * dim * hidden, 2 * dim, 128_256 * dim
    code, last = 0.5 + 1 / 256, 2 * dim
    edges = table if tied else 2 * table
    for policy, in_values in (("nvfp4@all", 0), ("nvfp4", kept)):
        each = (blocks - in_values) * code * block + in_values * 2 * block + blocks * 2 * norms
        shared = gather_tables.gathered_bytes(model, recipe=policy, head="shared")
        assert shared == pytest.approx(2 * each + last, rel=1e-9), "twice, and the last norm once"
        in_codes = 0 if tied or in_values else table
        whole = gather_tables.gathered_bytes(model, recipe=policy, head="gathered")
        assert whole == pytest.approx(2 * each + last + 2 * (edges - in_codes) + code * in_codes, rel=1e-9)
    values = gather_tables.gathered_bytes(model, recipe="bf16")
    assert values == 2 * 2 * blocks * (block + norms) + last + 2 * edges
    shared = gather_tables.gathered_bytes(model, recipe="nvfp4@all", head="shared")
    assert shared / values <= 0.27 and f"{shared / values:.3f}" in gather_tables.whole([])


@pytest.mark.parametrize("tokens", gather_tables.LENGTHS)
def test_embedding_and_head_are_gathered_where_the_table_says_that_it_is_no_more(tokens):
    lines = [line.strip("| ").split(" | ") for line in gather_tables.edges([]).splitlines()[2:]]
    for model, words, count, ranks, rows, activations, table in lines:
        if int(count.replace(",", "")) != tokens:
            continue
        gather_ = float(table.replace(",", ""))
        cells = [0.0 if cell == "gathered" else float(cell.replace(",", "")) for cell in (rows, activations)]
        assert sum(cells) < gather_ if model != "8b" else max(cells) < gather_, "1b and 3b have one weight for both"
        dim, world = {"1b": 2048, "3b": 3072, "8b": 4096}[model], int(ranks)
        if activations == "gathered":
            sent = (world - 1) * tokens * (4 * dim + 44) + (tokens * 4 * dim if model != "8b" else 0)
            assert sent >= 4 * int(words.replace(",", "")) * dim
