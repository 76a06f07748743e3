"""The folder of a run: emptied whole or not at all, extended where no step changes, and named with what computed it."""

import json
import os
from dataclasses import replace

import pytest
import torch
from runs import losses, stop_after, weights

import halfbyte as hb
from halfbyte.train import loop
from halfbyte.train.data import load_data

CONSTANT = {"warmup": 0.0, "decay": 0.0}


def with_steps(config, steps, **changes):
    return replace(config, optim=replace(config.optim, steps=steps, **changes))


def overwriting(config):
    return replace(config, run=replace(config.run, overwrite=True))


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def stopped(run):
    """A run that stopped after its first checkpoint: config and data."""
    config, data = run(steps=4, checkpoint_every=2, eval_every=4)
    stop_after(loop.Trainer(config, "bf16", data), 2)
    return config, data


@pytest.mark.parametrize("obstacle", ["link", "link of a file", "folder in place of a file", "not deletable"])
def test_overwrite_deletes_everything_or_nothing(stopped, obstacle):
    config, data = stopped
    out, elsewhere = config.run.out, config.run.out.parent / "elsewhere"
    if obstacle == "link":
        (out / "checkpoints").rename(elsewhere)
        (out / "checkpoints").symlink_to(elsewhere)
        culprit, reason = out / "checkpoints", f"a symbolic link to {elsewhere}"
    elif obstacle == "link of a file":
        (out / "layers.txt").unlink()
        (out / "layers.txt").symlink_to(out.parent / "corpus" / "part00.txt")
        culprit, reason = out / "layers.txt", "a symbolic link"
    elif obstacle == "folder in place of a file":
        (out / "result.json").mkdir()
        culprit, reason = out / "result.json", "not what a run makes"
    else:  # the last of all files: what went before it must come back
        (out / ".config.json.replaced.tmp" / "full").mkdir(parents=True)
        culprit, reason = out / "config.json", "cannot be deleted"
    before = contents(out)
    with pytest.raises(ValueError, match="--overwrite deleted nothing") as error:
        loop.train(overwriting(config), "bf16", data)
    assert str(error.value).startswith(f"{culprit}: {reason}") and "\n" not in str(error.value)
    assert contents(out) == before and (obstacle != "link" or list(elsewhere.glob("*.pt")))


def test_overwrite_takes_away_last_what_says_whose_run_it_is(stopped, monkeypatch):
    """A process may be killed between any two of these: what is then left must not pass for a run of its own."""
    config, data = stopped
    taken, rename = [], os.rename
    monkeypatch.setattr(os, "rename", lambda path, away: (taken.append(path.name), rename(path, away)))
    loop.train(overwriting(with_steps(config, 1)), "bf16", data)
    assert {"step-00000002.pt", "layers.txt", "log.jsonl"} < set(taken) and taken[-1] == "config.json"


def test_overwrite_leaves_the_files_of_others(stopped):
    config, data = stopped
    out = config.run.out
    (out / "notes.md").write_text("mine")
    (out / "checkpoints" / "best.pt").write_bytes(b"a copy")
    old = (out / "log.jsonl").read_bytes()
    loop.train(overwriting(with_steps(config, 1)), "bf16", data)
    assert (out / "notes.md").read_text() == "mine" and (out / "checkpoints" / "best.pt").read_bytes() == b"a copy"
    assert [p.name for p in (out / "checkpoints").glob("step-*")] == ["step-00000001.pt"]
    assert old.count(b"\n") > (out / "log.jsonl").read_bytes().count(b'"step"}') and not list(out.rglob(".*.tmp"))


