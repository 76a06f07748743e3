"""Recipes with options in one word, and changes of a run behind them: what they stand for, what is refused."""

import csv
import dataclasses
import re
import sys

import pytest
import torch

import halfbyte as hb
from halfbyte import cli, recipes
from halfbyte.train import commands, loop, options
from halfbyte.train import config as configs
from halfbyte.train.asked import read_options
from halfbyte.train.optim import learning_rate
from halfbyte.train.treatment import applied, check_command, notes, refuse_twins, schedules_of, treatment_of

NVFP4 = recipes.nvfp4
WEIGHTS = recipes.four_over_six(scope="weights")
ROW_MXFP8 = dataclasses.replace(
    recipes.mxfp8(), fprop=hb.GemmSpec(a=hb.NVFP4(outer="row"), b=hb.NVFP4()), backward="dequantized"
)
"""Tokens of their own amax forward, 8 bits of what the forward multiplied backward."""


@pytest.mark.parametrize(
    "text, recipe",
    [
        *((name, preset()) for name, preset in recipes.PRESETS.items()),
        ("nvfp4()", NVFP4()),
        ("nvfp4(sr=off)", NVFP4(stochastic_rounding=False)),
        ("nvfp4( rht = none , tiles=1x16 )", NVFP4(hadamard=None, weight_block=(1, 16))),
        ("nvfp4(rht=64)", NVFP4(hadamard=hb.Hadamard(size=64))),
        ("nvfp4(rht=fresh128)", NVFP4(hadamard=hb.Hadamard(size=128, signs="fresh"))),
        ("nvfp4(rht=+--+16)", NVFP4(hadamard=hb.Hadamard(size=16, signs="+--+"))),
        ("nvfp4(headroom=on,outer=row)", NVFP4(fp4_max_gradient=6 * 16 / 17, activation_outer="row")),
        ("nvfp4(mean=split,saved=stochastic)", NVFP4(activation_mean="split", saved_rounding="stochastic")),
        ("nvfp4(stochastic_rounding=off)", NVFP4(stochastic_rounding=False)),
        ("four_over_six(scope=weights)", WEIGHTS),
        (
            "four_over_six(error=mse,candidates=0.875:1:1.25:1.5,base=nvfp4(tiles=1x16,sr=off))",
            recipes.four_over_six(
                error="mse",
                candidates=(0.875, 1, 1.25, 1.5),
                base=NVFP4(weight_block=(1, 16), stochastic_rounding=False),
            ),
        ),
        ("rl(gradients=mxfp8,batch_invariant=off)", recipes.rl(gradients="mxfp8", batch_invariant=False)),
        ("rl(gradients=none)", recipes.rl()),
        ("row_scaled(scope=activations,base=nvfp4)", recipes.row_scaled(scope="activations", base="nvfp4")),
        ("outlier_channels(share=0.1)", recipes.outlier_channels(share=0.1)),
        ("hot_channels(base=four_over_six)", recipes.hot_channels(base="four_over_six")),
        ("nvfp4(amax=delayed)", recipes.delayed_amax()),
        ("four_over_six(amax=delayed:16,scope=weights)", recipes.delayed_amax(every=16, base=WEIGHTS)),
        ("nvfp4(amax=delayed:16:1.5)", recipes.delayed_amax(every=16, margin=1.5)),
        ("mxfp8(amax=current)", recipes.mxfp8()),
        ("delayed_amax(every=16,margin=1.5,base=four_over_six)", "four_over_six(amax=delayed:16:1.5)"),
        ("delayed_amax", "nvfp4(amax=delayed)"),
        ("four_over_six(base=quartet2)", "four_over_six(base=quartet2(backward=dequantized))"),
        *(
            (f"{name}(backward=dequantized)", dataclasses.replace(recipes.get(name), backward="dequantized"))
            for name in ("nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "mxfp8")
        ),
        ("quartet2(backward=original)", recipes.quartet2(backward="original")),
        (
            "row_scaled(scope=activations,backward=dequantized)",
            dataclasses.replace(recipes.row_scaled(scope="activations"), backward="dequantized"),
        ),
        ("nvfp4_mxfp8_bwd(outer=row,backward=dequantized)", ROW_MXFP8),
        ("nvfp4_forward(outer=row,backward=dequantized)/mxfp8", ROW_MXFP8),
        ("qat(activations=per-token)/nvfp4_mxfp8_bwd", ROW_MXFP8),
        ("bf16/nvfp4(rht=none)", recipes.mixed("bf16", NVFP4(hadamard=None))),
    ],
)
def test_a_word_is_its_call(text, recipe):
    assert options.read(text) == (options.read(recipe) if isinstance(recipe, str) else recipe)


@pytest.mark.parametrize(
    "text, words",
    [
        ("fp4", "is not a preset; use one of bf16, .*row_scaled"),
        ("nvfp4(rht=3)", "rht='3'; write none, 16, 64"),
        ("nvfp4(tile=1x16)", "no option 'tile'; it has sr, rht, tiles"),
        ("bf16(sr=on)", "no option 'sr'; it has amax, backward$"),
        ("quartet2(sr=on)", "no option 'sr'; it has rht, backward, amax$"),
        ("bf16(backward=dequantized)", r"recipe='bf16\(backward=dequantized\)': backward=.*nothing is dequantized"),
        ("nvfp4(backward=quantized)", r"backward='quantized': use one of 'original', 'dequantized'"),
        ("nvfp4(mean=split,backward=dequantized)", "a dequantized backward would lack the mean; use 'kept'"),
        ("hot_channels(backward=dequantized)", "would lack these channels; use None"),
        ("qat/outlier_channels", "backward='dequantized' in the forward, channels=.*backward='original' or .*=None"),
        ("qat(activations=none)/nvfp4(mean=split)", "activation_mean='split' in the backward.*backward='original' or"),
        ("delayed_amax(every=often)", "every='often'; write a number of steps"),
        ("delayed_amax(margin=0.5)", "margin=0.5: give a factor"),
        ("nvfp4(amax=earlier)", "amax='earlier'; write current, delayed, delayed:16"),
        ("nvfp4(amax=delayed:0)", "amax='delayed:0'; write"),
        ("nvfp4(amax=delayed:1:2:3)", "amax='delayed:1:2:3'; write"),
        ("mxfp8(amax=delayed)", r"recipe='mxfp8\(amax=delayed\)': amax=Delayed.*none has one"),
        ("nvfp4(amax=delayed,mean=split)", "amax=Delayed.*activation_mean='kept'"),
        ("nvfp4(sr=maybe)", "sr='maybe'; write on, off"),
        ("nvfp4(rht=64", r"the last \) is missing"),
        ("nvfp4(rht=64,sr=off,hadamard=none)", "gives one option twice"),
        ("four_over_six(base=fp4)", "recipe='fp4' is not a preset"),
        ("bf16/nvfp4/mxfp8", "is not a preset"),
        ("nvfp4(outer=rows)", "outer"),
        ("nvfp4+late(2)", r"'late\(2\)' is no change of a run; use schedule"),
        ("nvfp4+late(much)", r"could not convert"),
        ("nvfp4+lr(0)", "no change of a run"),
        ("nvfp4+order(2)", "no change of a run"),
        ("nvfp4+bits(0)", "no change of a run"),
        ("nvfp4+schedule(0.5:bf16", r"the last \) is missing"),
        ("nvfp4+late(0.1)+schedule", "'schedule' says again"),
        ("nvfp4+bits(1)+bits(2)", "says again"),
        ("row_scaled(base=mxfp8)", "it has no NVFP4 operand there that this changes"),
        ("bf16+late(0.5)", r"'late\(0.5\)' \(its forward is in high precision from the start"),
        ("bf16/nvfp4@all+late(0.5)", "its forward is in high precision from the start"),
    ],
)
def test_refused(text, words):
    with pytest.raises(ValueError, match=words):
        treatment_of(text)


@pytest.mark.parametrize("name", ["bf16+bits(1)", "mxfp8+bits(2)", "nvfp4(sr=off)+bits(1)"])
def test_other_bits_of_a_run_that_draws_none_are_refused(name):
    """Their gaps would be 0, and the interval of a league would take them for scatter."""
    config = configs.tiny()
    with pytest.raises(ValueError, match="draws no random bits, so that bits"):
        applied(config, name)
    later = dataclasses.replace(config, recipe_schedule="0.5:nvfp4")
    assert applied(later, name).bits and applied(config, "quartet2+bits(1)").bits


def test_several_seeds_and_one_are_refused():
    """One of them would have been ignored."""
    with pytest.raises(ValueError, match="seed: --seeds says them all; leave --seed out"):
        commands.compare_command(["--preset", "tiny", "--recipes", "bf16,nvfp4", "--seeds", "0,1", "--seed", "3"])


def test_changes_of_a_run():
    config = dataclasses.replace(configs.tiny(), seed=3)
    assert applied(config, "nvfp4") == config
    late = applied(config, "nvfp4(rht=64)+late(0.25)")
    assert late.schedule().starts == (9,)
    assert late.schedule().at(11) == recipes.mixed("bf16", NVFP4(hadamard=hb.Hadamard(size=64)))
    own = applied(config, "nvfp4+schedule(3:bf16/nvfp4(sr=off,rht=none),6:bf16)").schedule()
    assert own.at(4) == recipes.mixed("bf16", NVFP4(hadamard=None, stochastic_rounding=False))
    assert own.at(6) == recipes.bf16()
    bits = applied(config, "nvfp4+bits(2)")
    assert (config.quantization_seed, bits.quantization_seed, bits.seed) == (3, 3 + (2 << 32), 3)
    assert applied(config, "bf16+lr(4e-3)").optim == dataclasses.replace(config.optim, lr=4e-3)
    halves = applied(config, "bf16+order")
    assert (halves.data.batch, halves.data.accumulate, halves.eval_batches) == (2, 2, 4)
    assert halves.tokens == config.tokens
    with pytest.raises(ValueError, match="there is no schedule; give --recipe-schedule"):
        applied(config, "nvfp4+schedule")
    with pytest.raises(ValueError, match="batch=3 has no halves"):
        applied(dataclasses.replace(config, data=configs.DataConfig(batch=3)), "nvfp4+order")


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("outlier_channels", {}, "experts do not take channels apart"),
        ("nvfp4+schedule(0.5:hot_channels(share=0.1))", {}, "experts do not take channels apart"),
        ("nvfp4", {"recipe_schedule": "auto:nvfp4(mean=split)"}, "experts do not split a mean off"),
        ("nvfp4", {"recipe_schedule": "0.5:mxfp8", "dispatch": "nvfp4"}, "dispatch='nvfp4': .*; use --dispatch plain"),
        (
            "nvfp4+schedule(0.5:nvfp4(amax=delayed:4))",
            {"tp": 2},
            r"experts that ranks share by features \(tp\) quantize",
        ),
    ],
)
def test_experts_that_could_not_follow_in_mid_run_are_refused_before_it(name, changes, words):
    mesh = configs.MeshConfig(ep=2, dispatch=changes.pop("dispatch")) if "dispatch" in changes else configs.MeshConfig()
    mesh = dataclasses.replace(mesh, tp=changes.pop("tp", 1))
    config = dataclasses.replace(configs.tiny(), model="moe-2m", mesh=mesh, **changes)
    with pytest.raises(ValueError, match=words):
        applied(config, name)
    late = dataclasses.replace(config, recipe_schedule="")
    assert applied(late, "nvfp4+late(0.5)").schedule() is not None


