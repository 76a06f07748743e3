"""TRL's SFTTrainer trains a model that from_pretrained converted, as transformers' own Trainer does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from export_models import NOTHING_KEPT, TOKENS, llama, loss
from tokenizers import Tokenizer, models

import halfbyte as hb
from halfbyte.integrations.transformers import HalfbyteCallback, HalfbyteConfig, load_exported

sys.path += [str(Path(sys.prefix) / "peers" / name) for name in ("trl", "torchtitan")]
import datasets
import trl

OPTIONS = {"max_steps": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "use_cpu": True}
OPTIONS |= {"learning_rate": 1e-3, "report_to": [], "save_strategy": "no", "seed": 5, "logging_steps": 1, "bf16": False}


def tokenizer():
    words = {f"w{i}": i for i in range(61)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w60", pad_token="w59")


def converted(folder):
    if not folder.exists():
        llama().save_pretrained(folder)
    config = HalfbyteConfig("nvfp4", keep=NOTHING_KEPT, seed=2)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def trained(trainer):
    trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_supervised_finetuning_is_the_trainers(tmp_path):
    rows = [row.tolist() for row in TOKENS.repeat(2, 1)]
    data = datasets.Dataset.from_dict({"input_ids": rows})
    options = OPTIONS | {"gradient_checkpointing": False, "disable_tqdm": True}
    args = trl.SFTConfig(str(tmp_path / "sft"), max_length=16, **options)
    callbacks = [HalfbyteCallback(evaluation="as_trained")]
    given = {"train_dataset": data, "processing_class": tokenizer(), "callbacks": callbacks}
    model, losses = trained(trl.SFTTrainer(converted(tmp_path / "base"), args, **given))
    state = model.hf_quantizer.report.state
    assert (state.seed, state.position, state.step) == (2, 6, 3)

    own = transformers.TrainingArguments(str(tmp_path / "own"), **options)
    data = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in rows]
    callbacks = [HalfbyteCallback(evaluation="as_trained")]
    twin, expected = trained(
        transformers.Trainer(converted(tmp_path / "base"), own, train_dataset=data, callbacks=callbacks)
    )
    # TRL adds the tokens' losses up itself, in another order: last digits, which move codes of later steps.
    assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-3)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.float(), q.float(), atol=2 * 3 * 1e-3), name  # AdamW moves by its rate at most
    assert hb.export.save(model, tmp_path / "out").share_changed == 0
    assert torch.equal(loss(load_exported(tmp_path / "out")), loss(model))
