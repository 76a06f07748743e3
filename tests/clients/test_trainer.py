"""transformers.Trainer takes a model that from_pretrained converted, and its checkpoints export."""

from __future__ import annotations

import torch
import transformers
from export_models import NOTHING_KEPT, TOKENS, llama, loss

import halfbyte as hb
from halfbyte.integrations.transformers import HalfbyteCallback, HalfbyteConfig, load_exported


def test_from_pretrained_to_export(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    config = HalfbyteConfig("nvfp4", keep=NOTHING_KEPT)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "runs"), max_steps=3, save_steps=3, per_device_train_batch_size=1, report_to=[], use_cpu=True
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    callback = HalfbyteCallback(evaluation="as_trained")
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert model.hf_quantizer.report.state.position == 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "checkpoint-3")
    assert torch.equal(loss(again), loss(model))
    hb.export.save(again, tmp_path / "out", format="modelopt")
    assert torch.equal(loss(load_exported(tmp_path / "out")), loss(model))
