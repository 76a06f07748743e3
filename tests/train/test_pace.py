"""The speed that tables show is the pace of a run, not its pace with compiling."""

import json

import pytest

from halfbyte.train import league, loop, measure, recorded

ENDED = {"held_out_loss": 2.0, "is_diverged": False, "steps": 3, "tokens_per_second": 100.0, "peak_memory_bytes": 10}


def test_half_of_the_tokens_were_trained_at_the_median_or_below():
    pace = measure.Pace()
    assert pace.median() is None
    pace.add(100, 50.0)  # compiling
    assert pace.median() == 2.0
    for seconds in (1.0, 0.5, 0.8):
        pace.add(100, seconds)
    assert pace.median() == 100.0, "two of four spans are as slow or slower"
    pace.add(1000, 4.0)
    assert pace.median() == 250.0, "a span counts by its tokens"


def test_a_table_shows_the_pace_and_of_older_results_the_whole():
    assert recorded.speed({"tokens_per_second": 10.0}) == 10.0
    assert recorded.speed({"tokens_per_second": 10.0, "steady_tokens_per_second": None}) == 10.0
    assert recorded.speed({"tokens_per_second": 10.0, "steady_tokens_per_second": 30.0}) == 30.0
    both = {
        ("bf16", 0): ENDED | {"steady_tokens_per_second": 400.0},
        ("nvfp4", 0): ENDED | {"steady_tokens_per_second": 300.0},
    }
    found = league.league(both, ("bf16", "nvfp4"), {"bf16": 0.0, "nvfp4": 1.0})
    assert [row.speed for row in found.rows] == [1.0, 0.75]


@pytest.mark.parametrize("value", [-1.0, 0, "fast", True, 1e301])
def test_a_result_whose_pace_is_none_is_refused(tmp_path, value):
    numbers = dict.fromkeys(recorded.NUMBERS, 1.0)
    identity = {"identity": {"recipe": "bf16"}, "recipe": "bf16"}
    found = {**identity, **numbers, "steps": 1, "is_diverged": False, "held_out_loss": 2.0}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(found | {"steady_tokens_per_second": 5.0}))
    assert recorded.speed(recorded.read_result(path)) == 5.0
    path.write_text(json.dumps(found | {"steady_tokens_per_second": value}))
    with pytest.raises(ValueError, match="steady_tokens_per_second is no speed"):
        recorded.read_result(path)


@pytest.mark.parametrize(("steps", "read"), [(9, [3, 6]), (30, [8, 12, 10]), (2, [2])])
def test_a_run_of_a_few_steps_has_a_pace_beside_that_of_compiling(run, monkeypatch, steps, read):
    spans = []
    monkeypatch.setattr(measure.Pace, "add", lambda self, tokens, seconds: spans.append(tokens))
    one, text = run(steps=steps, log_every=20, eval_every=100, checkpoint_every=100)
    loop.train(one, "bf16", text)
    assert spans == [n * one.data.tokens_per_step for n in read]
