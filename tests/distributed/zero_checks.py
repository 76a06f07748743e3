"""What ranks check about ZeroOptimizer; every function runs on every rank."""

from __future__ import annotations

from functools import partial

import small_models
import torch

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer
from halfbyte.tensor import PrimaryWeight


def build(rank: int, weights: str, recipe="nvfp4", dim: int = 16, seed: int = 0, **config) -> tuple:
    torch.manual_seed(seed)
    model = small_models.Decoder(2, dim).bfloat16()
    report = hb.quantize_(model, recipe, keep=small_models.NOTHING_KEPT, state=hb.RunState(rank))
    options = ZeroConfig(**{"weights": weights, "bucket_numel": 3000, "max_norm": 1.0, **config})
    adamw = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1, fused=True)
    zero = ZeroOptimizer(model, adamw, param_options=decay_matrices, config=options)
    return model, report.state, zero


def decay_matrices(name, param):
    return {} if param.dim() >= 2 else {"weight_decay": 0.0}


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model, x):
    logits = model(x[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


def train(rank: int, model, state, zero, steps, micro_batches: int = 1) -> list[tuple[float, float]]:
    out = []
    for step in steps:
        for micro in range(micro_batches):
            x = tokens(rank, step * micro_batches + micro)
            if micro < micro_batches - 1:
                with zero.accumulate():
                    loss_of(model, x).backward()
            else:
                loss = loss_of(model, x)
                loss.backward()
            state.advance()
        norm = zero.step()
        out.append((loss.item(), norm.item()))
    return out


def same_losses(rank: int, world: int, steps: int, recipe, options: dict) -> list:
    """The run that holds only codes has the losses of the run that quantizes whole bf16 weights in every forward."""
    runs = {}
    for weights in ("nvfp4", "plain"):
        model, state, zero = build(rank, weights, recipe, **options)
        is_primary = [isinstance(p, PrimaryWeight) for p in model.parameters()]
        assert any(is_primary) == (weights == "nvfp4")
        runs[weights] = train(rank, model, state, zero, range(steps))
        zero.synchronize()
    assert runs["nvfp4"] == runs["plain"], "losses differ"
    losses = [loss for loss, _ in runs["nvfp4"]]
    assert losses[-1] < losses[0]
    return losses
