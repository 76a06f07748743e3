"""What it means that a run diverged, and how that is said: it has no loss and no gap, only the step at which it broke.

A run diverges at the first step whose training loss or gradient norm is not finite, or after which the held-out loss or
a parameter is not (looked at when a run validates, as it does after its last step, and parameters before it saves). It
stops there. A norm that is infinite for one step counts: clipping by it has turned the gradient into zeros and NaNs, so
the losses that follow are not those of the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.train import parallel

LOSS, NORM, HELD_OUT, PARAMETERS = "training loss", "gradient norm", "held-out loss", "parameters"


class Divergence(NamedTuple):
    """The optimizer step, counted from 1 (0 if a result does not say it), and what was not finite there."""

    step: int
    what: str

    def __str__(self) -> str:
        return f"diverged at step {self.step}" if self.step else "diverged"

    def in_full(self) -> str:
        """Return the step and what was not finite there, in words."""
        return f"{self} ({self.what} not finite)"


def finite_parameters(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors, as far as this rank holds them, are finite; waits for the device."""
    found = [parallel.local(t.detach()).isfinite().all() for t in tensors]
    return not found or bool(torch.stack(found).all())


def of(result: dict) -> Divergence | None:
    """Return where the run of a result diverged, None if it did not.

    A result of a version that did not say where is judged by what it holds: the steps it took, and its loss.
    """
    loss = result.get("held_out_loss")
    if not result.get("is_diverged") and loss is not None and math.isfinite(loss):
        return None
    return Divergence(result.get("diverged_at") or result.get("steps", 0), result.get("diverged_in") or LOSS)


def loss(result: dict) -> float | None:
    """Return the held-out loss of a result, None if the run diverged anywhere."""
    return None if of(result) else result["held_out_loss"]
