"""Losses and gradient norms of steps, between the device and the log."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfbyte.train import divergence
from halfbyte.train.divergence import Divergence
from halfbyte.train.log import Log, Silent
from halfbyte.train.ranks import World


class History:
    """Losses on their way from the device to the log."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []
        self.train_loss = float("nan")
        self.held_out_loss: float | None = None
        self.diverged: Divergence | None = None

    def flush(self, log: Log | Silent, tokens_per_step: int, ranks: World) -> None:
        """Read the pending losses in one transfer and log their means, up to the first that is not finite."""
        numbers = ranks.mean(torch.stack([torch.stack((loss, norm)) for _, _, loss, norm in self.pending]))
        for (step, lr, _, _), (loss, norm) in zip(self.pending, numbers.tolist(), strict=True):
            log.write("step", step, {"tokens": step * tokens_per_step, "loss": loss, "lr": lr, "grad_norm": norm})
            self.train_loss = loss
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.diverged = Divergence(step, divergence.NORM if math.isfinite(loss) else divergence.LOSS)
                break
        self.pending.clear()
