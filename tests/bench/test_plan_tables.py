"""docs/scaling.md says what `python -m bench.plan_tables` prints, and plans are near what was measured."""

import dataclasses

import pytest

from bench import plan_tables
from bench.records import counting, load
from halfbyte.plan.calibration import STEP_SHARE
from halfbyte.train.model import model_preset

RECORDS = load()
TEXT = plan_tables.PAGE.read_text(encoding="utf-8")
SLOW = ("recipes", "8b", "70b", "671b")
LATE_HOST = {  # docs/primary_weights.md, "With 8,192 words": the host, which was slow, set the length of these steps
    ("ZeroOptimizer, 1b, nvfp4 gathered, 2 GPUs, 8,192 words", "20261122T122359-20c374a"),
    ("ZeroOptimizer, 1b, bf16 gathered, 2 GPUs, 8,192 words", "20261122T122359-20c374a"),
}
WAITED = 0.10  # of a step: a GPU that waits longer than that for a host or a rank is not what a plan is of


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in SLOW)) for n in plan_tables.RENDERERS]
)
def test_the_page_holds_what_the_command_prints(name):
    assert f"<!-- plan: {name} -->" in TEXT
    assert plan_tables.renew(TEXT, RECORDS, [name]) == TEXT, "run `python -m bench.plan_tables --write`"


def test_one_line_of_each_slow_table_is_on_the_page():
    from halfbyte.plan import PlanRequest, plan

    for model, mesh, hardware, gpus in (
        ("llama3-8b", "dp_shard=64", "h200", 64),
        ("llama3-70b", "dp_shard=512,tp=2", "h200", 1024),
        ("deepseek-v3", "dp_replicate=2,dp_shard=256,tp=2,ep=32", "gb300", 1024),
    ):
        found = plan(PlanRequest(model=model, gpus=gpus, mesh=mesh, hardware=hardware))
        assert f"| {' | '.join(plan_tables.line(found))} |" in TEXT


def test_no_marker_is_broken_and_every_table_is_named():
    names = [name for _, name, _, _ in plan_tables.BLOCK.findall(TEXT)]
    assert sorted(names) == sorted(plan_tables.RENDERERS)
    assert TEXT.count("<!-- plan:") == TEXT.count("<!-- /plan -->") == len(names)
    with pytest.raises(ValueError, match="'size' is no table; they are measured"):
        plan_tables.renew("<!-- plan: size -->1<!-- /plan -->", RECORDS)


def test_plans_are_near_every_measured_step():
    runs = plan_tables.compared(RECORDS)
    assert len(runs) >= 36 and all(abs(c.memory_gap or 0.0) <= plan_tables.MEMORY_BAR for c in runs)
    missed = [c for c in runs if abs(c.time_gap) > plan_tables.TIME_BAR]
    busy = {(c.what, c.stamp) for c in missed if (c.waiting or 0.0) <= WAITED * c.seconds}
    assert busy <= LATE_HOST and len(missed) <= len(runs) / 9
    fitted = [c for c in runs if c.what == "train/1b, bf16, 1 GPU" and c.stamp == STEP_SHARE.record]
    assert all(abs(c.time_gap) < 0.005 for c in fitted)  # the one step that a constant is taken from


@pytest.mark.parametrize("case", ["linear/nvfp4", "linear/nvfp4_mxfp8_bwd"])
def test_layers_are_planned_as_they_were_measured(case):
    for (name, shape), record in counting(RECORDS).items():
        if name == case and record.is_clean and min(shape) >= 4096:  # narrow ones: docs/scaling.md
            planned = plan_tables.layer_seconds(case.partition("/")[2], shape)
            assert planned == pytest.approx(record.values["us"] / 1e6, rel=0.05), shape


def test_only_runs_without_tokens_or_without_all_blocks_are_left_out_and_each_is_named():
    for record, why in plan_tables.left_out(RECORDS):
        v = record.values
        if v["case"] == "gather/step":
            assert v["layers"] < model_preset(v["model"]).layers and f"it has {v['layers']} of" in why
        else:
            assert "tokens" not in v and v["vocabulary"] != 32_000 and why == "its tokens are not recorded"
        assert f"- Not compared: {v['case']}, {v['model']}, {record.stamp}: {why}." in TEXT
    cases = [r for r in RECORDS if r.values["case"] in ("zero/step", "gather/step")]
    runs = [c for c in plan_tables.compared(RECORDS) if c.what.startswith(("Zero", "FSDP2"))]
    assert len(runs) + len(plan_tables.left_out(RECORDS)) == len(cases)


def test_a_gather_that_outlasts_its_wires_waits_for_another_rank():
    values = {"step_ms": 100.0, "kernels_ms": 60.0, "exposed_ms": 30.0}
    found = plan_tables.compared([r for r in RECORDS if r.values["case"] == "gather/step"])[0].plan
    assert plan_tables._waited(values | {"wires_alone_ms": 2.0}, found) == 10 + 28
    assert plan_tables._waited(values | {"wires_alone_ms": 2.0, "kernels_ms": 90.0}, found) == 28
    assert 10 < plan_tables._waited(values, found) < 38, "all gathers by bandwidth, where wires are not recorded"


@pytest.mark.parametrize("case", ["zero/step", "gather/step", "train/1b"])
def test_runs_of_sources_that_no_commit_has_are_not_compared(case):
    others = len(plan_tables.compared([]))
    found = (r for r in RECORDS if r.values["case"] == case and len(plan_tables.compared([r])) > others)
    record = next(found)
    marked = dataclasses.replace(record, run=record.run | {"commit": f"{record.run['commit']}+"})
    assert len(plan_tables.compared([marked])) == others
