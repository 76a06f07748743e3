"""Studies: what a file means, runs side by side that stop and go on, what is recorded and found again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte import cli
from halfbyte.train import config as configs
from halfbyte.train import jobs, league, loop, study
from halfbyte.train.signals import Interrupts
from halfbyte.train.treatment import applied, treatment_of

pytest.importorskip("matplotlib")
FILE = """
title = "A study"
options = ["--preset", "tiny", "--corpus", "{corpus}", "--cache", "{cache}", "--steps", "4", "--eval-every", "2"]
[[pieces]]
recipes = ["bf16", "nvfp4(rht=none)+late(0.5)"]
seeds = [0]
[[pieces]]
recipes = ["bf16", "nvfp4(rht=none)+late(0.5)"]
seeds = [1]
"""


@pytest.fixture
def file(folder, monkeypatch):
    monkeypatch.chdir(folder)
    path = folder / "some.toml"
    path.write_text(FILE.format(corpus=folder / "corpus", cache=folder / "cache"))
    return path


def change(path: Path, old: str, new: str, count: int = -1) -> Path:
    path.write_text(path.read_text().replace(old, new, count))
    return path


def test_a_file_is_a_study(file):
    found = study.read_study(file)
    assert found.recipes == ("bf16", "nvfp4(rht=none)+late(0.5)") and found.seeds == (0, 1)
    assert found.config.optim.steps == 4 and found.config.run.out == Path("runs/some")
    (first, second) = found.jobs(found.pieces[1])
    assert first.config.run.out == Path("runs/some/seed-1/bf16") and first.config.seed == 1
    assert applied(second.config, second.recipe).schedule().starts == (2,)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('title = "A study"', "", "title, options or pieces is missing"),
        ('title = "A study"', 'title = "A study"\ntile = 3', "'tile' is no field"),
        ("seeds = [1]", "", "a piece has recipes and seeds"),
        ('"nvfp4(rht=none)+late(0.5)"', '"nvfp5"', "is not a preset"),
        ('"nvfp4(rht=none)+late(0.5)"', '"best(1)"', "no best_of"),
        ('"--steps", "4"', '"--seed", "4"', "'--seed' is said for each run"),
        ("seeds = [0]", "seeds = []", "each with recipes and seeds"),
        ("seeds = [0]", "seeds = [0, 1, 0]", "seeds='0,1,0': name each once"),
        ("[[pieces]]", "[[pieces", "not TOML"),
        ('title = "A study"', "title = 3", r"title=3; give a text, as in title ="),
        ('title = "A study"', 'title = ""', r"title=''; give a text"),
        ('"--steps", "4"', '"--steps", 4', r"options=\['--preset', .*4, .*; give a list of texts"),
        ('title = "A study"', 'title = "A study"\nnoise_of = 3', "noise_of=3; give the folder"),
        ('title = "A study"', 'title = "A study"\nbest_of = ["a"]', r"best_of=\['a'\]; give the folder"),
        ("seeds = [0]", "seeds = 0", "seeds=0; give a list of whole numbers"),
        ("seeds = [0]", "seeds = [0.5]", r"seeds=\[0.5\]; give a list of whole numbers"),
        ("seeds = [0]", "seeds = [true]", r"seeds=\[True\]; give a list of whole numbers"),
        ("seeds = [0]", "seeds = [-1]", r"seeds=\[-1\]; give a list of whole numbers, 0 or more"),
        ('["bf16", "nvfp4(rht=none)+late(0.5)"]', '"bf16"', "recipes='bf16'; give a list of texts"),
        ('["bf16", "nvfp4(rht=none)+late(0.5)"]', "[3]", r"recipes=\[3\]; give a list of texts"),
    ],
)
def test_what_is_no_study(file, old, new, words):
    with pytest.raises(ValueError, match=words):
        study.read_study(change(file, old, new))


def test_pieces_are_tables(tmp_path):
    path = tmp_path / "some.toml"
    for pieces in ("3", "{recipes = ['bf16'], seeds = [0]}"):
        path.write_text(f"title = 'A study'\noptions = []\npieces = {pieces}\n")
        with pytest.raises(ValueError, match=r"some.toml: pieces=.*; give tables, each under a line \[\[pieces\]\]"):
            study.read_study(path)


@pytest.mark.parametrize(
    "option, words",
    [
        (["--minutes", "-1"], "minutes=-1.0: give 0 or more"),
        (["--minutes", "nan"], "minutes=nan: give 0 or more"),
        (["--workers", "-3"], "workers=-3: give a number of runs"),
    ],
)
def test_numbers_below_zero_are_refused_before_anything_runs(file, option, words, capfd):
    assert cli.main(["study", str(file), *option]) == 2
    assert words in capfd.readouterr().err and not Path("runs").exists()


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="give the TOML file of a study"):
        study.read_study(tmp_path / "none.toml")


def test_no_utf8(tmp_path):
    path = tmp_path / "some.toml"
    path.write_bytes(b"title = 'caf\xe9'")
    with pytest.raises(ValueError, match=r"some.toml: not UTF-8 \(byte 12\), which TOML is"):
        study.read_study(path)


def test_a_config_survives_being_written():
    config = replace(
        configs.one_gpu(),
        optim=configs.OptimConfig(clip=math.inf),
        tune=configs.TuneConfig(teacher=Path("a"), temperature=2.0),
        bits=3,
    )
    again = jobs.config_of(json.loads(json.dumps(jobs.values_of_config(config))))
    assert again == config and isinstance(again.run.out, Path) and isinstance(again.tune.teacher, Path)


@pytest.mark.slow
def test_pieces_stop_go_on_and_are_found_again(file, capfd):
    """The whole command: no time at all, then a piece, then the rest from what was recorded elsewhere."""
    command = ["study", str(file), "--workers", "2"]
    assert cli.main([*command, "--piece", "1", "--minutes", "0"]) == 3
    assert "left: bf16, seed 0, nvfp4(rht=none)+late(0.5), seed 0" in capfd.readouterr().out
    assert cli.main([*command, "--piece", "1", "--record", "kept"]) == 0
    assert "no intervals" in capfd.readouterr().out
    alone = applied(replace(study.read_study(file).config, seed=0), "nvfp4(rht=none)+late(0.5)")
    alone = replace(alone, run=replace(alone.run, out=Path("alone")))
    wanted = loop.train(alone, "nvfp4(rht=none)+late(0.5)", loop_data(alone))
    result = json.loads(Path("kept/seed-0/nvfp4(rht=none)+late(0.5)/result.json").read_text())
    assert result["held_out_loss"] == wanted["held_out_loss"], "a run beside others is a run of `halfbyte train`"
    assert cli.main([*command, "--out", "elsewhere", "--record", "kept"]) == 0
    said = capfd.readouterr().out
    assert "4 runs, 2 of them ended before" in said and "runs that ended before come from kept" in said
    values = json.loads(Path("kept/league.json").read_text())
    assert [row["seeds"] for row in values["rows"]] == [[0, 1], [0, 1]] and values["freedom"] == 1
    assert Path("kept/league.png").read_bytes().startswith(b"\x89PNG")
    assert "epochs of" in Path("kept/league.md").read_text()


def run_here(jobs_, where, folder, *, seconds, interrupts, say, done=None):
    """Stands in for `jobs.run_side_by_side` where processes, which take seconds to import torch, are not tested."""
    for job in jobs_:
        loop.train(applied(job.config, job.recipe), job.recipe, loop_data(job.config))
        done(job)
        say(f"{job.name}: ended")
    return jobs.Outcome(ended=[job.name for job in jobs_])


def loop_data(config):
    from halfbyte.train import data

    return data.load_data(config.data, config.run.cache)


def test_a_seed_is_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", "--preset", "tiny", "--recipes", "bf16", "--seeds", "3,03"]) == 2
    assert "seeds='3,3': name each once" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.full
def test_compare_with_seeds(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    options = ["--preset", "tiny", "--corpus", "corpus", "--cache", "cache", "--steps", "3", "--out", "runs/both"]
    assert (
        cli.main(["compare", "--recipes", "bf16,nvfp4(rht=none,sr=off)", "--seeds", "3,4", "--workers", "2", *options])
        == 0
    )
    said = capfd.readouterr().out
    assert "| `nvfp4(rht=none,sr=off)` | 2 |" in said and "±" in said
    assert Path("runs/both/seed-4/bf16/result.json").exists()
    assert cli.main(["compare", "--recipes", "bf16", "--seeds", "3,x", *options]) == 2
    assert "seeds='3,x'" in capfd.readouterr().err


def test_a_run_that_cannot_train_is_named(file, capfd):
    """And the others go on."""
    found = study.read_study(file)
    broken = replace(found.jobs(found.pieces[0])[0].config, device="cuda")
    bad = jobs.RunJob(name="broken", recipe="bf16", config=broken)
    said = []
    outcome = jobs.run_side_by_side(
        [bad], [None], Path("jobs"), seconds=math.inf, interrupts=Interrupts(), say=said.append
    )
    assert outcome.ended == [] and "device='cuda'" in outcome.failed["broken"]
    assert said[-1].startswith("broken: failed, exit status 2")


@pytest.mark.slow
def test_the_next_run_gets_ready_and_waits_for_its_turn(file):
    """On one GPU, here a number: what is written as training begins is younger than what the run before wrote."""
    found, said = study.read_study(file), []
    two = found.jobs(found.pieces[0])
    begun, begin, done = [], jobs._begin, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_begin", lambda job, *rest: begun.append((job.name, list(said))) or begin(job, *rest))
        outcome = jobs.run_side_by_side(
            two,
            [0],
            Path("jobs"),
            seconds=math.inf,
            interrupts=Interrupts(),
            say=said.append,
            done=lambda job: done.append(job.name),
        )
    names = [job.name for job in two]
    assert outcome.ended == names == done
    assert [line.partition(":")[0] for line in said] == [name for name in names for _ in range(2)]
    assert begun[1] == (names[1], []), "the second gets ready while the first trains"
    written = [(job.config.run.out / name).stat().st_mtime_ns for job in two for name in ("config.json", "result.json")]
    assert written == sorted(written)


@pytest.mark.slow
def test_a_run_whose_turn_never_comes_trains_nothing(file):
    found = study.read_study(file)
    job = found.jobs(found.pieces[0])[0]
    running = jobs._begin(job, None, Path("jobs"))
    running.process.stdin.close()  # as when the process that began it is killed
    assert running.process.wait(60) == 143 and "it was not trained" in running.output.read_text()
    assert not (job.config.run.out / "config.json").exists()


def test_what_ended_is_kept_at_once(file):
    """Whatever ends the study in the run behind it."""
    found = study.read_study(change(file, '"--steps", "4"', '"--steps", "24", "--log-every", "6"'))
    kept = Path("kept")

    def cut_off(*arguments, done, **rest):
        def end(job):
            done(job)
            raise RuntimeError("the machine is gone")

        return run_here(*arguments, done=end, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "run_side_by_side", cut_off)
        with pytest.raises(RuntimeError, match="the machine is gone"):
            study.run_study(found, found.pieces[:1], workers=1, minutes=9, interrupts=Interrupts(), kept=kept)
    assert sorted(path.name for path in (kept / "seed-0").iterdir()) == ["bf16"]
    whole, thin = (root / "seed-0" / "bf16" / "log.jsonl" for root in (found.config.run.out, kept))
    steps = [said["step"] for said in map(json.loads, thin.read_text().splitlines()) if said["kind"] == "step"]
    assert steps == [1, 10, 20] and len(whole.read_text().splitlines()) > 24
    assert league.read_results(kept, found.recipes, found.seeds).keys() == {("bf16", 0)}


def test_what_is_to_be_said_of_a_run_is_said_once_by_every_command(file, capfd, monkeypatch):
    """Here that a forward leaves 4 bits while the learning rate falls: steps 3 and 4 of 4 with a --decay of 0.75."""
    monkeypatch.setattr(jobs, "run_side_by_side", run_here)
    name, words = "nvfp4(rht=none)+late(0.5)", "from step 3 on, but the learning rate falls from step 2 on"
    more = ["--warmup", "0", "--decay", "0.75"]
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "run_side_by_side", lambda *given, **rest: jobs.Outcome())
        assert cli.main(["study", str(file), "--", *more]) == 0
    assert capfd.readouterr().out.count(words) == 1
    options = ["--preset", "tiny", "--corpus", "corpus", "--cache", "cache", "--steps", "4", *more]
    assert cli.main(["train", "--recipe", name, "--out", "runs/one", *options]) == 0
    assert capfd.readouterr().err.count(words) == 1
    assert cli.main(["compare", "--recipes", f"bf16,{name}", "--out", "runs/two", *options]) == 0
    assert capfd.readouterr().err.count(words) == 1


def test_minutes_count_the_time_that_reading_the_text_takes(file, monkeypatch):
    """Whoever has a machine for so long has it for no longer where a tokenizer is trained first."""
    found, load, clock, given = study.read_study(file), study.data.load_data, [100.0], []

    def load_slowly(*arguments):
        clock[0] += 90
        return load(*arguments)

    def note(*arguments, seconds, **rest):
        given.append(seconds)
        return jobs.Outcome(left=[job.name for job in arguments[0]])

    monkeypatch.setattr(study.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(study.data, "load_data", load_slowly)
    monkeypatch.setattr(jobs, "run_side_by_side", note)
    for minutes in (9, math.inf):
        study.run_study(found, found.pieces[:1], workers=1, minutes=minutes, interrupts=Interrupts())
    assert given == [9 * 60 - 90, math.inf]


def test_results_of_another_run_are_no_results_of_this_study(file, capfd, monkeypatch):
    """Neither in its own folder nor in one that keeps them; what another machine decided about itself may differ."""
    monkeypatch.setattr(jobs, "run_side_by_side", run_here)
    command = ["study", str(file), "--piece", "1", "--row", "bf16"]
    assert cli.main([*command, "--record", "kept"]) == 0
    (result,) = (Path(root) / "seed-0/bf16/result.json" for root in ["kept"])
    result.write_text(result.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    assert cli.main([*command, "--record", "kept", "--out", "elsewhere"]) == 0
    capfd.readouterr()
    for more, place in (
        (["--", "--steps", "6"], "runs/some"),
        (["--record", "kept", "--out", "third", "--", "--steps", "6"], "kept"),
        (["--record", "kept", "--out", "third", "--", "--corpus", __file__], "kept"),
    ):
        assert cli.main([*command, *more]) == 2
        said = capfd.readouterr().err
        option, what = "--record" if place == "kept" else "--out", "corpus_sha256: " if __file__ in more else "steps: 4"
        assert f"{place}/seed-0/bf16 holds the result of another run" in said and f"another {option}" in said
        assert what in said and not Path("third").exists()
    assert cli.main([*command, "--", "--steps", "6", "--overwrite"]) == 0


def test_a_folder_that_cannot_keep_is_named_before_training_and_ends_no_run_behind_it(file, capfd, monkeypatch):
    Path("taken").write_text("")
    command = ["study", str(file), "--piece", "1"]
    assert cli.main([*command, "--record", "taken"]) == 2
    assert "taken" in capfd.readouterr().err and not Path("runs").exists()
    own, calls = study.record, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return own(*arguments)

    monkeypatch.setattr(study, "record", full)
    monkeypatch.setattr(jobs, "run_side_by_side", run_here)
    assert cli.main([*command, "--record", "kept"]) == 0
    assert "bf16, seed 0: not kept in kept (No space left on device)" in capfd.readouterr().out
    assert len(league.read_results(Path("kept"), ("bf16", "nvfp4(rht=none)+late(0.5)"), (0,))) == 2


def test_a_log_keeps_what_is_no_step_as_it_is():
    lines = [b'{"kind": "step", "step": %d}\n' % step for step in (1, 2, 10)]
    other = [b'{"kind": "step"}\n', b"[3]\n", b'{"kind": "evaluation", "step": 3}\n', b'{"kind": "st']
    assert study._thinned(b"".join([*lines, *other])) == b"".join([lines[0], lines[2], *other])


def test_plan_trains_nothing(file, capsys):
    assert cli.main(["study", str(file), "--plan", "--row", "bf16", "--piece", "2", "--", "--steps", "9"]) == 0
    said = capsys.readouterr().out
    assert "bf16, seed 1" in said and "nvfp4" not in said
    assert not Path("runs").exists()
    assert "\n2  " in "\n" + said and "\n1  " not in "\n" + said, "its number is that of the file"
    for wrong, words in (
        (["--piece", "3"], "--piece 3: the study has pieces 1 to 2"),
        (["--piece", "0"], "--piece 0: the study has pieces 1 to 2"),
        (["--row", "mxfp8"], "--row 'mxfp8': the study has bf16"),
        (["--", "--preset", "nope"], "--preset nope is said by the study"),
    ):
        assert cli.main(["study", str(file), "--plan", *wrong]) == 2
        assert words in capsys.readouterr().err
    file.write_text(file.read_text() + '[[pieces]]\nrecipes = ["mxfp8"]\nseeds = [0]\n')
    assert cli.main(["study", str(file), "--plan", "--row", "mxfp8", "--piece", "1"]) == 2
    assert "--row 'mxfp8': is not in piece 1" in capsys.readouterr().err
    change(file, 'title = "A study"', 'title = "A study"\nnoise_of = "nowhere"')
    assert cli.main(["study", str(file), "--plan"]) == 0
    assert "noise_of='nowhere': no league is there" in capsys.readouterr().out


def test_more_workers_than_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert (
        jobs.workplaces("auto", 0) == [0, 1]
        and jobs.workplaces("cuda", 1) == [0]
        and jobs.workplaces("cpu", 3) == [None] * 3
    )
    with pytest.raises(ValueError, match="workers=3: this machine has 2 GPUs"):
        jobs.workplaces("auto", 3)


@pytest.mark.parametrize(
    "name, share",
    [
        ("bf16", 0.0),
        ("nvfp4@all", 1.0),
        ("nvfp4", 0.8),  # 10 blocks, two of which are kept
        ("nvfp4+late(0.25)", 0.8 * (0.75 + 0.25 * 2 / 3)),
        ("nvfp4_mxfp8_bwd@all", 1 / 3),
        ("nvfp4_forward@all", 1 / 3),
        ("mxfp8", 0.0),
    ],
)
def test_share_of_four_bits(name, share):
    config = replace(configs.one_gpu(), optim=configs.OptimConfig(steps=400))
    assert study.four_bit_share(config, name) == pytest.approx(share)


def test_channels_in_more_bits_count_against_it():
    config = replace(configs.one_gpu(), optim=configs.OptimConfig(steps=400))
    outliers, hot = (study.four_bit_share(config, name) for name in ("outlier_channels@all", "hot_channels@all"))
    C, H = 512, 1376
    weights = {C: C * (C + 2 * C // 2 + C + 2 * H), H: C * H}  # q, k and v of half the width, o, gate and up; down
    extra = sum(2 * size * (32 * math.ceil(0.05 * K / 32) / K) for K, size in weights.items()) / sum(weights.values())
    assert outliers == pytest.approx(hot) and hot == pytest.approx(3 / (3 + extra))


def test_league_of_nothing(file):
    found = study.write_league(study.read_study(file))
    assert all(row.gap is None for row in found.rows) and league.read_values(Path("runs/some"))["freedom"] == 0


def test_a_patch_of_the_forward_alone_is_two_products_more():
    """What the rounding of x took, and what that of w did, of 32 channels in 512."""
    recipe = replace(treatment_of("hot_channels").recipe, dgrad=None, wgrad=None)
    assert study._flops(recipe, 512) == (1.0, pytest.approx(3 + 2 * 32 / 512))


def write_run(root: Path, seed: int, *names: str) -> Path:
    """Write files of a run of bf16, each with the name of the root in it."""
    place = league.run_folder(root, "bf16", seed)
    place.mkdir(parents=True)
    for name in names:
        (place / name).write_text(root.name)
    return place


def test_what_has_begun_here_is_not_replaced_by_what_was_recorded(file):
    found, kept = study.read_study(file), Path("kept")
    here = write_run(found.config.run.out, 0, "config.json")
    for seed in (0, 1):
        write_run(kept, seed, "config.json", "result.json")
    assert study.restore(found, kept) == 1
    assert [path.name for path in here.iterdir()] == ["config.json"] and (here / "config.json").read_text() == "some"
    assert (league.run_folder(found.config.run.out, "bf16", 1) / "result.json").read_text() == "kept"


def test_a_result_is_kept_behind_all_else_of_its_run(file, monkeypatch):
    """A copy that is cut off is then none of a run that ended."""
    found, own, names = study.read_study(file), study.files.atomic, []
    everything = ("config.json", "layers.txt", "log.jsonl", "result.json")
    write_run(found.config.run.out, 0, *everything)
    monkeypatch.setattr(study.files, "atomic", lambda path: (names.append(path.name), own(path))[1])
    assert study.record(found, Path("kept")) == 1
    assert sorted(names) == sorted(everything) and names[-1] == "result.json"


@pytest.mark.parametrize(
    "failed, left, status", [({}, [], 0), ({}, ["a"], 3), ({"b": "no text"}, [], 1), ({"b": "no text"}, ["a"], 1)]
)
def test_a_run_that_failed_is_the_exit_status_whatever_is_left(file, monkeypatch, failed, left, status):
    found = study.read_study(file)
    empty = league.league({}, found.recipes, dict.fromkeys(found.recipes, 0.0))
    monkeypatch.setattr(study, "run_study", lambda *_, **__: (empty, jobs.Outcome(left=left, failed=failed)))
    assert study.run_and_print(found, found.pieces, workers=1, interrupts=Interrupts()) == status


def test_a_spread_that_is_taken_from_a_study_is_called_by_its_title(file):
    Path("other").mkdir()
    Path("other/league.json").write_text(json.dumps({"title": "Another", "deviation": 0.25, "freedom": 4, "rows": []}))
    found = study.write_league(study.read_study(change(file, "[[pieces]]", 'noise_of = "other"\n[[pieces]]', 1)))
    assert (found.deviation, found.freedom, found.pooled_from) == (0.25, 4, "Another")


def test_the_best_of_a_study_are_others_than_those_named_before_them(file):
    gaps = {"bf16": 0.0, "mxfp8": 0.1, "nvfp4": 0.2, "rl": 0.3}
    Path("other").mkdir()
    Path("other/league.json").write_text(json.dumps({"rows": [{"recipe": n, "gap": gap} for n, gap in gaps.items()]}))
    change(file, "[[pieces]]", 'best_of = "other"\n[[pieces]]', 1)
    found = study.read_study(change(file, '"bf16", "nvfp4(rht=none)+late(0.5)"', '"bf16", "mxfp8", "best(1)"'))
    assert found.recipes == ("bf16", "mxfp8", "nvfp4")


def _other_data(here, there):
    """Return what a study says in which two runs differ, whose data are these."""
    ours, theirs = ({"seed": 3, **one} for one in (here, there))
    return configs.differences(study._wherever(ours), study._wherever(theirs))


def test_texts_may_lie_elsewhere_on_every_machine():
    texts = {"corpus_sha256": "c0", "held_out_sha256": "de"}
    here = {"data": {"corpus": "/a/train.txt", "held_out_corpus": "/a/test.txt", "batch": 8}, "device": "cpu"} | texts
    there = {"data": {"corpus": "/b/x.txt", "held_out_corpus": "/b/y.txt", "batch": 8}, "device": "cuda"} | texts
    assert _other_data(here, there) == []
    assert _other_data(here, there | {"corpus_sha256": "c1"}) == [
        "corpus_sha256: 'c1' there, 'c0' here",
        "data.corpus: '/b/x.txt' there, '/a/train.txt' here",
    ]
    assert _other_data(here, there | {"data": there["data"] | {"batch": 4}}) == ["data.batch: 4 there, 8 here"]
