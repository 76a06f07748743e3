"""Configs refuse what cannot be, and know what decides a result."""

from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.train import config, treatment


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (config.DataConfig, {"sequence": 0}),
        (config.DataConfig, {"held_out": 1.0}),
        (config.DataConfig, {"held_out": 0.0}),
        (config.DataConfig, {"tokenizer": "words"}),
        (config.DataConfig, {"tokenizer": "bpe:100"}),
        (config.OptimConfig, {"lr": -1.0}),
        (config.OptimConfig, {"beta2": 1.0}),
        (config.OptimConfig, {"decay": 0.99}),
        (config.RunConfig, {"keep": 0}),
        (config.TrainConfig, {"model": "huge"}),
        (config.TrainConfig, {"seed": -1}),
        (config.TrainConfig, {"eval_every": 0}),
    ],
)
def test_wrong_values_are_named(kind, wrong):
    ((field, value),) = wrong.items()
    with pytest.raises(ValueError, match=field) as error:
        kind(**wrong)
    assert str(value) in str(error.value)


def test_a_run_has_no_more_micro_batches_than_random_places():
    most = config.OptimConfig(steps=(1 << 30) - 1)
    replace(config.tiny(), optim=most, data=config.DataConfig(accumulate=2))
    for changes in (
        {"optim": config.OptimConfig(steps=10**22)},
        {"optim": most, "data": config.DataConfig(accumulate=3)},
    ):
        with pytest.raises(ValueError, match=r"steps=\d+, accumulate=\d: a run has fewer than 2\*\*31 micro-batches"):
            replace(config.tiny(), **changes)


def test_identity_leaves_out_where_the_run_goes():
    one = config.tiny()
    elsewhere = replace(one, run=config.RunConfig(out=Path("elsewhere"), log_every=1))
    assert one.identity("nvfp4") == elsewhere.identity("nvfp4")
    assert one.identity("nvfp4") != one.identity("bf16")
    assert one.identity("nvfp4") != replace(one, seed=1).identity("nvfp4")


def test_differences_name_the_leaf():
    one = config.tiny()
    other = replace(one, optim=replace(one.optim, lr=0.5))
    assert config.differences(one.identity("bf16"), other.identity("bf16")) == ["optim.lr: 0.5 there, 0.005 here"]


@pytest.mark.parametrize("name", config.PRESETS)
def test_presets_build(name):
    assert config.training_preset(name).tokens > 0


def test_the_preset_for_two_cores_is_large_enough_to_mean_something():
    preset = config.two_cores()
    assert preset.tokens >= 200_000
    assert preset.identity("nvfp4")["shape"]["dim"] == 128


def test_unknown_preset():
    with pytest.raises(ValueError, match="preset='cluster' does not exist; use one of two_cores"):
        config.training_preset("cluster")


def test_treatments():
    assert treatment.treatment_of("nvfp4").keep is None
    everywhere = treatment.treatment_of("nvfp4@all")
    assert everywhere.recipe == treatment.treatment_of("nvfp4").recipe
    assert everywhere.keep.last_fraction == 0 and everywhere.keep.names == ()
    with pytest.raises(ValueError, match="use nvfp4@all or nvfp4"):
        treatment.treatment_of("nvfp4@most")
    with pytest.raises(ValueError, match="recipe='fp3' is not a preset"):
        treatment.treatment_of("fp3@all")


def test_a_run_has_fewer_micro_batches_than_random_places_count():
    tiny = config.tiny()

    def of(steps: int, accumulate: int) -> config.TrainConfig:
        data = replace(tiny.data, accumulate=accumulate)
        return replace(tiny, optim=replace(tiny.optim, steps=steps), data=data)

    assert of(2**31 - 1, 1).optim.steps == 2**31 - 1
    for steps, accumulate in ((2**31, 1), (2**16, 2**15)):
        with pytest.raises(ValueError, match=rf"steps={steps}, accumulate={accumulate}: a run has fewer than 2\*\*31"):
            of(steps, accumulate)
