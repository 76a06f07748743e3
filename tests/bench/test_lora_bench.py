"""bench.lora on a CPU: bytes of the base, what is trained, and that merged bytes are the trained bytes."""

import json
import math

import pytest

from bench import lora, lora_tables


def test_both_kinds_beside_high_precision(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lora, "WARM_UP", 1)
    monkeypatch.setattr(lora, "TIMED", 1)
    options = ["--model", "tiny", "--tokens", "2", "16", "--rank", "2", "--out", str(tmp_path)]
    assert lora.main([*options, "--ways", "bf16", "merge_aware"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    high, aware = lines
    assert [line["way"] for line in lines] == ["bf16", "merge_aware"]
    assert high["base_bits"] == 16 and 4.5 < aware["base_bits"] < 4.6
    assert len({line["trained_parameters"] for line in lines}) == 1 and high["trained_parameters"] > 0
    assert all(math.isfinite(sum(line["losses"])) and len(set(line["losses"])) == 2 for line in lines)
    assert aware["merged_equals_trained"] and aware["merge_error"] == aware["logits_changed"] == 0
    (path,) = tmp_path.glob("lora-*.jsonl")
    assert len(path.read_text().splitlines()) == 3


def test_the_table_is_of_the_newest_listing(tmp_path):
    line = {"case": "lora/step", "way": "bf16", "tokens_per_s": 1.0}
    for name, rate in (("gpu-20260101-a.txt", 1.0), ("gpu-20260102-b.txt", 2.0)):
        (tmp_path / name).write_text(f"# a heading\n{json.dumps(line | {'tokens_per_s': rate})}\n")
    (tmp_path / "gpu-20260103-c.txt").write_text('{"case": "another"}\n')
    name, lines = lora_tables.listed(tmp_path)
    assert name == "gpu-20260102-b.txt" and [found["tokens_per_s"] for found in lines] == [2.0]
    with pytest.raises(ValueError, match="no listing has lines of lora/step; run python -m bench.lora"):
        lora_tables.listed(tmp_path / "none")
