"""The automatic switch of recipes: `--recipe-schedule auto:bf16/nvfp4` leaves four bits when rounding drowns gradients.

Before every step at which the run validates, the gradient of that step is computed twice, quantized and in high
precision. Once its norm is below √3 times that of their difference (arXiv 2505.19115) the run follows the other recipe
from that step on. The switch is a schedule that the run writes itself: checkpoints hold it like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.nn.linear import describe_recipe
from halfbyte.schedule import Schedule
from halfbyte.stats.noise import GradientNoise, gradient_noise
from halfbyte.train.log import Log, Silent

if TYPE_CHECKING:
    from halfbyte.train.loop import Trainer


def look_at_noise(trainer: Trainer, log: Log | Silent) -> None:
    """Switch the recipe of the step that now begins, where the run asks for that and its gradients say so."""
    target = trainer.config.switch()
    step, state = trainer.step, trainer.run_state
    if target is None or state.schedule is not None or not step or step % trainer.config.eval_every:
        return
    found = _measure(trainer)
    facts: dict[str, float | str] = {"norm": found.norm, "noise": found.noise}
    log.write("noise", step + 1, facts)
    if found.is_drowned:
        state.schedule = Schedule([(step, target)])
        log.write("switch", step + 1, {"recipe": describe_recipe(target), **facts})


def _measure(trainer: Trainer) -> GradientNoise:
    """Return the noise of the coming step, whose random bits it draws; the run is then where it was."""
    state, count = trainer.run_state, trainer.config.data.accumulate
    place = state.state_dict()
    batches = [trainer.batches[trainer.position + i] for i in range(count)]

    def loss(inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.add(*trainer._losses(inputs, targets, trainer.model, trainer.teacher))

    try:
        return gradient_noise(
            trainer.model,
            [loss(*batch) for batch in batches],
            between=state.advance,
            again=lambda: state.load_state_dict(place),
            group=dist.group.WORLD if trainer.ranks.size > 1 else None,
        )
    finally:
        state.load_state_dict(place)