def test_leftovers_of_killed_writers_go_everywhere(stopped):
    config, _ = stopped
    out, cache = config.run.out, config.run.cache
    killed = [out / ".log.jsonl.abcd1234.tmp", out / ".result.json.abcd1234.tmp"]
    killed += [out / "checkpoints" / f".{name}.abcd1234.tmp" for name in ("step-00000004.pt", "latest")]
    killed += [cache / f".{next(cache.glob('*.tokens')).name}.abcd1234.tmp", cache / f".{'0' * 16}-bpe300.json.x.tmp"]
    killed.append(out / "tensorboard" / ".events.out.tfevents.1.host.abcd1234.tmp")
    foreign = [out / ".vimrc.tmp", cache / ".session.abcd1234.tmp"]
    for path in (*killed, *foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    data = load_data(config.data, cache)
    loop.train(config, "bf16", data)
    assert [path for path in killed if path.exists()] == [] and all(path.exists() for path in foreign)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_finished_run_goes_on_as_the_longer_one(run, folder, recipe):
    config, data = run(steps=3, checkpoint_every=2, eval_every=6, log_every=1, **CONSTANT)
    loop.train(config, recipe, data)
    longer = with_steps(config, 6)
    whole = replace(longer, run=replace(config.run, out=folder / "whole"))
    result, expected = (loop.train(one, recipe, data) for one in (longer, whole))
    assert result["held_out_loss"] == expected["held_out_loss"] and result["steps"] == 6
    assert losses(longer)[0] == losses(whole)[0] and losses(longer)[0][0] == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(longer).items())
    with pytest.raises(
        ValueError, match=r"optim.steps: 6 there, 3 here: 6 steps are done there; give --steps 6 or more"
    ):
        loop.train(config, recipe, data)


def test_a_stopped_extension_goes_on(run):
    config, data = run(steps=2, checkpoint_every=2, **CONSTANT)
    loop.train(config, "bf16", data)
    longer = with_steps(config, 6)
    stop_after(loop.Trainer(longer, "bf16", data), 4)
    assert not (config.run.out / "result.json").exists()  # it would speak of two steps
    assert loop.train(longer, "bf16", data)["steps"] == 6


def test_a_warm_up_of_as_many_steps_and_a_decay_at_the_end_extend(run):
    """The end that `wsd` is made for: a constant rate, and the decay when it is wanted."""
    config, data = run(steps=4, checkpoint_every=2, warmup=0.5, decay=0.0, log_every=1)
    loop.train(config, "bf16", data)
    loop.train(with_steps(config, 8, warmup=0.25, decay=0.5), "bf16", data)
    rates = [json.loads(line)["lr"] for line in (config.run.out / "log.jsonl").open() if '"step", ' in line]
    assert rates == pytest.approx([5e-3 * share for share in (1 / 3, 2 / 3, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5)])


@pytest.mark.parametrize(
    ("course", "reason"),
    [
        (
            {"warmup": 0.5, "decay": 0.0},
            "step 1, .* the warm-up is a share of the steps, 1 there and 2 here: give --warmup",
        ),
        ({"warmup": 0.0, "decay": 0.5}, "step 2, .* has begun to decay; .* needs --decay 0"),
        ({"warmup": 0.0, "schedule": "cosine"}, "step 2, .* a cosine falls over the whole run"),
    ],
)
def test_a_course_that_would_have_been_another_is_refused_by_name(run, course, reason):
    config, data = run(steps=2, checkpoint_every=2, **course)
    loop.train(config, "bf16", data)
    before = contents(config.run.out)
    with pytest.raises(ValueError, match=f"optim.steps: 2 there, 4 here: the learning rate of {reason}"):
        loop.train(with_steps(config, 4), "bf16", data)
    assert contents(config.run.out) == before


def test_a_schedule_of_recipes_extends_by_steps_not_by_shares(run, folder):
    config, data = run(steps=4, checkpoint_every=2, recipe_schedule="0.5:bf16", **CONSTANT)
    loop.train(config, "mxfp8", data)
    with pytest.raises(ValueError, match="step 3, which is done, would follow another recipe: shares .* as a step"):
        loop.train(with_steps(config, 8), "mxfp8", data)
    by_step = replace(with_steps(config, 8), recipe_schedule="2:bf16,6:mxfp8")
    whole = replace(by_step, run=replace(config.run, out=folder / "whole"))
    results = [loop.train(one, "mxfp8", data) for one in (by_step, whole)]
    assert results[0]["held_out_loss"] == results[1]["held_out_loss"]