@pytest.mark.parametrize(
    "name, backward", [("rl/mxfp8", "mxfp8"), ("rl/nvfp4(rht=none)", "nvfp4(rht=none)"), ("rl", "rl")]
)
def test_a_late_forward_keeps_the_backward_of_a_recipe_of_two(name, backward):
    config = configs.TrainConfig()
    (_, late), *others = applied(config, f"{name}+late(0.25)").schedule().changes
    assert not others and late.fprop == hb.recipes.bf16().fprop
    assert (late.dgrad, late.wgrad) == (options.read(backward).dgrad, options.read(backward).wgrad)
    assert applied(dataclasses.replace(config, model="tiny", mesh=configs.MeshConfig()), name).model == "tiny"


@pytest.mark.parametrize("name", ["outlier_channels", "nvfp4(mean=split)"])
def test_python_refuses_them_as_the_command_does(run, name):
    """And a run that is there already is still there."""
    config, data = run(steps=2, model="moe-tiny", overwrite=True)
    config.run.out.mkdir()
    (config.run.out / "result.json").write_text("{}")
    with pytest.raises(ValueError, match="experts"):
        loop.train(config, name, data)
    assert (config.run.out / "result.json").exists()


def test_who_follows_the_schedule_of_a_comparison():
    config = dataclasses.replace(configs.tiny(), recipe_schedule="0.5:bf16")
    assert schedules_of(config, ("bf16", "nvfp4")) == {"bf16": "", "nvfp4": "0.5:bf16"}
    asked = schedules_of(config, ("bf16", "nvfp4", "nvfp4+schedule", "mxfp8+late(0.5)"))
    assert asked == {"bf16": "", "nvfp4": "", "nvfp4+schedule": "0.5:bf16", "mxfp8+late(0.5)": "0.5:bf16/mxfp8"}


