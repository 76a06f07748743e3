"""A run that diverged anywhere has no loss and no gap, and every place that speaks of it says at which step."""

import json
import math
import re
import signal
from dataclasses import replace

import pytest
import torch

from halfbyte import cli, files
from halfbyte.train import compare, config, log, loop, page, signals, treatment

UNSEEN, HELD_OUT_ONLY = ord("#"), ord("@")
"""Bytes that the corpus lacks; those that stand at its end alone."""


def strict(path):
    """Read JSON as the standard has it: without NaN and Infinity."""

    def refuse(token):
        raise AssertionError(f"{path}: {token} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def poisoned(run, byte, **changes):
    """A run of two steps in which the embedding of one byte is infinite."""
    one, data = run(steps=2, eval_every=1, **changes)
    trainer = loop.Trainer(one, "bf16", data)
    with torch.no_grad():
        trainer.model.embed_tokens.weight[byte, 0] = math.inf
    return one, trainer


def lost(result, step, what):
    return (result["is_diverged"], result["diverged_at"], result["diverged_in"]) == (True, step, what) and (
        result["held_out_loss"] is None
    )


@pytest.mark.parametrize("log_every", [1, 3])
def test_the_first_step_that_is_not_finite_is_named_however_seldom_it_is_read(run, log_every):
    one, data = run(steps=6, lr=1e30, log_every=log_every, eval_every=6, checkpoint_every=6)
    result = loop.train(one, "bf16", data)
    assert lost(result, 2, "gradient norm")
    steps, losses = log.curve(one.run.out, "step")
    assert steps == [1, 2] and all(map(math.isfinite, losses))
    assert log.read_log(one.run.out)[-1] == {"kind": "diverged", "step": 2, "loss": None, "what": "gradient norm"}
    assert strict(one.run.out / loop.RESULT) == result == loop.train(one, "bf16", data)


def test_a_validation_that_is_no_number_ends_the_run(run, folder):
    (folder / "corpus").rename(folder / "words")
    text = "".join(path.read_text() for path in sorted((folder / "words").iterdir()))
    (folder / "corpus").write_text(text + "@" * (len(text) // 40))  # the last 2 % and more
    one, trainer = poisoned(run, HELD_OUT_ONLY)
    assert lost(trainer.train(), 1, "held-out loss")
    assert not list((one.run.out / loop.CHECKPOINTS).glob("*.pt"))
    assert [line["loss"] for line in log.read_log(one.run.out) if line["kind"] == "eval"] == [None]


def test_parameters_after_the_last_step_are_looked_at(run):
    one, trainer = poisoned(run, UNSEEN)
    one = replace(one, eval_every=2)
    trainer.config = one
    assert lost(trainer.train(), 2, "parameters")
    (loss,) = log.curve(one.run.out, "eval")[1]
    assert math.isfinite(loss)


@pytest.mark.parametrize("stopped", [False, True])
def test_parameters_are_looked_at_before_a_checkpoint(run, stopped):
    """The checkpoint of such weights could not be loaded, and would take the place of one that can."""
    interrupts = signals.Interrupts()
    one, data = run(steps=6, lr=1e39, warmup=0.0, eval_every=6, checkpoint_every=6 if stopped else 1)
    trainer = loop.Trainer(one, "bf16", data, interrupts=interrupts)
    if stopped:
        trainer.model.lm_head.weight.register_hook(lambda gradient: interrupts.receive(signal.SIGTERM, None))
        with pytest.raises(signals.Stopped, match="stopped by SIGTERM"):
            trainer.train()
    else:
        trainer.train()
    assert lost(strict(one.run.out / loop.RESULT), 1, "parameters")
    assert not list((one.run.out / loop.CHECKPOINTS).glob("*.pt"))


def test_a_norm_that_is_infinite_once_is_a_divergence(run):
    """Clipping by it makes a zero gradient of a finite one, so that the loss goes on as if nothing had been."""
    one, data = run(steps=4, log_every=1)
    trainer = loop.Trainer(one, "bf16", data)

    def blow_up(gradient):
        return gradient * 1e38 if trainer.step == 1 else gradient

    trainer.model.lm_head.weight.register_hook(blow_up)
    assert lost(trainer.train(), 2, "gradient norm")


def compared(folder, *options):
    """Run `halfbyte compare` on a corpus of words; return the exit status and the folder of the results."""
    command = ["compare", "--preset", "tiny", "--steps", "4", "--eval-every", "1", "--corpus", str(folder / "corpus")]
    out = folder / "run"
    return cli.main([*command, "--out", str(out), "--cache", str(folder / "cache"), *options]), out


def test_a_baseline_that_diverged_has_no_gaps_and_status_1(folder, capsys):
    pytest.importorskip("matplotlib")
    options = ("--lr", "1e30", "--recipes", "bf16,mxfp8")
    for again in (False, True):
        status, out = compared(folder, *options)
        assert status == 1
        for row in strict(out / compare.RESULTS)["results"]:
            assert row["gap_percent"] is None and lost(row, 2, "gradient norm")
        table = (out / compare.TABLE).read_text()
        printed = capsys.readouterr().out
        for text in (table, printed):
            assert text.count("diverged at step 2 |") == 2 and "%" not in text and "5.54" not in text.split("|", 1)[1]
            assert text.count("there are no gaps without it") == 1
            assert "bf16 diverged at step 2 (gradient norm not finite): there are no gaps" in text
        assert ("bf16: finished before (diverged at step 2), kept" in printed) is again


def test_results_of_older_versions_are_judged_by_what_they_hold(run):
    """They kept the loss of the validation before the run broke, or the token NaN."""
    pytest.importorskip("matplotlib")
    one, _ = run(steps=2)
    names = ("bf16", "mxfp8", "nvfp4")
    compare.compare(one, names)
    new = ("diverged_at", "diverged_in")
    changed = {"mxfp8": {"is_diverged": True}, "nvfp4": {"held_out_loss": math.nan}}
    for name, changes in changed.items():
        path = one.run.out / name / loop.RESULT
        old = {key: value for key, value in strict(path).items() if key not in new} | changes
        path.write_text(json.dumps(old))
    base, *others = compare.compare(one, names)
    assert base["gap_percent"] == 0 and "diverged" in compare.table([base, *others])
    for row in (*others, *strict(one.run.out / compare.RESULTS)["results"][1:]):
        assert lost(row, 2, "training loss") and row["gap_percent"] is None
    assert compare.failed([base, *others])


def row(name, **changes):
    values = {"recipe": name, "held_out_loss": 2.0, "is_diverged": False, "steps": 9, "tokens_per_second": 1e4}
    return values | {"peak_memory_bytes": 3 << 30, "saved_activation_bytes": 5 << 20} | changes


LOST = {"held_out_loss": None, "is_diverged": True, "diverged_at": 7, "diverged_in": "training loss"}


@pytest.mark.parametrize(
    ("rows", "failed", "said"),
    [
        ([row("bf16"), row("nvfp4")], False, []),
        ([row("bf16"), row("nvfp4", **LOST)], True, ["nvfp4 diverged at step 7 (training loss not finite)."]),
        (
            [row("bf16"), row("nvfp4"), row("naive_fp4@all", **LOST)],
            False,
            ["naive_fp4@all, a control that is meant to lose, diverged at step 7 (training loss not finite)."],
        ),
        (
            [row("naive_fp4", **LOST), row("bf16")],
            True,
            [
                "naive_fp4, a control that is meant to lose, diverged at step 7 (training loss not finite): "
                "there are no gaps without it."
            ],
        ),
    ],
)
def test_only_a_control_may_diverge(rows, failed, said):
    compare.with_gaps(rows)
    assert compare.failed(rows) is failed and compare.remarks(rows) == said
    gaps = [each["gap_percent"] for each in rows]
    assert gaps == [None if each["is_diverged"] or rows[0]["is_diverged"] else 0 for each in rows]
    text = compare.table(rows)
    assert text.count("diverged at step 7") == len(said) and text.count("2.0000") == len(rows) - len(said)


def test_which_recipes_are_controls():
    names = ("naive_fp4", "naive_fp4@all", "bf16/naive_fp4", "nvfp4", "nvfp4@all", "bf16/nvfp4")
    assert [treatment.treatment_of(name).is_control for name in names] == [True, True, True, False, False, False]


def test_the_picture_says_it_too(run, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    made = []
    build = figure.Figure.__init__

    def keep(self, *args, **options):
        made.append(self)
        build(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "__init__", keep)
    one, _ = run(steps=4, lr=1e30, eval_every=1)
    compare.compare(one, ("bf16", "mxfp8"))
    losses, gaps = made[-1].axes
    labels = [text.get_text() for text in losses.get_legend().get_texts()]
    assert labels == ["bf16  diverged at step 2", "mxfp8  diverged at step 2"]
    assert gaps.get_title().endswith("none: bf16 diverged at step 2")
    assert len(gaps.lines) == 1 and not gaps.texts  # the line of the baseline


def rows_of_page(folder):
    """The cells of the table of results on the page of a run or a comparison."""
    table = page.page(folder).partition('aria-label="results"')[2].partition("</table>")[0]
    return [re.findall("<td>(.*?)</td>", row)[:3] for row in table.split("<tr>")[2:]]


def test_the_page_says_it_too(run):
    pytest.importorskip("matplotlib")
    one, _ = run(steps=4, lr=1e30, eval_every=1)
    compare.compare(one, ("bf16", "mxfp8"))
    for (name, said, steps), expected in zip(rows_of_page(one.run.out), ("bf16", "mxfp8"), strict=True):
        last = json.loads((one.run.out / name / log.NAME).read_text().splitlines()[-2])
        assert (name, steps, last["kind"], last["step"], last["grad_norm"]) == (expected, "2", "step", 2, None)
        loss = f"last finite training loss {last['loss']:.4f} at step 2"
        assert said == f"diverged at step 2 (gradient norm not finite); {loss}"


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([5.0, 4.25, None], "last finite training loss 4.2500 at step 2"),
        ([5.0, 4.25, 1e9], "last finite training loss 1000000000.0000 at step 3"),
        ([None], "its log has no finite training loss"),
        ([], "its log has no finite training loss"),
    ],
)
def test_the_page_says_the_last_loss_that_is_a_number(tmp_path, losses, said):
    """Validations between, which are of another text, are no training losses."""
    (tmp_path / loop.CONFIG).write_text(json.dumps({"identity": {"recipe": "nvfp4"}}))
    result = {"identity": {"recipe": "nvfp4"}, "tokens": 8, "seconds": 1, **row("nvfp4", **LOST)}
    (tmp_path / loop.RESULT).write_text(json.dumps(result))
    lines = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    lines.insert(2, {"kind": "eval", "step": 2, "loss": 3.0})
    (tmp_path / log.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert rows_of_page(tmp_path) == [["nvfp4", f"diverged at step 7 (training loss not finite); {said}", "9"]]


def test_json_holds_no_token_that_json_lacks(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": math.nan, "b": [1.5, -math.inf, {"c": (math.inf, "NaN")}], "d": True})
    assert strict(tmp_path / "a.json") == {"a": None, "b": [1.5, None, {"c": [None, "NaN"]}], "d": True}


def test_clipping_nothing_is_a_run_that_can_be_found_again(run):
    one, data = run(steps=2, clip=math.inf)
    result = loop.train(one, "bf16", data)
    assert strict(one.run.out / loop.CONFIG)["identity"]["optim"]["clip"] == "inf"
    assert not result["is_diverged"] and loop.train(one, "bf16", data) == result
    with pytest.raises(ValueError, match="optim.clip: 'inf' there, 1.0 here"):
        loop.train(replace(one, optim=replace(one.optim, clip=1.0)), "bf16", data)
    for wrong in ({"lr": math.inf}, {"eps": math.inf}):
        with pytest.raises(ValueError, match="=inf: give a finite number"):
            config.OptimConfig(**wrong)
