"""What several tests of the trainer do with a run: stop it, and read what it left."""

import pytest
import torch

from halfbyte.train import log


def losses(config):
    return [log.curve(config.run.out, kind) for kind in ("step", "eval")]


def weights(config):
    path = sorted((config.run.out / "checkpoints").glob("*.pt"))[-1]
    return torch.load(path, weights_only=True)["model"]


def stop_after(trainer, step):
    """Run until `step` steps are done and their checkpoint is written, then break off as a crash would."""
    save = trainer._save

    def save_and_stop():
        save()
        if trainer.step == step:
            raise KeyboardInterrupt

    trainer._save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
