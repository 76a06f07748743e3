"""`halfbyte export`: the bytes that hb.export.save writes, and one line for every mistake."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from export_decoder import stored
from export_models import NOTHING_KEPT, llama, trained
from test_atomic import files_of_at_most
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import halfbyte as hb
from halfbyte import cli


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder that was trained with a recipe in its config.json, with a tokenizer of its own."""
    from halfbyte.integrations.transformers import HalfbyteConfig

    folder = tmp_path_factory.mktemp("source")
    model = trained(llama(), "nvfp4", steps=1)
    model.config.quantization_config = HalfbyteConfig("nvfp4", keep=NOTHING_KEPT).to_dict()
    model.save_pretrained(folder)
    words = {word: i for i, word in enumerate(["[UNK]", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder, model


def test_the_command_writes_what_save_does(tmp_path, source, capsys):
    folder, model = source
    text = tmp_path / "text"
    text.write_text("a b c d e f g h " * 20)
    options = [
        "--format",
        "modelopt",
        "--activations",
        "static",
        "--calibrate",
        str(text),
        "--length",
        "8",
        "--batches",
        "2",
    ]
    assert cli.main(["export", str(folder), str(tmp_path / "out"), *options]) == 0
    printed = capsys.readouterr().out
    assert (
        "14 layers in NVFP4, 1 modules in high precision" in printed and "0 % of the quantized bytes differ" in printed
    )
    batches = [torch.arange(1, 9)[None]] * 2
    hb.export.save(model, tmp_path / "same", format="modelopt", activations="static", batches=batches)
    out, same = stored(tmp_path / "out"), stored(tmp_path / "same")
    assert out.keys() == same.keys() and all(torch.equal(out[key], same[key]) for key in out)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "holds files already" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path, source, capsys):
    folder, _ = source
    plain, foreign, truncated = (tmp_path / name for name in ("plain", "foreign", "truncated"))
    for path in (plain, foreign, truncated):
        path.mkdir()
        for file in folder.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    (foreign / "config.json").write_text(json.dumps(config | {"architectures": ["GPT5ForNothing"]}))
    path = truncated / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    target = tmp_path / "out"

    def fails(*arguments):
        assert cli.main(["export", *map(str, arguments)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("halfbyte export: ") and not target.exists()
        return error

    assert "config.json: is not there" in fails(tmp_path / "absent", target)
    assert "config.json says no recipe; give that of its training" in fails(plain, target)
    assert "recipe='nvpf4' is not a preset" in fails(plain, target, "--recipe", "nvpf4")
    assert "says the recipe of its training; leave it out" in fails(folder, target, "--recipe", "nvfp4")
    assert "['GPT5ForNothing'] in config.json is no model of transformers" in fails(foreign, target)
    for name in ("pipeline", 5):  # a function, and no name at all
        (foreign / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        assert f"architectures=[{name!r}] in config.json is no model" in fails(foreign, target)
    (foreign / "config.json").write_text(json.dumps(config | {"architectures": 5}))
    assert "architectures=5 in config.json is no model" in fails(foreign, target)
    assert "truncated" in fails(truncated, target)
    assert "go together" in fails(folder, target, "--activations", "static")
    assert "is no file; give a text" in fails(folder, target, "--activations", "static", "--calibrate", tmp_path / "no")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    error = fails(folder, target, "--activations", "static", "--calibrate", tmp_path / "binary")
    assert f"--calibrate={tmp_path / 'binary'}: is no UTF-8 text" in error
    with files_of_at_most(10_000):
        error = fails(folder, target)
    assert error == f"halfbyte export: {target}: File too large, nothing was written; make room or choose another path"
    hb.export.save(trained(llama(), "nvfp4", steps=0), target)
    assert cli.main(["export", str(target), str(tmp_path / "twice")]) == 2
    assert "its weights are quantized already (compressed-tensors)" in capsys.readouterr().err