@pytest.mark.parametrize(
    "recipe, schedule, words",
    [
        ("nvfp4+late(0.2)", "0.5:bf16", r"brings the schedule 0.8:bf16/nvfp4; leave out one"),
        ("nvfp4+schedule(0.5:mxfp8)", "auto:bf16", "brings the schedule 0.5:mxfp8"),
        ("nvfp4", "0.5:nvfp4", "it changes to the recipe that the run has by then"),
        ("nvfp4", "0.2:bf16,0.5:bf16/bf16", "it changes to the recipe that the run has by then"),
        ("nvfp4(rht=16)", "auto:nvfp4", "it changes to the recipe that the run has by then"),
        ("bf16", "auto:nvfp4", "bf16 rounds nothing, so that it would never switch"),
    ],
)
def test_a_run_refuses_a_schedule_that_is_not_followed_or_changes_nothing(recipe, schedule, words, tmp_path, capsys):
    command = ["train", "--preset", "tiny", "--out", str(tmp_path / "out"), "--recipe", recipe]
    assert cli.main([*command, "--recipe-schedule", schedule]) == 2
    said = capsys.readouterr().err
    assert f"recipe_schedule={schedule!r}: " in said and re.search(words, said) and not (tmp_path / "out").exists()


def test_a_run_may_say_its_own_schedule_and_change_back():
    for recipe, schedule in (("nvfp4+late(0.2)", "0.8:bf16/nvfp4"), ("nvfp4", "0.2:bf16,0.5:nvfp4"), ("bf16", "")):
        check_command(dataclasses.replace(configs.tiny(), recipe_schedule=schedule), recipe)


