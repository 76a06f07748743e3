"""torch's causal attention, forward and backward, as the decoder calls it: `halfbyte plan` needs its rate.

Shapes are (sequences, tokens of one, query heads, key and value heads, head width).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.registry import Case, Outcome, Setting, Shape, Unequal
from halfbyte.plan.work import CAUSAL_BACKWARD
from halfbyte.verify.compare import relative_error
from halfbyte.verify.timing import measure

RAGGED = (2, 96, 4, 2, 32)
TOLERANCE = 8e-3  # roundings to bf16 of probabilities and of the output


def attention(setting: Setting, shape: Shape) -> Outcome:
    """Compare a small output with fp64, then time forward and backward together."""
    small = _inputs(RAGGED, setting.device)
    error = relative_error(_forward(*small), _plainly(*small))
    if not error <= TOLERANCE:
        raise Unequal(f"relative error {error:.1e}, at most {TOLERANCE:g}")
    q, k, v = (t.requires_grad_() for t in _inputs(shape, setting.device))
    dy = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(_forward(q, k, v), (q, k, v), dy)

    timed = measure([step], setting.device, budget=setting.budget)
    sequences, tokens, heads, _, width = shape
    flops = (1 + CAUSAL_BACKWARD) * 4 * sequences * tokens * (tokens / 2) * heads * width
    return Outcome(
        seconds=timed.seconds,
        spread=timed.spread,
        metric="us",
        value=timed.seconds * 1e6,
        work=flops,
        unit="TFLOP/s",
        checked=(f"relative error {error:.1e} from fp64, at most {TOLERANCE:g}",),
    )


def _inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in bf16."""
    sequences, tokens, heads, groups, width = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((sequences, count, tokens, width) for count in (heads, groups, groups))
    q, k, v = (torch.randn(size, generator=generator, device=device).bfloat16() for size in sizes)
    return q, k, v


def _forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the definition in fp64."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(repeats, dim=1) for t in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


CASES = (
    Case(
        name="attention/causal",
        about="torch's causal grouped-query attention, forward and backward, bf16",
        shapes=dict.fromkeys(
            [(8, 2048, 32, 8, 64), (8, 2048, 16, 4, 64), (1, 8192, 32, 8, 128), (4, 2048, 32, 8, 128)]
        ),
        small=(2, 64, 4, 2, 32),
        run=attention,
    ),
)
