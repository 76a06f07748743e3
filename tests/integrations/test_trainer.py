"""transformers' Trainer with HalfbyteCallback: the bits of a loop of one's own, through checkpoints too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import halfbyte as hb

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

from halfbyte.integrations.transformers import HalfbyteCallback  # noqa: E402

STEPS, ACCUMULATED, VOCABULARY = 4, 2, 61
ALL = hb.Keep(names=(), last_fraction=0)


def build(recipe="nvfp4", schedule=None, seed=3):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config)
    report = hb.quantize_(model, recipe, keep=ALL, state=hb.RunState(seed, schedule))
    return model, report.state


def rows(count=16):
    tokens = torch.randint(VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder, **changed):
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATED,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **{**options, **changed})


def trainer(model, folder, callback=None, **changed):
    callbacks = [HalfbyteCallback() if callback is None else callback] if callback is not False else []
    data = {"train_dataset": rows(), "eval_dataset": rows(4)}
    return transformers.Trainer(model=model, args=arguments(folder, **changed), callbacks=callbacks, **data)


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with checkpoints at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole")
    model, state = build()
    made = trainer(model, folder)
    made.train()
    return folder, parameters(model), losses(made), state.state_dict()


def test_the_trainer_draws_what_a_loop_of_ones_own_draws(whole):
    """Same batches in the same order, `advance()` after every backward, AdamW as the Trainer builds it."""
    _, expected, _, at_end = whole
    model, state = build()
    made = trainer(build()[0], whole[0] / "order")
    transformers.set_seed(5)
    batches = list(made.get_train_dataloader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model.train()
    for step in range(STEPS):
        pair = batches[ACCUMULATED * step : ACCUMULATED * (step + 1)]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in pair)
        for batch in pair:
            model(**batch, num_items_in_batch=torch.tensor(count)).loss.backward()
            state.advance()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert state.position == at_end["position"] == STEPS * ACCUMULATED
    assert same(parameters(model), expected)


@pytest.mark.parametrize("restores_callbacks", [False, True])
def test_resuming_gives_the_bits_of_the_whole_run(whole, tmp_path, restores_callbacks):
    folder, expected, logged, at_end = whole
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    model, state = build(seed=99)
    options = {"restore_callback_states_from_checkpoint": restores_callbacks}
    made = trainer(model, tmp_path, **options)
    made.train(resume_from_checkpoint=True)
    assert losses(made) == logged and same(parameters(model), expected)
    assert state.state_dict() == at_end
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert saved["HalfbyteCallback"]["attributes"]["saved"]["states"][0]["position"] == STEPS * ACCUMULATED


def test_a_position_that_is_not_restored_gives_other_bits(whole, tmp_path):
    """What the test above would miss if the recipe drew nothing."""
    folder, expected, _, _ = whole
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    model, _ = build()
    trainer(model, tmp_path, False).train(resume_from_checkpoint=True)
    assert not same(parameters(model), expected)


def test_best_models_limits_and_schedules_resume(tmp_path):
    """Evaluation in between, old checkpoints deleted, the best one loaded at the end, the recipe changed on the way."""
    schedule = hb.Schedule([(2, "mxfp8"), (3, "nvfp4")], steps=STEPS)
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    runs = []
    for stop in (STEPS, 2):
        model, state = build(schedule=schedule)
        recipes = []
        made = trainer(model, tmp_path / str(stop), **options)
        if stop < STEPS:
            made.add_callback(StopAfter(stop))
            made.train()
            model, state = build(schedule=schedule)
            made = trainer(model, tmp_path / str(stop), **options)
        made.add_callback(NoteRecipes(recipes))
        made.train(resume_from_checkpoint=stop < STEPS or None)
        evaluated = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
        runs.append((losses(made), evaluated, parameters(model), state.state_dict(), recipes))
    (whole_losses, whole_eval, whole_parameters, whole_state, whole_recipes), resumed = runs
    assert resumed[:2] == (whole_losses, whole_eval) and same(resumed[2], whole_parameters)
    assert resumed[3] == whole_state and whole_state["step"] == STEPS
    assert whole_recipes == ["nvfp4", "nvfp4", "mxfp8", "nvfp4"] and resumed[4] == whole_recipes[2:]
    assert len(list((tmp_path / "2").glob("checkpoint-*"))) <= 2


class StopAfter(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = state.global_step >= self.step
        control.should_save = control.should_save or control.should_training_stop


class NoteRecipes(transformers.TrainerCallback):
    """The recipe of one layer in the first forward of each step."""

    def __init__(self, recipes):
        self.recipes = recipes

    def on_step_begin(self, args, state, control, model=None, **others):
        recipe = model.model.layers[0].mlp.up_proj.recipe
        self.recipes.append(next(n for n in ("nvfp4", "mxfp8", "bf16") if hb.recipes.get(n) == recipe))


@pytest.mark.parametrize("evaluation", ["high_precision", "as_trained"])
def test_evaluation_is_in_high_precision_or_as_asked(tmp_path, evaluation):
    model, _ = build()
    made = trainer(model, tmp_path, HalfbyteCallback(evaluation=evaluation), eval_strategy="steps", eval_steps=2)
    before = made.evaluate()["eval_loss"]  # on its own too
    recipes = {layer.recipe for layer in model.modules() if isinstance(layer, hb.nn.Linear)}
    assert recipes == {hb.recipes.nvfp4()}, "recipes come back"
    plain = transformers.LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        expected = plain.eval()(**batch).loss.item()
    assert (before == pytest.approx(expected, rel=1e-5)) == (evaluation == "high_precision")
    made.train()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = plain.eval()(**batch).loss.item()
    in_train = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry][-1]
    assert (in_train == pytest.approx(expected, rel=1e-5)) == (evaluation == "high_precision")
    model.eval()
    if evaluation == "high_precision":
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[VOCABULARY]]))
        assert model.model.layers[0].mlp.up_proj.recipe == hb.recipes.nvfp4(), "recipes come back after errors too"
    made.pop_callback(HalfbyteCallback).release()
    assert not torch.equal(model(**batch).logits, plain(**batch).logits)


class Tiny(torch.nn.Module):
    """A model that compiles in no time."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels):
        logits = self.linear(self.embed(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_compiled_models_too_are_evaluated_in_high_precision(tmp_path):
    """Compiled code runs no hooks: the recipes are put aside between steps."""
    torch.manual_seed(0)
    model = Tiny()
    state = hb.quantize_(model, "nvfp4", keep=ALL).state
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "no"}
    made = trainer(model, tmp_path, eval_strategy="steps", eval_steps=2, eval_on_start=True, **compiled)
    made.train()
    assert state.position == STEPS * ACCUMULATED and model.linear.recipe == hb.recipes.nvfp4()
    plain = Tiny()
    plain.load_state_dict(model.state_dict())
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in ("input_ids", "labels")}
    last = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry][-1]
    assert last == pytest.approx(plain(**batch)["loss"].item(), rel=1e-5)


