"""What `fuse`, `compile` and `graph` become by themselves: every case from facts given, then whole commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import losses, stop_after
from torch import nn

import halfbyte as hb
from halfbyte import cli
from halfbyte.ops.backends import BackendStatus
from halfbyte.train import auto, commands, compare, graphs, loop
from halfbyte.train import config as configs
from halfbyte.train import model as models
from halfbyte.train.auto import Facts

CPU, GPU = Facts(device="cpu"), Facts(device="cuda")
OLD_GPU = Facts(device="cuda", no_kernels="sm_75 is older than sm_80")
ENOUGH = {"steps": auto.STEPS_THAT_PAY}
SELECTIVE, FULL = ({"run": configs.RunConfig(recompute=kind)} for kind in ("selective", "full"))
TWO = {"recipe_schedule": "0.9:bf16/nvfp4"}
THERE_AND_BACK = {"recipe_schedule": "0.2:bf16/nvfp4,0.4:mxfp8,0.6:bf16/nvfp4"}


def shape(steps=auto.STEPS_THAT_PAY, **changes):
    return configs.TrainConfig(optim=configs.OptimConfig(steps=steps), **changes)


def with_steps(steps):
    return shape(steps=steps)


CASES = {
    "a CPU": (shape(), CPU, {"fuse": "a CPU", "compile": "a CPU", "graph": "a CPU"}),
    "a GPU": (shape(), GPU, {}),
    "a GPU without kernels": (shape(), OLD_GPU, dict.fromkeys(auto.OPTIONS, "sm_75 is older than sm_80")),
    "a mixture": (shape(model="moe-tiny"), GPU, {"compile": "mixtures of experts have not been timed"}),
    "few steps": (with_steps(99), GPU, {"compile": "99 steps do not pay for compiling, 100 do"}),
    "no step after the capture": (with_steps(4), GPU, {"compile": "4 steps", "graph": "captured after 3 steps.*has 4"}),
    "a step after the capture": (with_steps(5), GPU, {"compile": "5 steps"}),
    "few steps of each recipe": (shape(199, **TWO), GPU, {"compile": "199 steps for 2 recipes.*200 do"}),
    "enough of each": (shape(200, **TWO), GPU, {}),
    "a recipe that comes again": (shape(300, **THERE_AND_BACK), GPU, {}),
    "too few for three": (shape(299, **THERE_AND_BACK), GPU, {"compile": "299 steps for 3 recipes"}),
    "all recomputed": (shape(**FULL), GPU, {}),
    "recomputed but for some operations": (shape(**SELECTIVE), GPU, {"compile": "recompute='selective'"}),
    "accumulated, cached": (
        shape(data=configs.DataConfig(accumulate=4), run=configs.RunConfig(cache_weights=True)),
        GPU,
        {},
    ),
    "fp32": (shape(dtype="float32"), GPU, {}),
}


@pytest.mark.parametrize(("config", "facts", "off"), CASES.values(), ids=CASES)
def test_each_case(config, facts, off, monkeypatch):
    """Nothing but the arguments counts: no look at the machine."""
    monkeypatch.setattr(torch, "cuda", None)
    choices = auto.choose_options(config, facts, {})
    assert [option for option, choice in choices.items() if not choice.is_on] == [o for o in auto.OPTIONS if o in off]
    for option, words in off.items():
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(choices[option].reason)
    printed = auto.lines(config, facts, choices)
    assert len(printed) == (0 if facts is CPU else len(off))
    for line, option in zip(printed, off, strict=False):
        is_refused = option == "compile" and config.run.recompute == "selective"
        remedy = "--recompute full goes with it" if is_refused else f"--{option} on overrides that"
        assert line == f"{option}: off, {choices[option].reason}; {remedy}"
    done = auto.apply(config, choices)
    expected = ["off" if o in off else "on" for o in ("fuse", "compile")] + ["off" if "graph" in off else "auto"]
    assert [done.fuse, done.compile, done.run.graph] == expected


def test_blocks_over_codes_that_fsdp2_gathers_are_compiled_and_those_over_codes_alone_are_not():
    codes = shape(mesh=configs.MeshConfig(dp_shard=2, dp_replicate=1, weights="nvfp4"))
    choices = auto.choose_options(codes, GPU, {})
    assert [choices[option].is_on for option in auto.OPTIONS] == [True, True, False]
    assert auto.apply(codes, choices).compile == "on"
    with pytest.raises(ValueError, match="weights='nvfp4': one process has whole weights.*leave --weights out"):
        configs.MeshConfig(weights="nvfp4").over(1)
    both = configs.MeshConfig(weights="nvfp4").over(2)
    assert (both.dp_replicate, both.dp_shard) == (2, 1)
    alone = shape(mesh=both)
    choices = auto.choose_options(alone, GPU, {})
    assert [choices[option].is_on for option in auto.OPTIONS] == [True, False, False]
    line = auto.lines(alone, GPU, choices)[0]
    assert line == f"compile: off, {auto.WITH_CODES}; it goes with --weights plain, or with --dp-shard"
    assert auto.apply(alone, choices).compile == "off"
    with pytest.raises(ValueError, match="compile='on' with weights='nvfp4' and dp_shard=1.*leave one of them out"):
        replace(alone, compile="on")


def test_as_many_recipes_as_torch_keeps_compiled(monkeypatch):
    config = shape(400, **THERE_AND_BACK)
    monkeypatch.setattr(auto, "MOST_GRAPHS", 18)
    assert auto.choose_options(config, GPU, {})["compile"].is_on
    monkeypatch.setattr(auto, "MOST_GRAPHS", 17)
    assert (
        "the schedule has 3 recipes, of which torch keeps 2" in auto.choose_options(config, GPU, {})["compile"].reason
    )


@pytest.mark.parametrize("facts", [CPU, GPU, OLD_GPU], ids=["cpu", "gpu", "old"])
@pytest.mark.parametrize("value", ["on", "off"])
def test_what_is_asked_for_is_done_without_a_word(facts, value):
    """Also against the run in the folder, which then is refused by name. Only a CPU, which has no graphs, says so."""
    config = shape(4, model="moe-tiny", fuse=value, compile=value, run=configs.RunConfig(graph=value))
    choices = auto.choose_options(config, facts, {"fuse": value == "off", "compile": value == "off"})
    assert {choice.is_on for choice in choices.values()} == {value == "on"}
    said = ("graph: off, a CPU has no CUDA graphs; leave --graph out",) if facts is CPU and value == "on" else ()
    assert auto.apply(config, choices) == config and auto.lines(config, facts, choices) == said


@pytest.mark.parametrize("option", auto.OPTIONS)
def test_a_word_that_is_none_is_named_with_its_option(option, tmp_path, capsys):
    assert cli.main(["train", f"--{option}", "maybe", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"invalid choice 'maybe' for argument '--{option}'. Expected one of ('auto', 'on', 'off')" in said


@pytest.mark.parametrize(("facts", "begun"), [(GPU, False), (CPU, True)])
def test_a_run_keeps_what_it_began_with(facts, begun):
    config = shape()
    choices = auto.choose_options(config, facts, {"fuse": begun, "compile": begun})
    assert [choices[o].is_on for o in auto.OPTIONS] == [begun, begun, facts is GPU]
    printed = auto.lines(config, facts, choices)
    word = "on" if begun else "off"
    why = "as in the run that its folder holds; --overwrite starts anew"
    assert printed == tuple(f"{option}: {word}, {why}" for option in auto.OF_THE_RESULT)
    same = auto.choose_options(config, facts, {"fuse": facts is GPU, "compile": facts is GPU})
    assert same == auto.choose_options(config, facts, {}) and not auto.lines(config, facts, same)


def test_facts_say_why_there_are_no_kernels(monkeypatch):
    assert auto.facts(torch.device("cpu")) == CPU

    def backends(available):
        return lambda device: tuple(
            BackendStatus(name=n, available=available, reason="sm_75 is older than sm_80") for n in ("native", "triton")
        )

    monkeypatch.setattr(hb, "backends", backends(False))
    assert auto.facts(torch.device("cuda")) == OLD_GPU
    monkeypatch.setattr(hb, "backends", backends(True))
    assert auto.facts(torch.device("cuda")) == GPU


def test_memory_for_a_graph_and_a_validation_beside_it():
    """10 held, 30 more in a step: the graph keeps 30, validation takes up to 30."""
    unit = 1 << 30
    assert not graphs.shortage(graphs.Memory(held=10 * unit, peak=40 * unit, available=70 * unit))
    words = graphs.shortage(graphs.Memory(held=10 * unit, peak=40 * unit, available=70 * unit - 1))
    assert "may take 70.0 GiB, and the GPU has 70.0 GiB" in words


@pytest.mark.parametrize(("must_fit", "available", "captures"), [(True, 6, 0), (True, 7, 1), (False, 6, 1)])
def test_a_graph_that_may_not_fit_is_left_out_in_one_line(monkeypatch, capsys, must_fit, available, captures):
    """The stream and the graph are stand-ins; which steps run, and what is said, are not."""
    monkeypatch.setattr(graphs.Memory, "now", lambda device: graphs.Memory(1, 4, available))
    ran, captured = [], []
    step = graphs.GraphedStep(lambda x: ran.append(x) or (x + 1,), torch.device("cpu"), must_fit=must_fit)
    step._stream, step._aside = "stream", lambda stream, inputs: step._compute(*inputs)

    class Graph:
        def replay(self):
            captured.append(self)

    def capture(inputs):
        step._graph, step._inputs, step._outputs = Graph(), [x.clone() for x in inputs], (inputs[0] + 1,)

    step._capture = capture
    results = [float(step(torch.tensor(float(i)))[0]) for i in range(6)]
    assert len(captured) == captures * 3 and len(ran) == 6 - 3 * captures
    assert captures or results == [1, 2, 3, 4, 5, 6]
    error = capsys.readouterr().err
    assert error.count("\n") == 1 - captures and ("graph: off, a captured step" in error) == (not captures)


@pytest.fixture
def pretended(monkeypatch):
    """A function that makes a run on the CPU choose as on a GPU; compiled blocks run as torch traces them."""

    def pretend(steps_that_pay=2, facts=GPU):
        monkeypatch.setattr(auto, "facts", lambda device: facts)
        monkeypatch.setattr(auto, "STEPS_THAT_PAY", steps_that_pay)

    compiled = []

    def compile(block, **options):
        compiled.append(block)
        nn.Module.compile(block, backend="eager", **options)

    monkeypatch.setattr(models.Block, "compile", compile)
    pretend.compiled = compiled
    return pretend


def command(folder, *more, name="train", steps=6):
    where = ["--corpus", str(folder / "corpus"), "--out", str(folder / "run"), "--cache", str(folder / "cache")]
    return cli.main([name, "--preset", "tiny", "--steps", str(steps), *where, *more])


def identity(out):
    return json.loads((out / "config.json").read_text())["identity"]


@pytest.mark.parametrize(
    ("arguments", "facts", "wanted", "said"),
    [
        ([], CPU, "two_cores", ""),
        (["--model", "125m"], CPU, "two_cores", ""),
        ([], GPU, "small_gpu", "for this GPU;"),
        (["--model", "moe-10m"], GPU, "small_gpu", "for this GPU;"),
        (["--model", "125m"], GPU, "one_gpu", "a model of 125M parameters"),
        (["--model=moe-60m", "--preset", "auto"], GPU, "one_gpu", "a model of 60M parameters"),
        (["--model", "125m", "--preset", "two_cores"], GPU, "two_cores", ""),
        (["--model", "125m", "--preset", "small_gpu"], CPU, "small_gpu", ""),
        (["--model", "125m"], OLD_GPU, "two_cores", "on this GPU (sm_75 is older than sm_80)"),
    ],
)
def test_the_preset_of_a_command_that_names_none(monkeypatch, arguments, facts, wanted, said):
    pytest.importorskip("tyro")
    monkeypatch.setattr(auto, "facts", lambda device: facts)
    out = configs.RunConfig(out=Path("runs/there")).out
    options, why = commands._parse(commands.Compare, arguments, out)
    preset = configs.training_preset(wanted)
    model = next((one.split("=")[-1] for one in arguments if one.split("=")[-1] in models.PRESETS), preset.model)
    assert options.config == replace(preset, model=model, run=replace(preset.run, out=out))
    assert (said in why and f"preset: {wanted}, " in why) if said else not why


def test_a_gpu_trains_large_models_half_a_batch_at_a_time(monkeypatch):
    monkeypatch.setattr(auto, "facts", lambda device: GPU)
    whole, (half, _) = configs.one_gpu().data, auto.preset_here("1b")
    assert (half.data.batch, half.data.accumulate) == (whole.batch / 2, whole.accumulate * 2)
    assert half.data.tokens_per_step == whole.tokens_per_step and auto.preset_here("300m")[0].data == whole


def test_a_study_has_the_presets_of_its_file_on_any_machine(monkeypatch):
    pytest.importorskip("tyro")
    monkeypatch.setattr(auto, "facts", lambda device: GPU)
    out = Path("runs/there")
    found = commands.config_of_options(["--model", "125m"], out)
    assert found == replace(configs.two_cores(), model="125m", run=replace(configs.two_cores().run, out=out))
    assert commands.config_of_options(["--preset=one_gpu"], out).data == configs.one_gpu().data


def test_the_default_command_on_a_pretended_gpu(folder, run, pretended, capsys):
    pytest.importorskip("tyro")
    pretended()
    assert command(folder) == 0
    assert not capsys.readouterr().err
    assert len(pretended.compiled) == models.model_preset("tiny").layers
    found = identity(folder / "run")
    assert found["fuse"] is True and found["compile"] is True
    assert json.loads((folder / "run" / "config.json").read_text())["run"]["graph"] == "auto"
    same, data = run(steps=6, fuse="on", compile="off", out=folder / "same")  # tracing changes no bit
    loop.train(same, "nvfp4", data)
    default = replace(same, run=replace(same.run, out=folder / "run"))
    assert losses(default) == losses(same)
    plain, _ = run(steps=6, fuse="off", compile="off", out=folder / "plain")
    loop.train(plain, "nvfp4", data)
    assert losses(default) != losses(plain)
    for a, b in zip(losses(default), losses(plain), strict=True):
        assert all(abs(x - y) < 0.02 * y for x, y in zip(a[1], b[1], strict=True))


def test_reasons_come_once_and_not_for_a_result_that_is_kept(folder, pretended, capsys):
    pytest.importorskip("tyro")
    pretended(steps_that_pay=7)
    for printed in (["compile: off, 6 steps do not pay for compiling, 7 do; --compile on overrides that"], []):
        assert command(folder) == 0
        assert capsys.readouterr().err.splitlines() == printed
    assert not pretended.compiled
    pretended(steps_that_pay=6)
    (folder / "run" / "config.json").unlink()  # what ended is known by its result alone
    assert command(folder) == 0
    assert not pretended.compiled and not (folder / "run" / "config.json").exists()


def test_a_run_from_before_auto_goes_on_as_it_began(run, pretended, capsys):
    """Its identity has truth values, and its steps were those of all off."""
    whole, data = run(steps=6, out=run()[0].run.out.parent / "whole")
    loop.train(whole, "nvfp4", data)
    config, _ = run(steps=6, checkpoint_every=3)
    stop_after(loop.Trainer(config, "nvfp4", data), 3)
    assert {identity(config.run.out)[name] for name in ("fuse", "compile")} == {False}
    path = config.run.out / "config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"run": facts["run"] | {"graph": "False"}}))
    pretended()
    loop.train(config, "nvfp4", data)
    assert losses(config) == losses(whole)
    assert capsys.readouterr().err.splitlines() == [
        "fuse: off, as in the run that its folder holds; --overwrite starts anew",
        "compile: off, as in the run that its folder holds; --overwrite starts anew",
    ]
    assert not pretended.compiled and loop.finished(config, "nvfp4", data)
    loop.train(replace(config, run=replace(config.run, overwrite=True)), "nvfp4", data)
    assert identity(config.run.out)["fuse"] is True and pretended.compiled


def test_a_run_of_a_gpu_goes_on_elsewhere_as_it_began(run, pretended, monkeypatch, capsys):
    pretended()
    whole, data = run(steps=6, out=run()[0].run.out.parent / "whole")
    loop.train(whole, "nvfp4", data)
    config, _ = run(steps=6, checkpoint_every=3)
    stop_after(loop.Trainer(config, "nvfp4", data), 3)
    assert not capsys.readouterr().err
    monkeypatch.setattr(auto, "facts", lambda device: CPU)
    with pytest.raises(ValueError, match=r"holds another run \(fuse: on there, off here\)"):
        loop.train(replace(config, fuse="off"), "nvfp4", data)
    loop.train(config, "nvfp4", data)
    assert losses(config) == losses(whole)
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in printed] == ["fuse: on", "compile: on"]


def test_a_comparison_runs_all_alike(folder, run, pretended, capsys):
    pytest.importorskip("matplotlib")
    pretended(steps_that_pay=3)
    config, _ = run(steps=5, recipe_schedule="2:naive_fp4")  # nvfp4 follows two recipes, bf16 one
    results = compare.compare(config, ("bf16", "nvfp4"))
    assert [(r["identity"]["fuse"], r["identity"]["compile"]) for r in results] == [(True, False)] * 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "compile: off, 5 steps for 2 recipes" in said.err
    assert ", GEMMs in float32, fused; recipe schedule" in said.out.splitlines()[0]
    again = compare.compare(config, ("bf16", "nvfp4"))
    assert again == results and not capsys.readouterr().err


def test_a_comparison_from_before_auto_goes_on_as_it_began(folder, run, pretended, capsys):
    pytest.importorskip("matplotlib")
    config, _ = run(steps=3)
    compare.compare(config, ("bf16",))
    capsys.readouterr()
    pretended()
    results = compare.compare(config, ("mxfp8", "bf16"))
    assert [(r["identity"]["fuse"], r["identity"]["compile"]) for r in results] == [(False, False)] * 2
    said = capsys.readouterr()
    assert said.err.count("as in the run that its folder holds") == 2
    assert "fused" not in said.out and "bf16: finished before, kept" in said.out


def test_compiled_runs_of_a_comparison_leave_no_graphs_behind(run, pretended):
    """Torch stops at a number of graphs for all blocks of a process together."""
    pytest.importorskip("matplotlib")
    pretended()
    config, _ = run(steps=2)
    counted = []

    def compile(block, **options):
        counted.append(len(torch._dynamo.eval_frame._debug_get_cache_entry_list(models.Block.forward.__code__)))
        nn.Module.compile(block, backend="eager", **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.Block, "compile", compile)
        results = compare.compare(config, ("bf16", "bf16@all"))
    assert results[0]["identity"]["compile"] and len(counted) == 4 and not any(counted)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("auto", "auto", "auto")),
        (["--compile"], ("auto", "on", "auto")),
        (["--compile", "--fuse", "--graph"], ("on", "on", "on")),
        (["--no-compile", "--no-graph", "--no-fuse"], ("off", "off", "off")),
        (["--compile", "off", "--graph=on", "--fuse=auto"], ("auto", "off", "on")),
        (["--graph", "--steps", "3", "--compile", "auto"], ("auto", "auto", "on")),
    ],
)
@pytest.mark.parametrize("kind", ["Train", "Compare"])
def test_options_with_and_without_a_value(kind, arguments, expected, tmp_path):
    pytest.importorskip("tyro")
    from halfbyte.train import commands

    config = commands._parse(getattr(commands, kind), arguments, tmp_path)[0].config
    assert (config.fuse, config.compile, config.run.graph) == expected


def test_compiled_blocks_within_selective_checkpoints_are_refused(run, pretended):
    """Inductor's code, run under the checkpoint's mode, writes into GEMM outputs that the mode keeps."""
    with pytest.raises(ValueError, match=r"recompute='selective' with compile='on'.*use recompute='full' or"):
        run(compile="on", recompute="selective")
    config, data = run(compile="on", steps=4, checkpoint_every=2)
    stop_after(loop.Trainer(config, "bf16", data), 2)
    follows, _ = run(steps=4, recompute="selective")
    with pytest.raises(ValueError, match="recompute='selective' with compile='on'"):
        loop.train(follows, "bf16", data)
    goes_on, _ = run(steps=4, recompute="full")
    assert loop.train(goes_on, "bf16", data)["steps"] == 4


@pytest.mark.parametrize("value", [True, "yes", None])
@pytest.mark.parametrize("kind", [configs.TrainConfig, configs.RunConfig])
def test_another_value_is_named_with_those_that_are(kind, value):
    name = "fuse" if kind is configs.TrainConfig else "graph"
    with pytest.raises(ValueError, match=f"{name}={value!r}: give 'auto', 'on' or 'off'"):
        kind(**{name: value})
