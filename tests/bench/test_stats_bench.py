"""bench.stats on a CPU: three kinds of steps, and losses that statistics do not change."""

import json

from bench import stats


def test_eager_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stats, "WARM_UP", 1)
    monkeypatch.setattr(stats, "TIMED", 1)
    monkeypatch.setattr(stats, "SAMPLED", 1)
    options = ["--model", "tiny", "--tokens", "1", "16", "--ways", "eager", "--out", str(tmp_path)]
    assert stats.main(options) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["losses_equal"] and line["sampled_ms"] > line["plain_ms"] > 0 and line["cost"] > 0
    (path,) = tmp_path.glob("stats-*.jsonl")
    assert len(path.read_text().splitlines()) == 2
