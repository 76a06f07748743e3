"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU or a mixture of SwiGLU experts.

Parameter names are those of Hugging Face's Llama without the leading `model.`, and every projection is its own
`nn.Linear`, so that a recipe can be set layer by layer. Shape letters: B sequences, T tokens of one, H query heads,
G key/value heads, D head width, C model width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from halfbyte import selective_checkpoint_ops
from halfbyte.nn import forward_shared
from halfbyte.nn.norm import add_then_norm
from halfbyte.train.moe import MoE, MoEConfig

WIDTH_MULTIPLE = 32
"""Widths are multiples of this: whole MXFP8 blocks, whole pairs of NVFP4 blocks."""

HEAD_STD = 0.02

Recompute = Literal["nothing", "selective", "full"]
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder.

    Args:
        dim, hidden, layers, heads, kv_heads: C, the SwiGLU width (of one expert), the blocks, H and G.
        vocab_size: V, the number of tokens.
        rope_theta: base of the rotary frequencies.
        tie_embeddings: lm_head shares the embedding's weight.
        moe: experts in the place of every MLP; None for a dense model.

    Raises:
        ValueError: the numbers do not fit together; the message names field, value and remedy.
    """

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "hidden", "layers", "heads", "kv_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"heads={self.heads}: dim={self.dim} must split into heads of an even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: use a divisor of heads={self.heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """How many parameters the decoder has, counted from the shape."""
        return self._count(1 if self.moe is None else self.moe.experts)

    @property
    def active_parameters(self) -> int:
        """How many of them one token meets."""
        return self._count(1 if self.moe is None else self.moe.per_token)

    def _count(self, experts: int) -> int:
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        router = 0 if self.moe is None else self.moe.experts * self.dim
        block = attention + router + experts * 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + self.dim + self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)


class Rotary(nn.Module):
    """Cosines and sines of the rotary positions, computed for the length of the input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("frequency", config.rope_theta**-exponent, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, fp32 [T, D]."""
        angle = torch.outer(torch.arange(length, device=self.frequency.device, dtype=torch.float32), self.frequency)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def rotate_pairs(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (element i, element i + D/2) by the angle of its position."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD.to(x_BHTD.dtype) + torch.cat((-second, first), dim=-1) * sin_TD.to(x_BHTD.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; q, k and v read one quantized input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kv_dim = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.is_grouped = config.kv_heads != config.heads
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in forward_shared(x_BTC, (self.q_proj, self.k_proj, self.v_proj))
        )
        q, k = rotate_pairs(q, cos_TD, sin_TD), rotate_pairs(k, cos_TD, sin_TD)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU; gate and up read one quantized input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = forward_shared(x_BTC, (self.gate_proj, self.up_proj))
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and MLP, or experts, with residual connections.

    The stream between blocks travels as two tensors, what the last layer wrote and the stream before it: the norm that
    reads their sum also takes it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = FeedForward(config) if config.moe is None else MoE(config.dim, config.hidden, config.moe)

    def forward(
        self, x_BTC: Tensor, residual_BTC: Tensor | None, cos_TD: Tensor, sin_TD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the two parts of the block's output and, with experts, its load-balancing loss.

        Args:
            x_BTC, residual_BTC: the two parts of its input; one of None is left out.
            cos_TD, sin_TD: what `Rotary` returns.
        """
        x_BTC, residual_BTC = add_then_norm(self.input_layernorm, x_BTC, residual_BTC)
        x_BTC = self.self_attn(x_BTC, cos_TD, sin_TD)
        x_BTC, residual_BTC = add_then_norm(self.post_attention_layernorm, x_BTC, residual_BTC)
        if isinstance(self.mlp, MoE):
            x_BTC, balance = self.mlp(x_BTC)
            return x_BTC, residual_BTC, balance
        return self.mlp(x_BTC), residual_BTC, None


class Decoder(nn.Module):
    """The language model: tokens to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config)
        self.recompute: Recompute = "nothing"

    def forward(self, tokens_BT: Tensor, balance: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, T, V] for int64 tokens [B, T].

        With `balance`, return the blocks' mean load-balancing loss too, already weighted; a dense model's is zero.
        """
        cos_TD, sin_TD = self.rotary(tokens_BT.shape[-1])
        x_BTC, residual_BTC = self.embed_tokens(tokens_BT), None
        losses = []
        for block in self.layers:
            if self.recompute != "nothing" and residual_BTC is not None:
                x_BTC, residual_BTC = x_BTC + residual_BTC, None  # a checkpoint keeps what its block is given
            x_BTC, residual_BTC, loss = _run(block, self.recompute, x_BTC, residual_BTC, cos_TD, sin_TD)
            losses += [] if loss is None else [loss]
        logits_BTV = self.lm_head(add_then_norm(self.norm, x_BTC, residual_BTC)[0])
        if not balance:
            return logits_BTV
        return logits_BTV, torch.stack(losses).mean() if losses else torch.zeros(
            (), device=tokens_BT.device, dtype=torch.float32
        )


def _run(block: nn.Module, recompute: Recompute, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a block, keeping for the backward pass what `recompute` leaves."""
    if recompute == "nothing" or not torch.is_grad_enabled():
        return block(*inputs)
    options: dict[str, Any] = {}
    if recompute == "selective":
        kept = [*selective_checkpoint_ops(), *ATTENTION]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


class _Undrawn(TorchFunctionMode):
    """Leaves out torch's own random initial weights, which for 8B parameters take a minute."""

    DRAWING = frozenset(("kaiming_uniform_", "uniform_", "normal_"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def initialised(config: ModelConfig, seed: int) -> Decoder:
    """Return a decoder on the CPU with the weights of `initialise_`; torch's generator stays where it is."""
    with _Undrawn():
        model = Decoder(config)
    initialise_(model, seed)
    return model


def initialise_(model: Decoder, seed: int) -> None:
    """Fill the weights from `seed` so that signals keep their size at any width; norms become one.

    Projections are normal with variance 1 / in_features, those that write to the residual stream a further 2 * layers
    smaller (GPT-2); embeddings have variance 1 so that the first block sees more than its own output; lm_head starts
    near zero, so that the first loss is log(V). The numbers are drawn on the CPU in the order of the parameters' names:
    every device starts alike.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = _initial_std(name, parameter, model.config)
            in_place = parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()
            drawn = parameter if in_place else torch.empty(parameter.shape, dtype=torch.float32)
            drawn.normal_(0.0, std, generator=generator)
            if not in_place:
                parameter.copy_(drawn)


def _initial_std(name: str, parameter: Tensor, config: ModelConfig) -> float:
    if name == "lm_head.weight":
        return HEAD_STD
    if name == "embed_tokens.weight":
        return HEAD_STD if config.tie_embeddings else 1.0
    std = parameter.shape[-1] ** -0.5
    is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return std / math.sqrt(2 * config.layers) if is_residual else std


def _shape(dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab_size: int) -> ModelConfig:
    return ModelConfig(dim=dim, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, vocab_size=vocab_size)


_LLAMA_3 = replace(_shape(2048, 8192, 16, 32, 8, 128_256), rope_theta=500_000.0)
DENSE = {
    "tiny": _shape(64, 96, 2, 2, 1, 256),  # 0.09M parameters: for tests that run in seconds
    "nano": _shape(128, 352, 3, 4, 2, 256),  # 0.62M with bytes: for two CPU cores
    "2m": _shape(192, 512, 5, 6, 2, 256),
    "10m": _shape(320, 864, 7, 5, 1, 4096),
    "60m": _shape(512, 1376, 10, 8, 4, 32_000),
    "125m": _shape(768, 2048, 12, 12, 4, 32_000),
    "300m": _shape(1024, 2816, 21, 16, 4, 32_000),
    # 1.2B, 3.2B and 8.0B: the shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B
    "1b": replace(_LLAMA_3, tie_embeddings=True),
    "3b": replace(_LLAMA_3, tie_embeddings=True, dim=3072, layers=28, heads=24),
    "8b": replace(_LLAMA_3, dim=4096, hidden=14_336, layers=32),
}
SPARSE = {  # 8 experts, 2 for each token
    "moe-tiny": _shape(64, 32, 2, 2, 1, 256),  # 0.16M parameters: for tests that run in seconds
    "moe-2m": _shape(128, 160, 4, 4, 2, 256),  # 2.2M with bytes, 0.8M of them active: for two CPU cores
    "moe-10m": _shape(256, 256, 5, 4, 2, 4096),
    "moe-60m": _shape(384, 512, 7, 6, 2, 32_000),
    "moe-300m": _shape(768, 1024, 12, 12, 4, 32_000),
    "moe-1b": _shape(1280, 1792, 16, 20, 4, 32_000),
}
PRESETS: dict[str, ModelConfig] = {**DENSE, **{name: replace(s, moe=MoEConfig()) for name, s in SPARSE.items()}}


def model_preset(name: str) -> ModelConfig:
    """Return the model preset called `name`.

    Raises:
        ValueError: no preset has that name; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f"model={name!r} is not a preset; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
