"""`halfbyte export` of a folder of `halfbyte train`: the run's bytes, in a Llama that computes what its model does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

import transformers
from export_decoder import stored

import halfbyte as hb
from halfbyte import cli
from halfbyte.train import config as configs
from halfbyte.train import data, loop
from halfbyte.train import model as models
from halfbyte.train.subject import load_subject


def trained(path, recipe, tokenizer="bytes", **changed):
    """Train three steps in path/run."""
    (path / "text.txt").write_text("def f(x): return x + 1  # the same line again\n" * 400)
    tiny = configs.tiny()
    text = replace(tiny.data, corpus=str(path / "text.txt"), tokenizer=tokenizer)
    run = replace(tiny.run, out=path / "run", cache=path / "cache")
    one = replace(tiny, data=text, run=run, optim=replace(tiny.optim, steps=3), **changed)
    loop.train(one, recipe, data.load_data(one.data, run.cache))
    return path / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), "nvfp4@all")


def weights(folder):
    return torch.load(sorted((folder / "checkpoints").glob("*.pt"))[-1], weights_only=True)["model"]


def test_bytes_and_logits_are_those_of_the_run(folder, tmp_path, capsys):
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert "0 % of the quantized bytes differ" in capsys.readouterr().out
    tensors = stored(tmp_path / "out")
    decoder = models.Decoder(models.model_preset("tiny"))
    decoder.load_state_dict(weights(folder))
    hb.quantize_(decoder, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    assert len([name for name in tensors if name.endswith("weight_packed")]) == 15  # 14, and the head
    for name, layer in decoder.named_modules():
        if isinstance(layer, hb.nn.Linear):
            amax = hb.nn.sibling_amax.shared_amax(layer, None) if layer.amax_group else None
            own = hb.quantize(layer.weight.detach(), hb.NVFP4(block=(16, 16)), amax=amax)
            key = name if name == "lm_head" else f"model.{name}"
            assert torch.equal(tensors[f"{key}.weight_packed"], own.qdata), name
    tokens = torch.arange(24).view(1, 24)
    from halfbyte.integrations.run_folder import load_run

    llama = load_run(folder, json.loads((folder / "config.json").read_text())).model
    with torch.no_grad(), hb.high_precision(decoder), hb.high_precision(llama):
        torch.testing.assert_close(llama(input_ids=tokens).logits, decoder(tokens), rtol=1e-4, atol=1e-4)


def test_refusals(folder, tmp_path, capsys):
    def fails(source, *options) -> str:
        assert cli.main(["export", str(source), str(tmp_path / "out"), *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and not (tmp_path / "out").exists()
        return error

    assert "--recipe=nvfp4: " in (said := fails(folder, "--recipe", "nvfp4")) and "says its own; leave it out" in said
    said = fails(folder, "--compute-dtype", "bfloat16")
    assert "--compute-dtype=bfloat16: " in said and "a run of halfbyte train in float32; leave it out" in said
    config = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for change, words in (
        ({"recipe": "bf16", "recipe_key": hb.recipes.bf16().key}, "the run trained in bf16, so there are no bytes"),
        ({"shape": config["identity"]["shape"] | {"moe": {"experts": 8}}}, "a run of halfbyte train with experts"),
    ):
        (other / "config.json").write_text(json.dumps(config | {"identity": config["identity"] | change}))
        (other / "checkpoints").mkdir(exist_ok=True)
        saved = sorted((folder / "checkpoints").glob("*.pt"))[-1]
        (other / "checkpoints" / saved.name).write_bytes(saved.read_bytes())
        assert words in fails(other)
    (other / "config.json").write_text(json.dumps(config))
    (other / "checkpoints" / saved.name).write_bytes(b"PK")
    assert "cannot be read" in fails(other)
    (other / "checkpoints" / "step-99999999").mkdir()
    assert "a checkpoint of several ranks; go on with one process" in fails(other)
    for path in sorted((other / "checkpoints").iterdir()):
        path.rmdir() if path.is_dir() else path.unlink()
    assert "a run of halfbyte train without a checkpoint" in fails(other)


def test_a_run_on_a_bpe_has_its_vocabulary(tmp_path):
    run = trained(tmp_path, "nvfp4", tokenizer="bpe:272")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    rows = weights(run)["lm_head.weight"]
    assert rows.shape[0] == json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] > 256
    assert torch.equal(stored(tmp_path / "out")["lm_head.weight"], rows)


WORDS = "def f(x):\n\treturn 'é – 漢字 🙂'  # <|end|>, Ā and ÿ\r\n"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:272"])
def test_the_tokenizer_is_that_of_the_run(tmp_path, tokenizer, monkeypatch):
    """Token for token what the run encoded, from any folder; a text is calibrated with; engines stop where one ends."""
    run = trained(tmp_path, "nvfp4", tokenizer=tokenizer)
    (tmp_path / "sample.txt").write_text(WORDS * 9)
    monkeypatch.chdir(tmp_path / "cache")
    static = ["--activations", "static", "--calibrate", str(tmp_path / "sample.txt"), "--length", "64"]
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--format", "modelopt", *static]) == 0
    assert [name for name in stored(tmp_path / "out") if name.endswith("input_scale")]
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    own = load_subject(run)
    *expected, end = own.encode(WORDS)
    assert found(WORDS)["input_ids"] == expected and found.decode(expected) == WORDS
    if tokenizer == "bytes":
        assert expected == list(WORDS.encode())
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == found.eos_token_id == end == 0 and config.bos_token_id is None


def test_a_tokenizer_that_is_gone_is_named(tmp_path, capsys):
    run = trained(tmp_path, "nvfp4", tokenizer="bpe:272")
    (file,) = (tmp_path / "cache").glob("*-bpe272.json")
    file.write_text("{")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err and not (tmp_path / "out").exists()
    file.unlink()
    (tmp_path / "sample.txt").write_text(WORDS)
    static = ["--activations", "static", "--calibrate", str(tmp_path / "sample.txt")]
    assert cli.main(["export", str(run), str(tmp_path / "out"), *static]) == 2
    assert "is gone; the run's command" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0, "weights need none"
    assert "written without its tokenizer: " in capsys.readouterr().err
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_what_is_changed_about_a_run_leaves_its_layers(tmp_path):
    """Behind `@all` nothing stays in high precision, whatever follows."""
    run = trained(tmp_path, "nvfp4@all+bits(1)", bits=1)
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert len([name for name in stored(tmp_path / "out") if name.endswith("weight_packed")]) == 15


def test_the_recipe_is_that_of_the_last_step(tmp_path, capsys):
    """A schedule that ended in 1x16 wrote blocks of 1x16; one that left NVFP4 has no bytes."""
    run = trained(tmp_path, "nvfp4@all", recipe_schedule="2:nvfp4_forward")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    weight = weights(run)["lm_head.weight"]
    assert torch.equal(stored(tmp_path / "out")["lm_head.weight_packed"], hb.quantize(weight, hb.NVFP4()).qdata)
    capsys.readouterr()
    late = tmp_path / "late"
    late.mkdir()
    run = trained(late, "nvfp4", recipe_schedule="2:bf16/nvfp4")
    assert cli.main(["export", str(run), str(late / "out")]) == 2
    error = capsys.readouterr().err
    assert "the run trained in bf16/nvfp4 at its end, by its schedule, so there are no bytes of NVFP4" in error
    assert not (late / "out").exists()


@pytest.mark.parametrize(("step", "wanted"), [(1, "nvfp4"), (2, "nvfp4"), (3, "four_over_six"), (4, "four_over_six")])
def test_the_recipe_is_that_of_the_last_step_not_of_the_next(tmp_path, step, wanted):
    """Of steps 0, 1, …, of which 2 is the first under another recipe and 4 the first in bf16."""
    from halfbyte.integrations.run_folder import _last_recipe

    schedule = hb.Schedule([(2, hb.recipes.four_over_six()), (4, hb.recipes.bf16())])
    identity = {"recipe": "nvfp4", "recipe_key": hb.recipes.nvfp4().key}
    saved = {"step": step, "run_state": {"schedule": schedule.state_dict()}}
    assert _last_recipe(tmp_path, identity, saved) == getattr(hb.recipes, wanted)()
    with pytest.raises(ValueError, match="trained in bf16 at its end, by its schedule, so there are no bytes of NVFP4"):
        _last_recipe(tmp_path, identity, saved | {"step": 5})
    of_x = hb.Recipe(fprop=hb.GemmSpec(a=hb.NVFP4()))
    with pytest.raises(ValueError, match="trained in activations, so there are no bytes of NVFP4"):
        _last_recipe(tmp_path, {"recipe": "activations", "recipe_key": of_x.key}, {"step": 1, "run_state": {}})
