"""`--stats-every N`: statistics in the folder of a run, whose result is that of a run without them."""

from dataclasses import replace

import pytest
from runs import losses, stop_after, weights

from halfbyte.stats import StepStatistics
from halfbyte.train import loop, sampled
from halfbyte.train.config import MeshConfig


def test_statistics_are_written_and_change_nothing(run, capsys):
    config, data = run(steps=4, checkpoint_every=2)
    loop.train(config, "nvfp4@all", data)
    plain = losses(config), weights(config)
    watched, data = run(steps=4, checkpoint_every=2, stats_every=2, overwrite=True, accumulate=1)
    loop.train(watched, "nvfp4@all", data)
    assert losses(watched) == plain[0]
    assert all(tensor.equal(plain[1][name]) for name, tensor in weights(watched).items())
    whole = sampled.read_statistics(watched.run.out)
    assert sorted({record["step"] for record in whole}) == [1, 2, 4]
    assert "not measured" not in capsys.readouterr().err
    assert {"x.row", "dw"} <= {record.get("operand") or record["product"] for record in whole}

    broken, data = run(steps=4, checkpoint_every=2, stats_every=2, out=config.run.out.with_name("broken"))
    stop_after(loop.Trainer(broken, "nvfp4@all", data), 2)
    loop.train(broken, "nvfp4@all", data)
    assert sampled.read_statistics(broken.run.out) == whole

    unwatched, data = run(steps=4, overwrite=True, stats_every=1)
    loop.train(unwatched, "bf16", data)
    assert not sampled.read_statistics(unwatched.run.out)  # --overwrite took those of before along
    assert "quantizes no layer" in capsys.readouterr().err


def test_a_number_below_zero_is_refused(run):
    with pytest.raises(ValueError, match="stats_every=-1"):
        run(stats_every=-1)


@pytest.mark.parametrize(
    "mesh, message",
    [
        (MeshConfig(weights="nvfp4", dp_replicate=2), "stats_every=2 with weights='nvfp4': weights that are there as"),
        (MeshConfig(weights="nvfp4", dp_shard=2), "leave one of --stats-every and --weights out"),
        (MeshConfig(tp=2), "stats_every=2 with tp=2: layers that ranks share have passes of their own"),
    ],
)
def test_where_no_layer_could_be_measured_it_is_refused(run, mesh, message):
    config, _ = run(stats_every=2, batch=4)
    with pytest.raises(ValueError, match=message):
        replace(config, mesh=mesh)
    assert replace(config, mesh=MeshConfig(dp_shard=2)).run.stats_every == 2


def test_what_is_not_measured_is_said_once_for_each_reason(capsys):
    said = sampled.Unmeasured()
    reasons = {**{f"layers.{i}": "one reason" for i in range(5)}, "head": "another"}
    for step in (1, 4):
        said.write(StepStatistics(step=step, layers=(), unobserved=reasons))
    assert capsys.readouterr().err.splitlines() == [
        "stats: not measured: layers.0, layers.1, layers.2 and 2 more: one reason",
        "stats: not measured: head: another",
    ]


@pytest.mark.parametrize(("count", "more"), [(2, ""), (3, ""), (4, " and 1 more")])
def test_three_layers_are_named_and_the_others_counted(capsys, count, more):
    names = [f"layers.{i}" for i in range(count)]
    sampled.Unmeasured().write(StepStatistics(step=1, layers=(), unobserved=dict.fromkeys(names, "why")))
    assert capsys.readouterr().err == f"stats: not measured: {', '.join(names[:3])}{more}: why\n"
