"""How much of a step's gradient is rounding: the measure by which a run leaves four bits (arXiv 2505.19115)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfbyte.convert import high_precision
from halfbyte.tensor import QuantTensor

THRESHOLD = math.sqrt(3)
"""Gradient norm over noise norm below which quantized steps stop to pay (arXiv 2505.19115)."""


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """A step's gradient without quantization, and what quantization does to it.

    Args:
        norm: of the gradient in high precision, over all parameters.
        noise: norm of the quantized gradient minus that.
    """

    norm: float
    noise: float

    @property
    def ratio(self) -> float:
        """Norm over noise; infinite where nothing is quantized, NaN where one of them is not finite."""
        if not (math.isfinite(self.norm) and math.isfinite(self.noise)):
            return math.nan
        return self.norm / self.noise if self.noise else math.inf

    @property
    def is_drowned(self) -> bool:
        """Whether the norm is below √3 times the noise; where one is not finite, which is another trouble, not."""
        return self.ratio < THRESHOLD


def gradient_noise(
    model: nn.Module,
    steps: Sequence[Callable[[], Tensor]],
    *,
    between: Callable[[], None] | None = None,
    again: Callable[[], None] | None = None,
    group: dist.ProcessGroup | None = None,
) -> GradientNoise:
    """Measure how much quantization changes the gradient of one optimizer step; no parameter or .grad changes.

    Args:
        model: converted by `hb.quantize_`; all its parameters that require gradients count.
        steps: a function for each micro-batch, to its loss; the gradient is that of their mean.
        between: called after each micro-batch, such as RunState.advance.
        again: called before each of the two passes, to put back what `between` moved.
        group: of ranks whose gradients are averaged, as their optimizer steps are; None for this process alone.

    Returns:
        The same on all ranks.

    Raises:
        ValueError: there are no steps, no parameter requires a gradient, or one exists in NVFP4 alone.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not steps or not parameters:
        raise ValueError(f"steps={list(steps)}: give a function for each micro-batch of a model that trains")

    coded = [name for name, p in model.named_parameters() if p.requires_grad and isinstance(p, QuantTensor)]
    if coded:
        raise ValueError(
            f"model: {coded[0]} exists in NVFP4 alone, and high precision reads other values; measure plain weights"
        )

    def gradient() -> list[Tensor]:
        if again is not None:
            again()
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for step in steps:
            found = torch.autograd.grad(step() / len(steps), parameters, allow_unused=True)
            for total, part in zip(sums, found, strict=True):
                if part is not None:
                    total += part
            if between is not None:
                between()
        return _averaged(sums, group)

    quantized = gradient()
    with high_precision(model):
        exact = gradient()
    norms = [_norm(exact), _norm(q - e for q, e in zip(quantized, exact, strict=True))]
    norm, noise = torch.stack(norms).tolist()
    return GradientNoise(norm=norm, noise=noise)


def _averaged(gradients: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    if group is not None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size(group)
    return gradients


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.norm() for t in tensors]).norm()
