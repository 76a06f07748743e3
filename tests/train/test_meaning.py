"""Five lines about a comparison: each fact is that of the results, each judgement that of its numbers."""

import pytest

from halfbyte.train import config, meaning

CONFIG = config.two_cores()


def result(recipe: str, gap: float | None, loss: float = 2.0, **changes) -> dict:
    kept = {"tokens_per_second": 500.0, "saved_activation_bytes": 900}
    return {"recipe": recipe, "held_out_loss": loss, "gap_percent": gap, **kept, **changes}


BASE = result("bf16", 0.0, tokens_per_second=2000.0, saved_activation_bytes=1000)
CONTROL = result("naive_fp4@all", 14.5)


def lines(*results: dict, has_gpu: bool = False) -> list[str]:
    return meaning.closing_lines(CONFIG, results, has_gpu)


def test_there_are_five_and_they_fit_a_terminal():
    recipes = [result(name, gap) for name, gap in (("nvfp4", 0.8), ("nvfp4_mxfp8_bwd", -0.2), ("four_over_six", 1.0))]
    said = lines(BASE, *recipes, CONTROL)
    assert len(said) == 5 and max(map(len, said)) <= 120
    assert said[0].startswith("bf16 ends at 2.0000 nats")
    assert said[1].endswith("no visible loss in a run this small: nvfp4, nvfp4_mxfp8_bwd, four_over_six.")
    assert "did (+14.50 %)" in said[2]
    assert said[3].startswith("nvfp4 took 4.00 times bf16's time") and "keeps 0.90 of the bytes" in said[3]


def test_a_worse_recipe_is_named_with_its_gap():
    (_, recipes, *_) = lines(BASE, result("nvfp4", 0.8), result("mxfp8", 1.01))
    assert "run this small: nvfp4. Further away: mxfp8 (+1.01 %); docs/faq.md" in recipes
    (_, recipes, *_) = lines(BASE, result("nvfp4", 3.0))
    assert recipes.startswith("Further away: nvfp4 (+3.00 %)")


@pytest.mark.parametrize(("gap", "said"), [(4.9, "too short to tell"), (5.0, "did (+5.00 %)"), (-1.0, "-1.00 % away")])
def test_a_control_that_does_not_lose_says_the_run_is_too_short(gap, said):
    assert said in lines(BASE, result("naive_fp4@all", gap))[2]


def test_divergence_is_told_from_a_gap():
    lost = {"held_out_loss": None, "gap_percent": None, "is_diverged": True, "diverged_at": 7, "diverged_in": "loss"}
    assert "nvfp4 (diverged at step 7)" in lines(BASE, BASE | {"recipe": "nvfp4"} | lost)[1]
    assert "did (diverged at step 7)" in lines(BASE, CONTROL | lost)[2]
    said = lines(BASE | lost, result("nvfp4", None), CONTROL | {"gap_percent": None})
    assert "nothing to measure against" in said[0] and len(said) == 5


def test_what_comes_next_depends_on_the_machine():
    assert "--preset one_gpu" in lines(BASE, CONTROL, has_gpu=True)[4]
    assert "docs/quickstart.md" in lines(BASE, CONTROL, has_gpu=False)[4]
    small, large = config.small_gpu(), config.one_gpu()  # both trained on it
    assert "--preset one_gpu" in meaning.closing_lines(small, [BASE, CONTROL], has_gpu=True)[4]
    assert "docs/quickstart.md" in meaning.closing_lines(large, [BASE, CONTROL], has_gpu=True)[4]
