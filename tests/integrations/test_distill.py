"""Distillation as the Trainer's loss: the numbers of a loop of one's own."""

from __future__ import annotations

import copy

import pytest
import torch

import halfbyte as hb

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

from halfbyte.integrations.transformers import Distillation, HalfbyteCallback  # noqa: E402

STEPS, ACCUMULATED, TEMPERATURE = 2, 2, 2.0
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}


def build():
    """Return a model that follows `qat`, and what it was before."""
    torch.manual_seed(0)
    teacher = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model = copy.deepcopy(teacher)
    hb.quantize_(model, "qat", keep=hb.Keep(names=(), last_fraction=0))
    return model, teacher


def rows(count=8):
    tokens = torch.randint(61, (count, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[::2, 5:] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def trainer(model, folder, loss):
    options = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATED}
    options |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": [], "disable_tqdm": True}
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, seed=5, logging_steps=1, save_strategy="no", **options
    )
    callbacks = [HalfbyteCallback(evaluation="as_trained")]
    data = {"train_dataset": rows(), "eval_dataset": rows(2)}
    return transformers.Trainer(model=model, args=args, compute_loss_func=loss, callbacks=callbacks, **data)


def formula(student, teacher, labels):
    """Return T² times the sum of KL over the positions whose next token has a label."""
    s, t = (logits[:, :-1].double() / TEMPERATURE for logits in (student, teacher))
    each = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
    return TEMPERATURE**2 * each[labels[:, 1:] != -100].sum()


def test_the_trainer_takes_the_steps_of_a_loop(tmp_path):
    model, teacher = build()
    made = trainer(model, tmp_path, Distillation(model, teacher, temperature=TEMPERATURE))
    made.train()
    found = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    own, teacher = build()
    order = trainer(build()[0], tmp_path, None)
    transformers.set_seed(5)
    batches = list(order.get_train_dataloader())
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(STEPS):
        pair, total = batches[ACCUMULATED * step : ACCUMULATED * (step + 1)], 0.0
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in pair)
        for batch in pair:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            loss = formula(own(**inputs).logits, teacher(**inputs).logits.detach(), batch["labels"]) / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert found == pytest.approx(expected, rel=1e-3) and min(found) > 1e-6
    for a, b in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # AdamW's first steps are signs of gradients, times 1e-2
    assert all(p.grad is None and not p.requires_grad for p in made.compute_loss_func.teacher.parameters())


def test_evaluation_is_the_cross_entropy_of_labelled_tokens(tmp_path):
    model, teacher = build()
    made = trainer(model, tmp_path, Distillation(model, teacher))
    batch = made.data_collator(rows(2))
    loss = made.evaluate()["eval_loss"]
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_without_labels_all_positions_count():
    model, teacher = build()
    loss = Distillation(model.train(), teacher, temperature=TEMPERATURE)
    tokens = torch.arange(12).view(2, 6)
    found = loss(model(input_ids=tokens), None)
    expected = formula(model(input_ids=tokens).logits, teacher(input_ids=tokens).logits, torch.zeros(2, 6)) / 10
    assert found.item() == pytest.approx(expected.item(), abs=1e-6) and expected > 1e-4
    outputs = model(input_ids=tokens)
    loss(outputs, None)
    with pytest.raises(ValueError, match="the model has seen no batch: give Distillation the model that the Trainer"):
        loss(outputs, None)  # nothing has run since
    loss.release()
    assert not model._forward_pre_hooks


def test_refusals():
    model, teacher = build()
    with pytest.raises(ValueError, match="temperature=0: give a number above 0"):
        Distillation(model, teacher, temperature=0)
    with pytest.raises(ValueError, match="teacher is the model itself; give a copy in high precision"):
        Distillation(model, model)


def test_a_batch_in_which_no_token_counts_has_no_loss():
    """Not 0 / 0, which would make the weights NaN."""
    model, teacher = build()
    loss = Distillation(model, teacher)
    tokens = torch.arange(16).view(2, 8)
    found = loss(model(input_ids=tokens), torch.full_like(tokens, -100))
    found.backward()
    assert found == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())
