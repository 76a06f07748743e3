"""AdamW and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from halfbyte.train.config import OptimConfig


def learning_rate(config: OptimConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    `wsd` (warm-up, stable, decay; arXiv 2404.06395) falls linearly over the last `decay` of the steps; `cosine` falls
    from the end of the warm-up.
    """
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, config.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        decay = round(config.decay * config.steps)  # 0 stays to the last step
        share = min(1.0, (config.steps - step) / (decay + 1))
    return config.lr * (config.final_lr + (1 - config.final_lr) * share)


def adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only, fused where the device has it."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    is_fused = {p.device.type for p in model.parameters()} <= {"cpu", "cuda"}
    betas = (config.beta1, config.beta2)
    on_gpu = any(p.is_cuda for p in model.parameters())
    options = {"betas": betas, "eps": config.eps, "fused": is_fused, "capturable": on_gpu}
    optimizer = torch.optim.AdamW(groups, lr=config.lr, **options)
    place_learning_rate_(optimizer)
    return optimizer


def set_learning_rate_(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate `lr`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def place_learning_rate_(optimizer: torch.optim.Optimizer) -> None:
    """Hold the learning rates of parameters on a GPU in tensors there, so that CUDA graphs see them change.

    Needed again after `optimizer.load_state_dict`.
    """
    for group in optimizer.param_groups:
        devices = {p.device for p in group["params"] if p.is_cuda}
        if devices:
            group["lr"] = torch.full((), float(group["lr"]), dtype=torch.float32, device=devices.pop())
