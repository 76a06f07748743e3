"""halfbyte inspect and sensitivity on the folder of a model of transformers: its weights, and with a text all of it."""

import csv

import pytest

transformers = pytest.importorskip("transformers", minversion="5.17")
tokenizers = pytest.importorskip("tokenizers")

from llama_folder import folder  # noqa: E402, F401

from halfbyte import cli  # noqa: E402

WORDS = ["one", "scale", "for", "sixteen", "values"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS * 20), encoding="utf-8")
    return path


def test_a_text_wants_a_tokenizer(folder, text, tmp_path, capsys):  # noqa: F811
    words = ["inspect", str(folder), "--out", str(tmp_path / "out"), "--recipes", "nvfp4"]
    assert cli.main(words) == 0
    lines = list(csv.DictReader((tmp_path / "out" / "inspect.csv").read_text().splitlines()))
    assert {"model.layers.0.self_attn.q_proj", "lm_head"} <= {line["layer"] for line in lines}
    capsys.readouterr()
    assert cli.main([*words, "--text", str(text)]) == 2
    said = capsys.readouterr().err
    assert "cannot load its tokenizer (" in said and "put its files there with tokenizer.save_pretrained" in said


def test_with_a_tokenizer_it_measures_a_step(folder, text, tmp_path, capsys):  # noqa: F811
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    copy = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(copy)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(copy)
    words = ["--text", str(text), "--batch", "2", "--sequence", "16", "--budget", "0.3", "--out", str(tmp_path / "out")]
    assert cli.main(["inspect", str(copy), *words, "--recipes", "nvfp4"]) == 0
    lines = list(csv.DictReader((tmp_path / "out" / "inspect.csv").read_text().splitlines()))
    assert {"x.row", "w.row", "dy.row", "w.col", "dy.col", "x.col"} == {line["operand"] for line in lines}
    assert cli.main(["sensitivity", str(copy), *words]) == 0
    assert "written to" in capsys.readouterr().out and (tmp_path / "out" / "sensitivity.csv").exists()
