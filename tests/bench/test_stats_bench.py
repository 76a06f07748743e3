"""bench.stats on a CPU: three kinds of steps, and losses that statistics do not change."""

import json

from bench import stats


def test_eager_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stats, "WARM_UP", 1)
    monkeypatch.setattr(stats, "TIMED", 1)
    monkeypatch.setattr(stats, "SAMPLED", 1)
    clock = iter((2.0, 9.0, 5.0, 2.5))  # seconds without statistics, of the first sampled step, of others, between them

    def timed(work, device):
        work()
        return next(clock), 1.0

    monkeypatch.setattr(stats, "timed", timed)
    options = ["--model", "tiny", "--tokens", "1", "16", "--ways", "eager", "--every", "50", "--out", str(tmp_path)]
    assert stats.main(options) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["losses_equal"] and line["repeats"]
    figures = [line[name] for name in ("plain_ms", "first_sampled_ms", "sampled_ms", "between_ms")]
    assert figures == [2000.0, 9000.0, 5000.0, 2500.0]
    assert line["cost"] == (5 - 2) / (50 * 2), "3 s more in one of 50 steps of 2 s"
    (path,) = tmp_path.glob("stats-*.jsonl")
    assert len(path.read_text().splitlines()) == 2