def test_other_changes_with_the_steps_are_another_run(run):
    config, data = run(steps=2, checkpoint_every=2, **CONSTANT)
    loop.train(config, "bf16", data)
    with pytest.raises(ValueError, match=r"optim.lr: 0.005 there, 0.1 here; optim.steps: 2 there, 4 here"):
        loop.train(with_steps(config, 4, lr=0.1), "bf16", data)
    for path in (config.run.out / "checkpoints").glob("step-*"):
        path.unlink()
    with pytest.raises(ValueError, match="its checkpoints are gone"):
        loop.train(with_steps(config, 4), "bf16", data)


def test_more_steps_do_not_mend_a_run_that_diverged(run):
    """Whose checkpoint of before is still there."""
    config, data = run(steps=2, checkpoint_every=2, **CONSTANT)
    loop.train(config, "bf16", data)
    edit(config.run.out / "result.json", is_diverged=True, diverged_at=2, diverged_in="gradient norm")
    with pytest.raises(ValueError, match=r"holds another run \(it diverged at step 2, which more steps do not mend\)"):
        loop.train(with_steps(config, 4), "bf16", data)


def test_a_result_of_another_environment_is_kept_and_said(run, capsys):
    config, data = run(steps=2)
    result = loop.train(config, "bf16", data)
    path = config.run.out / "result.json"
    (now,) = result["environments"]
    assert now["halfbyte"] == hb.__version__ and now["torch"] == str(torch.__version__) and now["dtype"] == "float32"
    assert now["threads"] == torch.get_num_threads() and now["device"]
    capsys.readouterr()
    loop.train(config, "bf16", data)
    assert not capsys.readouterr().err
    edit(path, environments=[now | {"torch": "2.0.1"}, now | {"step": 1, "threads": 64}])
    assert loop.train(config, "bf16", data)["held_out_loss"] == result["held_out_loss"]
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"torch 2.0.1 there, {torch.__version__} here" in error
    assert f"threads 64 there, {torch.get_num_threads()} here" in error and "--overwrite trains again" in error


def test_folders_from_before_are_of_an_unknown_version(run, capsys):
    """They hold what config.json said of the machine, or nothing; they are neither refused nor trusted silently."""
    config, data = run(steps=2)
    loop.train(config, "bf16", data)
    for name in ("result.json", "config.json"):
        facts = json.loads((config.run.out / name).read_text())
        del facts["environments"]
        facts.get("environment", {}).pop("halfbyte", None)
        (config.run.out / name).write_text(json.dumps(facts))
    capsys.readouterr()
    loop.train(config, "bf16", data)
    error = capsys.readouterr().err
    assert f"(halfbyte of an unknown version there, {hb.__version__} here)" in error and error.count("\n") == 1


def test_going_on_in_another_environment_is_said_and_recorded(stopped, capsys):
    config, data = stopped
    (path,) = (config.run.out / "checkpoints").glob("*.pt")
    content = torch.load(path, weights_only=True)
    content["environments"][0]["halfbyte"] = "0.0.1"
    torch.save(content, path)
    capsys.readouterr()
    result = loop.train(config, "bf16", data)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"(halfbyte 0.0.1 there, {hb.__version__} here)" in error
    assert "goes on from step 2, but not with the bits of an undisturbed run" in error
    assert [(e["step"], e["halfbyte"]) for e in result["environments"]] == [(0, "0.0.1"), (2, hb.__version__)]
    loop.train(config, "bf16", data)
    assert "halfbyte 0.0.1 there" in capsys.readouterr().err


def test_a_finished_run_needs_no_right_to_write(run):
    config, data = run(steps=1)
    result = loop.train(config, "bf16", data)
    (config.run.out / ".lock").unlink()
    assert loop.train(config, "bf16", data) == result and not os.path.lexists(config.run.out / ".lock")


def test_a_run_on_other_tokens_of_the_text_is_another(stopped):
    """As after another release of the package that trains tokenizers."""
    config, data = stopped
    other = replace(data, summary=data.summary | {"tokens_sha256": "0" * 64})
    with pytest.raises(ValueError, match="holds a run on other tokens of this text"):
        loop.train(config, "bf16", other)
    text = replace(other, summary=other.summary | {"sha256": "0" * 64})
    with pytest.raises(ValueError, match=r"holds another run \(.*corpus_sha256"):
        loop.train(config, "bf16", text)
