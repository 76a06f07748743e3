"""A block of the DeepSeek-V3 kind, for counting: latent attention (arXiv 2412.19437, 2.1.1) and a shared expert.

It exists to be asked for its shapes and for what its forward keeps, on `meta` or with fake tensors. Attention is a
stand-in that keeps what flash attention keeps: q, k, v, the output and a logarithm of sums for each row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nn import RMSNorm
from halfbyte.nn.norm import add_then_norm
from halfbyte.train.model import FeedForward, ModelConfig, rotate_pairs
from halfbyte.train.moe import MoE, MoEConfig


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Widths of latent attention: ranks of the compressed queries, and keys and values; parts of a head."""

    query_rank: int
    kv_rank: int
    head: int
    rotary: int


class Flash(torch.autograd.Function):
    """What attention keeps, without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return an output [B, H, T, width of v]."""
        y = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, y, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """Refuse: nothing is computed."""
        raise AssertionError("a stand-in has no gradient")


class LatentAttention(nn.Module):
    """q from a compressed x; k and v of every head from another; one rotated part of k serves all heads."""

    def __init__(self, config: ModelConfig, latent: Latent) -> None:
        super().__init__()
        self.config, self.latent = config, latent
        width = latent.head + latent.rotary
        self.q_a_proj = nn.Linear(config.dim, latent.query_rank, bias=False)
        self.q_a_layernorm = RMSNorm(latent.query_rank)
        self.q_b_proj = nn.Linear(latent.query_rank, config.heads * width, bias=False)
        self.kv_a_proj = nn.Linear(config.dim, latent.kv_rank + latent.rotary, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank)
        self.kv_b_proj = nn.Linear(latent.kv_rank, config.heads * 2 * latent.head, bias=False)
        self.o_proj = nn.Linear(config.heads * latent.head, config.dim, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        head, rotary = self.latent.head, self.latent.rotary
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTC)))
        q = q.unflatten(-1, (-1, head + rotary)).transpose(1, 2)
        packed, turned = self.kv_a_proj(x_BTC).split((self.latent.kv_rank, rotary), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(packed)).unflatten(-1, (-1, 2 * head)).transpose(1, 2)
        k, v = kv.chunk(2, dim=-1)
        turned = rotate_pairs(turned[:, None], cos_TD, sin_TD).expand(-1, k.shape[1], -1, -1)
        q = torch.cat((q[..., :head], rotate_pairs(q[..., head:], cos_TD, sin_TD)), dim=-1)
        y: Any = Flash.apply(q, torch.cat((k, turned), dim=-1), v.contiguous())
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class LatentBlock(nn.Module):
    """Pre-norm latent attention, then an MLP, or experts with a shared MLP of `shared` times their width."""

    def __init__(
        self, config: ModelConfig, latent: Latent, experts: MoEConfig | None, hidden: int, shared: int
    ) -> None:
        super().__init__()
        shape = _with_hidden(config, hidden)
        self.input_layernorm = RMSNorm(config.dim)
        self.self_attn = LatentAttention(config, latent)
        self.post_attention_layernorm = RMSNorm(config.dim)
        self.mlp = FeedForward(shape) if experts is None else MoE(config.dim, hidden, experts)
        self.shared_expert = (
            FeedForward(_with_hidden(config, shared * hidden)) if experts is not None and shared else None
        )

    def forward(
        self, x_BTC: Tensor, residual_BTC: Tensor | None, cos_TD: Tensor, sin_TD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the two parts of the block's output and, with experts, their load-balancing loss; see `Block`."""
        x_BTC, residual_BTC = add_then_norm(self.input_layernorm, x_BTC, residual_BTC)
        x_BTC, balance = self.self_attn(x_BTC, cos_TD, sin_TD), None
        z_BTC, residual_BTC = add_then_norm(self.post_attention_layernorm, x_BTC, residual_BTC)
        if isinstance(self.mlp, MoE):
            y_BTC, balance = self.mlp(z_BTC)
            if self.shared_expert is not None:
                y_BTC = y_BTC + self.shared_expert(z_BTC)
        else:
            y_BTC = self.mlp(z_BTC)
        return y_BTC, residual_BTC, balance


def _with_hidden(config: ModelConfig, hidden: int) -> ModelConfig:
    return replace(config, hidden=hidden, moe=None)
