"""The Axolotl plugin, called in Axolotl's order around transformers' own Trainer.

Axolotl 0.19.0 pins transformers 5.16.1 and a hundred other packages, so that it cannot be installed beside the others
here: its base class alone is stood in for. Hooks, their order and arguments are those of its integrations/base.py.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
import transformers
from export_models import TOKENS, llama
from peft import LoraConfig, get_peft_model

import halfbyte as hb


@pytest.fixture
def plugin(monkeypatch):
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    monkeypatch.delitem(sys.modules, "halfbyte.integrations.axolotl", raising=False)
    return importlib.import_module("halfbyte.integrations.axolotl").NVFP4Plugin()


def options(plugin, **given):
    """Return what Axolotl makes of a YAML file: the plugin's own defaults beside what was given."""
    module, _, name = plugin.get_input_args().rpartition(".")
    return getattr(sys.modules[module], name)(**given).model_dump()


def trained(plugin, cfg, folder, adapt=lambda model: model):
    model = llama(torch.float32)
    plugin.post_model_build(cfg, model)
    model = adapt(model)
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    args = transformers.TrainingArguments(str(folder), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True)
    made = transformers.Trainer(model=model, args=args, train_dataset=rows)
    for callback in plugin.add_callbacks_post_trainer(cfg, made):
        made.add_callback(callback)
    made.train()
    return model


def test_a_run_is_that_of_the_same_lines_by_hand(plugin, tmp_path, capsys):
    cfg = options(plugin, halfbyte_rules={"*down_proj": "mxfp8"}, halfbyte_keep={"last_fraction": 0}, halfbyte_seed=4)
    model = trained(plugin, cfg, tmp_path / "a")
    assert "linear layers converted" in capsys.readouterr().out
    layer = model.model.layers[0].mlp.down_proj
    assert layer.recipe == hb.recipes.mxfp8() and model.model.layers[1].mlp.up_proj.recipe == hb.recipes.nvfp4()
    state = model.model.layers[1].mlp.up_proj.run_state
    assert state.seed == 4 and state.position == 3

    class ByHand:
        def post_model_build(self, cfg, model):
            rules, keep = {"*down_proj": "mxfp8"}, hb.Keep(last_fraction=0)
            hb.quantize_(model, "nvfp4", rules=rules, keep=keep, state=hb.RunState(4))

        def add_callbacks_post_trainer(self, cfg, trainer):
            from halfbyte.integrations.transformers import HalfbyteCallback

            return [HalfbyteCallback()]

    other = trained(ByHand(), None, tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_adapters_stay_in_high_precision(plugin, tmp_path):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    model = trained(
        plugin, options(plugin, halfbyte_keep={"last_fraction": 0}), tmp_path, lambda m: get_peft_model(m, adapters)
    )
    found = {name: type(module) for name, module in model.named_modules()}
    inner = "base_model.model.model.layers.0.mlp.up_proj"
    assert found[f"{inner}.base_layer"] is hb.nn.Linear and found[f"{inner}.lora_A.default"] is torch.nn.Linear
    assert any(p.grad is not None or "lora_B" in n for n, p in model.named_parameters() if p.requires_grad)


def test_refusals(plugin):
    with pytest.raises(ValueError, match="load_in_4bit, load_in_8bit: bitsandbytes holds the weights"):
        plugin.post_model_build({"load_in_4bit": True}, llama())
    with pytest.raises(ValueError, match="recipe='fp4' is not a preset"):
        plugin.post_model_build({"halfbyte_recipe": "fp4"}, llama())
    with pytest.raises(ValueError, match="halfbyte_evaluation"):
        options(plugin, halfbyte_evaluation="bf16")
