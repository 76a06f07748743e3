"""`--stats-every N`: statistics in the folder of a run, whose result is that of a run without them."""

import pytest
from runs import losses, stop_after, weights

from halfbyte.train import loop, sampled


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