def test_a_model_without_recipes_is_refused(tmp_path):
    model = transformers.LlamaForCausalLM(build()[0].config)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*hb\.quantize_"):
        trainer(model, tmp_path).train()


def test_two_callbacks_and_unknown_evaluations_are_refused(tmp_path):
    with pytest.raises(ValueError, match="evaluation='fp4'.*'high_precision'"):
        HalfbyteCallback(evaluation="fp4")
    made = trainer(build()[0], tmp_path)
    made.add_callback(HalfbyteCallback())
    with pytest.raises(ValueError, match="2 of HalfbyteCallback.*give one"):
        made.train()


def test_a_checkpoint_without_a_position(tmp_path):
    trainer(build()[0], tmp_path, False, max_steps=2).train()
    model, state = build()
    with pytest.raises(ValueError, match="step 2.*position of its random bits is unknown.*is_strict=False"):
        trainer(model, tmp_path).train(resume_from_checkpoint=True)
    made = trainer(model, tmp_path, HalfbyteCallback(is_strict=False))
    with pytest.warns(UserWarning, match="position 4"):
        made.train(resume_from_checkpoint=True)
    assert state.position == STEPS * ACCUMULATED and state.step == STEPS
    again, restored = build()
    made = trainer(again, tmp_path, max_steps=STEPS + 2)
    made.train(resume_from_checkpoint=True)  # what the lenient run saved is whole
    assert restored.position == (STEPS + 2) * ACCUMULATED


def test_a_run_state_that_is_further_than_the_checkpoint_draws_no_bits_again(tmp_path):
    """Of 20 micro-batches before, beside the 2 of each of two steps that the checkpoint has and of the two to come."""
    trainer(build()[0], tmp_path, False, max_steps=2).train()
    model, state = build()
    for _ in range(20):
        state.advance()
    with pytest.warns(UserWarning, match="position 4"):
        trainer(model, tmp_path, HalfbyteCallback(is_strict=False)).train(resume_from_checkpoint=True)
    assert state.position == 20 + (STEPS - 2) * ACCUMULATED


def test_a_checkpoint_names_the_recipes_of_the_conversion_whatever_a_schedule_changed(tmp_path):
    schedule = hb.Schedule([(1, "mxfp8")], steps=STEPS)
    model, _ = build(schedule=schedule)
    trainer(model, tmp_path, max_steps=2).train()
    assert model.model.layers[0].mlp.up_proj.recipe == hb.recipes.mxfp8()
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert list(saved["HalfbyteCallback"]["attributes"]["saved"]["recipes"]) == [hb.recipes.nvfp4().key]
    again, state = build(schedule=schedule)
    trainer(again, tmp_path).train(resume_from_checkpoint=True)
    assert state.step == STEPS and again.model.layers[0].mlp.up_proj.recipe == hb.recipes.mxfp8()


def test_a_checkpoint_of_another_recipe(whole, tmp_path):
    shutil.copytree(Path(whole[0], "checkpoint-2"), tmp_path / "checkpoint-2")
    model, state = build("four_over_six")
    with pytest.raises(ValueError, match=r"q_proj in nvfp4, this model has four_over_six .*8 layers.*is_strict=False"):
        trainer(model, tmp_path).train(resume_from_checkpoint=True)
    made = trainer(model, tmp_path, HalfbyteCallback(is_strict=False))
    with pytest.warns(UserWarning, match="four_over_six"):
        made.train(resume_from_checkpoint=True)
    assert state.position == STEPS * ACCUMULATED


def test_without_the_callback_one_warning_names_it(tmp_path):
    with pytest.warns(UserWarning, match="HalfbyteCallback") as caught:
        trainer(build()[0], tmp_path, False, max_steps=2).train()
    (told,) = [one for one in caught if "random bits" in str(one.message)]
    assert told.filename == __file__
