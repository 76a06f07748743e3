"""Distillation in transformers' Trainer: a loss that compares a model with its teacher on every batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte.functional import distillation_loss

IGNORED = -100
"""The label of tokens that count in no loss, as transformers has it."""
OF_THE_LOSS = ("labels", "num_items_in_batch")


class Distillation:
    """The loss T² KL(teacher ‖ model) of a causal language model: `Trainer(…, compute_loss_func=Distillation(…))`.

    The mean is over the tokens that have a label. In eval mode it is their cross entropy, so that evaluations compare
    with those of other runs. The teacher sees every batch that the model sees, without gradients.

    Args:
        model: that the Trainer trains; give this one, not what wraps it.
        teacher: of the same vocabulary, on the model's device; it is frozen and put into eval mode.
        temperature: T > 0.

    Raises:
        ValueError: the temperature is not above 0, or model and teacher are one module.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, *, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: give a number above 0")
        if model is teacher:
            raise ValueError("teacher is the model itself; give a copy in high precision, made before hb.quantize_")
        self.teacher, self.temperature = teacher.eval().requires_grad_(False), temperature
        self._is_training = model.training
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def __call__(self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss of the batch that the model saw last.

        Args:
            outputs: of the model, with logits [B, L, V].
            labels: [B, L], -100 for tokens that do not count; None counts all.
            num_items_in_batch: tokens that count in all micro-batches of a step; None divides by this one's own.
        """
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        counts, targets = self._counted(logits, labels)
        if self._is_training or targets is None:
            losses = distillation_loss(logits[:, :-1], self._wanted()[:, :-1], temperature=self.temperature)
        else:
            losses = F.cross_entropy(logits[:, :-1].float().mT, targets.clamp(min=0), reduction="none")
        total = (losses * counts).sum()
        return total / (counts.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)

    def release(self) -> None:
        """Take the hook out of the model."""
        self._hook.remove()

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._is_training = module.training
        self._inputs = arguments, {key: value for key, value in named.items() if key not in OF_THE_LOSS}

    def _counted(self, logits: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return which positions count, and what follows them: position t predicts the label of t + 1."""
        if labels is None:
            return torch.ones(logits.shape[:2], device=logits.device, dtype=torch.float32)[:, :-1], None
        targets = labels[:, 1:].to(logits.device)
        return (targets != IGNORED).float(), targets

    def _wanted(self) -> Tensor:
        if self._inputs is None:
            raise ValueError("the model has seen no batch: give Distillation the model that the Trainer trains")
        arguments, named = self._inputs
        self._inputs = None  # a batch that another model saw must not be taken for this one
        with torch.no_grad():
            outputs = self.teacher(*arguments, **named)
        return outputs["logits"] if isinstance(outputs, dict) else outputs[0]
