"""Every 4-bit recipe learns as bf16 does, and the control does not: a measure that could not fail would show nothing.

One block in four bits throughout (`@all`) learns a Markov chain of 32 letters, whose entropy it nearly reaches. Over
three seeds the recipes ended 0.2 to 1.4 % above bf16 and the control 15 to 18 %; those with
options, and quartet2, rl and qat, over one 0.1 % below to 0.9 % above.
"""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from halfbyte import recipes
from halfbyte.train import config, data, loop, treatment
from halfbyte.train import model as models

BAR = 2.0
"""Percent of bf16's loss that a recipe may lose."""
LETTERS = [chr(ord("A") + i) for i in range(32)]
WEIGHTS = [0.8**i for i in range(6)]
"""Of a letter's successors, unnormalised."""


def chain(length: int) -> str:
    """A text in which a letter depends on the one before it alone."""
    draw = random.Random(0).random
    successors = {letter: [LETTERS[int(32 * draw())] for _ in WEIGHTS] for letter in LETTERS}
    ends = list(accumulate(WEIGHTS))
    letters = ["A"]
    while len(letters) < length:
        place = draw() * ends[-1]
        letters.append(successors[letters[-1]][sum(end <= place for end in ends)])
    return "".join(letters)


OPTIONS = (
    "nvfp4(amax=delayed)",
    "nvfp4(mean=split)",
    "nvfp4(headroom=on)",
    "nvfp4(saved=stochastic)",
    "row_scaled",
    "outlier_channels",
    "hot_channels",
    "four_over_six(scope=weights,candidates=0.875:1:1.25:1.5)",
    "rl(gradients=mxfp8)",
    "nvfp4_mxfp8_bwd(outer=row,backward=dequantized)",
)
"""What presets train with as well, in one word."""


def four_bits() -> list[str]:
    """The presets that quantize an operand to E2M1."""
    built = {name: preset() for name, preset in recipes.PRESETS.items()}
    return [name for name, recipe in built.items() if any(spec.format.element.name == "e2m1" for spec in recipe.specs)]


@pytest.fixture(scope="module")
def final_loss(tmp_path_factory):
    """A function from a recipe's name to the held-out loss after 80 steps."""
    folder = tmp_path_factory.mktemp("convergence")
    (folder / "chain.txt").write_text(chain(200_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.PRESETS, "one-block", replace(models.model_preset("tiny"), layers=1))
        run = config.TrainConfig(
            model="one-block",
            data=config.DataConfig(corpus=str(folder / "chain.txt"), sequence=64, batch=4),
            optim=config.OptimConfig(steps=80, lr=1e-2, warmup=0.1, decay=0.4),
            run=config.RunConfig(cache=folder, log_every=80, checkpoint_every=80),
            device="cpu",
            dtype="float32",
            eval_every=80,
            eval_batches=15,
        )
        text, losses = data.load_data(run.data, folder), {}

        def train(name: str) -> float:
            if name not in losses:
                one = replace(run, run=replace(run.run, out=folder / name))
                losses[name] = loop.train(one, name, text)["held_out_loss"]
            return losses[name]

        yield train


def gap(final_loss, name: str) -> float:
    return 100 * (final_loss(name) / final_loss("bf16") - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in (*four_bits(), *OPTIONS) if not treatment.treatment_of(n).is_control])
def test_a_four_bit_recipe_stays_within_two_percent_of_bf16(final_loss, name):
    assert abs(gap(final_loss, f"{name}@all")) < BAR


@pytest.mark.slow
def test_the_control_does_not(final_loss):
    """In the same layers, with the same optimizer: what fails is the rounding of its gradients."""
    assert gap(final_loss, "naive_fp4@all") > 4 * BAR


@pytest.mark.slow
def test_what_is_learned_is_the_chain(final_loss):
    text = chain(200_000)
    pairs, firsts = Counter(pairwise(text)), Counter(text[:-1])
    entropy = -sum(n / len(text) * math.log(n / firsts[pair[0]]) for pair, n in pairs.items())
    assert entropy - 0.02 < final_loss("bf16") < entropy + 0.2 < math.log(len(LETTERS)) / 1.5


def test_the_recipes_are_those_of_the_documentation():
    usual = {"nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "nvfp4_forward", "naive_fp4"}
    assert set(four_bits()) == {*usual, "quartet2", "rl", "qat"}
    assert "bf16" not in four_bits() and "mxfp8" not in four_bits()


def test_options_that_train_are_other_recipes():
    """One that says nothing, or a default, would train a preset again."""
    built = [treatment.treatment_of(name).recipe for name in (*four_bits(), *OPTIONS)]
    assert len(set(built)) == len(built)