@pytest.mark.parametrize("name", ["nvfp4+schedule(0.5:nvfp4)", "nvfp4+schedule(auto:nvfp4)"])
def test_a_change_of_the_run_that_changes_nothing_is_refused(name):
    with pytest.raises(ValueError, match="changes to the recipe that the run has by then"):
        applied(configs.tiny(), name)


@pytest.mark.parametrize(
    "recipe, changes, step",
    [
        ("nvfp4+late(0.2)", {"decay": 0.3}, 81),
        ("nvfp4+late(0.2)", {"decay": 0.2}, None),
        ("nvfp4+late(0.2)", {"decay": 0.0}, None),
        ("nvfp4+late(0.2)", {"decay": 0.3, "schedule": "cosine"}, None),
        ("nvfp4+late(0.45)", {"decay": 0.3}, None),
        ("nvfp4+schedule(0.75:mxfp8,0.9:bf16/mxfp8)", {"decay": 0.3}, 91),
        ("nvfp4+schedule(0.9:nvfp4_mxfp8_bwd)", {"decay": 0.3}, None),
        ("mxfp8/nvfp4", {"decay": 0.3}, None),
    ],
)
def test_a_forward_that_leaves_4_bits_while_the_learning_rate_falls_is_said(recipe, changes, step):
    config = configs.tiny()
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, steps=100, warmup=0.1, **changes))
    said = notes(applied(config, recipe), recipe)
    if step is None:
        assert said == []
        return
    rates = [learning_rate(config.optim, i) for i in range(100)]
    falls = next(i for i in range(20, 100) if rates[i] < rates[i - 1])
    (line,) = said
    assert line.startswith(f"{recipe}: its forward is in high precision from step {step} on, but the learning rate")
    assert f"falls from step {falls + 1} on (decay=0.3)" in line


