"""bench.lora on a CPU: bytes of the base, what is trained, and that merged bytes are the trained bytes."""

import json
import math

from bench import lora


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
