"""The log: a line per step at once, and only the lines that a resumed run really is past."""

import json
import math
from types import SimpleNamespace

import pytest

from halfbyte.train import log


def test_lines_are_there_while_the_run_goes_on(tmp_path):
    record = log.Log(tmp_path, after=0, tensorboard=False)
    record.write("step", 1, {"loss": 2.5})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"kind": "step", "step": 1, "loss": 2.5}
    record.close()


def test_resuming_drops_what_comes_again_and_what_was_cut(tmp_path):
    lines = [json.dumps({"kind": "step", "step": step, "loss": 1.0 / step}) for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
    record = log.Log(tmp_path, after=2, tensorboard=False)
    record.write("step", 3, {"loss": 9.0})
    record.close()
    assert log.curve(tmp_path, "step") == ([1, 2, 3], [1.0, 0.5, 9.0])


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind"\n{"kind": "step", "step": 1, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl line 1: not JSON"):
        log.read_log(tmp_path)


def test_numbers_that_are_not_finite_stay_json(tmp_path):
    record = log.Log(tmp_path, after=0, tensorboard=False)
    record.write("step", 1, {"loss": math.nan, "grad_norm": math.inf})
    record.close()
    assert log.read_log(tmp_path) == [{"kind": "step", "step": 1, "loss": None, "grad_norm": None}]
    assert log.curve(tmp_path, "step") == ([], [])


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = log.Log(tmp_path, after=0, tensorboard=True)
    record.write("step", 1, {"loss": 2.5})
    record.write("step", 2, {"loss": 1.5})
    record.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/loss")] == [(1, 2.5), (2, 1.5)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1, 2]", "no object with a kind"),
        ('{"kind": 1, "step": 1}', "no object with a kind"),
        ('{"kind": "step", "loss": 1.0}', "step is no number of steps"),
        ('{"kind": "step", "step": "1", "loss": 1.0}', "step is no number of steps"),
        ('{"kind": "step", "step": 1, "loss": "low"}', "loss is neither a number nor null"),
        ('{"kind": "eval", "step": 1, "loss": NaN}', "loss is neither a number nor null"),
        ('{"kind": "eval", "step": 1}', "loss is neither a number nor null"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
    ],
)
def test_a_line_of_something_else_is_named(tmp_path, line, reason):
    (tmp_path / "log.jsonl").write_text(line + '\n{"kind": "step", "step": 1, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=rf"log\.jsonl line 1: .*{reason}"):
        log.Log(tmp_path, after=0, tensorboard=False)


def test_a_line_is_whole_where_the_disk_takes_it_in_parts(tmp_path, monkeypatch):
    record = log.Log(tmp_path, after=0, tensorboard=False)
    file = record._file
    monkeypatch.setattr(record, "_file", SimpleNamespace(write=lambda text: file.write(text[:7]), close=file.close))
    for step in (1, 2):
        record.write("step", step, {"loss": 2.5, "lr": 1e-3})
    record.close()
    assert [line["step"] for line in log.read_log(tmp_path)] == [1, 2]
    assert (tmp_path / log.NAME).read_text().count("\n") == 2