def test_one_treatment_in_two_wordings_is_named_once():
    for names in (("bf16", "nvfp4", "nvfp4()"), ("nvfp4", "nvfp4(sr=on,rht=16)"), ("nvfp4@all", "nvfp4()@all")):
        with pytest.raises(ValueError, match=r"^recipes: .* is nvfp4.* in other words; name it once"):
            refuse_twins(names)
    refuse_twins(("bf16", "nvfp4", "nvfp4@all", "nvfp4+bits(1)", "nvfp4+lr(0.1)", "nvfp4+schedule", "nvfp4(rht=none)"))


def test_identities_of_before_are_unchanged_and_others_differ():
    config = configs.tiny()
    plain = config.identity("nvfp4")
    assert "bits" not in plain and "held_out_corpus" not in plain["data"]
    for name in ("nvfp4+bits(1)", "nvfp4+order", "nvfp4+late(0.5)"):
        changed = applied(config, name).identity(name)
        assert {**changed, "recipe": "nvfp4"} != plain, name
        assert changed["recipe_key"] == plain["recipe_key"]


def test_controls_with_options_are_controls():
    names = ("naive_fp4+order@all", "naive_fp4+order", "nvfp4/naive_fp4", "nvfp4(rht=none)+late(0.1)")
    with pytest.raises(ValueError, match="no change of a run"):
        treatment_of(names[0])
    assert [treatment_of(name).is_control for name in names[1:]] == [True, True, False]


def trained(run, name: str) -> tuple[torch.Tensor, float]:
    """Return weights and held-out loss of three steps of a treatment."""
    config, data = run(steps=3)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, out=config.run.out / name))
    trainer = loop.Trainer(applied(config, name), name, data)
    result = trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), result["held_out_loss"]


def test_noise_rows_differ_in_noise_alone(run):
    """The same batches in another order of summation: losses equal but for rounding; other bits: more than that."""
    whole, halves = (trained(run, name) for name in ("bf16", "bf16+order"))
    assert not torch.equal(whole[0], halves[0])
    assert abs(whole[1] - halves[1]) < 1e-4
    one, two = (trained(run, name) for name in ("nvfp4@all", "nvfp4@all+bits(1)"))
    assert 0 < abs(one[1] - two[1]) < 0.1


def test_inspect_and_sensitivity_read_options(run, tmp_path, capsys):
    config, data = run(steps=2)
    loop.train(config, "nvfp4(rht=none,sr=off)@all+bits(1)", data)
    source, text = str(config.run.out), tmp_path / "text.txt"
    text.write_text("the model reads a block of sixteen values and keeps one scale for them " * 4)
    step = ["--text", str(text), "--batch", "1", "--sequence", "32", "--no-operands"]

    def rows(name, *more):
        assert cli.main(["sensitivity", source, *step, *more, "--out", str(tmp_path / name)]) == 0
        return (tmp_path / name / "sensitivity.csv").read_text()

    own = rows("own")  # that of the run, whose word has options and a change behind it
    assert (
        own == rows("same", "--recipe", "nvfp4(sr=off,rht=none)@all") != rows("other", "--recipe", "nvfp4(sr=off)@all")
    )
    words = ["--recipes", "nvfp4(rht=none,sr=off),nvfp4(tiles=1x16)"]
    assert cli.main(["inspect", source, *words, "--out", str(tmp_path / "inspect")]) == 0
    found = {row["recipe"] for row in csv.DictReader((tmp_path / "inspect" / "inspect.csv").read_text().splitlines())}
    assert len(found) == 2, found


def test_what_is_said_while_options_are_read_is_said(capsys):
    def read() -> int:
        print("a warning", file=sys.stderr)
        return 5

    assert read_options(read, "halfbyte train") == 5 and capsys.readouterr().err == "a warning\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "--out"], "--out: the path is empty"),
        (["compare", "--out"], "--out: the path is empty"),
        (["sensitivity", ".", "--text"], "--text: the path is empty"),
        (["inspect", ".", "--text"], "--text: no type matching {None}|PATH could be"),
    ],
)
@pytest.mark.parametrize("empty", ["", "  "])
def test_a_path_that_is_empty_is_refused(command, said, empty, tmp_path, monkeypatch, capsys):
    """`--out "$UNSET"` is `--out ""`, which pathlib reads as the folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, empty]) != 0
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
