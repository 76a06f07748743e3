"""What torchtitan's configs ask for and layers with a recipe cannot do: refused by name, before the first step."""

from __future__ import annotations

import pytest
import test_torchtitan
import torch
from test_torchtitan import moe, ours, short
from torchtitan.config import CompileConfig

import halfbyte as hb

_one_process = test_torchtitan._one_process
pytestmark = test_torchtitan.pytestmark


def compiled():
    config = short()
    config.compile = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    return config


PARALLEL = {
    "compiled": (
        compiled,
        {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"},
        r"compile.components=\['model'\] with parallelism.tensor_parallel_degree=2: .*leave 'model' out of comp",
    ),
    "experts": (
        lambda: moe(steps=1),
        {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"},
        "tensor_parallel_degree=2: routed experts .*rules={'\\*.inner_experts': None}, or set it to 1",
    ),
}


@pytest.mark.parametrize("case", PARALLEL)
def test_parallelism_that_would_give_other_bytes_is_refused(case, monkeypatch):
    make, parallelism, message = PARALLEL[case]
    monkeypatch.setenv("NGPU", "2")
    config = ours.quantize_config_(make(), keep=hb.Keep(last_fraction=0))
    config.comm.mode, config.training.disable_cuda_graphs = "fake_backend", True
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    with pytest.raises(ValueError, match=message):
        config.build()


def test_layers_that_an_override_replaces_are_refused(tmp_path, monkeypatch):
    """Gate and up would train in bf16, where the table says nvfp4."""
    monkeypatch.setenv("NGPU", "1")
    for rules, is_refused in ((None, True), ({"*.feed_forward.w[13]": None}, False)):
        config = short()
        config.override.imports = ["torchtitan.overrides.fused_swiglu.fused_swiglu"]
        ours.quantize_config_(config, rules=rules, keep=hb.Keep(last_fraction=0))
        config.comm.mode, config.training.disable_cuda_graphs = "fake_backend", True
        if is_refused:
            with pytest.raises(ValueError, match=r"layers.0.feed_forward.w1, .*: converted, and not in .*fused_swiglu"):
                config.build()
            torch.distributed.destroy_process_group()
        else:
            model = config.build().model_parts[0]
            assert sum(isinstance(module, ours.RecipeLinear) for module in model.modules()) == 2 * 3
