"""A small module and its data for test_lightning.py, importable on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "peers" / "lightning"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402
from plain_loop import ACCUMULATE, ALL, STEPS, batches, layers, loss_of  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import halfbyte as hb  # noqa: E402
from halfbyte.integrations.lightning import NVFP4Precision  # noqa: E402

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}


class Loader:
    """Yields batches in order and says where it is: Lightning goes on there."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.next = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self):
        while self.next < len(self.data):
            self.next += 1
            yield self.data[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Module(LightningModule):
    """Keeps what validation computes."""

    def __init__(self, shards: bool = False) -> None:
        super().__init__()
        self.model, self.shards, self.seen = layers(), shards, []

    def configure_model(self) -> None:
        if self.shards:
            self.trainer.precision_plugin.convert_module(self.model)
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return loss_of(self.model, batch)

    def validation_step(self, batch, index):
        self.seen.append(self.model(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def fit(module: Module, plugin: NVFP4Precision, *, steps: int = STEPS, data=None, ckpt_path=None, **options) -> Trainer:
    settings = {"accelerator": "cpu", "devices": 1, "accumulate_grad_batches": ACCUMULATE, **QUIET, **options}
    settings["plugins"] = [plugin, *settings.pop("environment", ())]
    settings.setdefault("enable_checkpointing", False)
    trainer = Trainer(max_steps=steps, use_distributed_sampler=False, **settings)
    trainer.fit(module, Loader(batches() if data is None else data), ckpt_path=ckpt_path)
    return trainer


def on_a_rank(rank: int, world: int, folder: str, sharded: bool):
    """Train under DDP, or under FSDP2, as torchrun would start it; return rank, parameters and positions."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29998", TORCHELASTIC_RUN_ID="1", GROUP_RANK="0")
    os.chdir(folder)
    strategy = (
        ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo")
        if sharded
        else DDPStrategy(process_group_backend="gloo")
    )
    plugin, module = NVFP4Precision("nvfp4", "32-true", keep=ALL), Module(shards=sharded)
    fit(
        module,
        plugin,
        data=batches(seed=5 + rank),
        strategy=strategy,
        devices=world,
        accumulate_grad_batches=1,
        environment=[TorchElasticEnvironment()],
    )
    whole = [p.full_tensor() if sharded else p for p in module.model.parameters()]
    state = plugin.run_state
    assert isinstance(module.model[0], hb.nn.Linear)
    return state.rank, state.position, [p.detach().tolist() for p in whole]
