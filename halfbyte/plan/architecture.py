"""The models that can be planned: halfbyte's own presets, and larger ones that only exist here as shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import nn

from halfbyte.nn import MLP as FusedMLP
from halfbyte.nn import RMSNorm
from halfbyte.plan.latent import Latent, LatentBlock
from halfbyte.train import model as models
from halfbyte.train.model import Block, ModelConfig
from halfbyte.train.moe import MoE, MoEConfig


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Blocks of one shape.

    Args:
        count: how many there are.
        hidden: width of the MLP, or of one expert.
        moe: its experts; None for a dense MLP.
        shared: MLPs of an expert's width that every token meets.
    """

    count: int
    hidden: int
    moe: MoEConfig | None = None
    shared: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """A decoder as the planner sees it: blocks of a few kinds between an embedding and a head.

    Equal only to itself, so that what is found of its blocks is found again by identity.

    Args:
        name: of the preset.
        config: widths, heads, vocabulary; its MLP is that of `kinds`.
        kinds: the blocks, first to last.
        latent: latent attention instead of grouped-query attention.
    """

    name: str
    config: ModelConfig
    kinds: tuple[Kind, ...]
    latent: Latent | None = None

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def has_experts(self) -> bool:
        return any(kind.moe is not None for kind in self.kinds)

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Columns of all heads' q (and k), and of all heads' v."""
        if self.latent is None:
            return self.config.dim, self.config.dim
        heads = self.config.heads
        return heads * (self.latent.head + self.latent.rotary), heads * self.latent.head

    def block(self, kind: Kind, *, compiled: bool) -> nn.Module:
        """Return one block on `meta` whose norms keep what a GPU's norms keep.

        Args:
            kind: which.
            compiled: its MLP keeps gate and up alone, as compiled and fused ones do; experts run eagerly.
        """
        with torch.device("meta"):
            if self.latent is not None:
                block: nn.Module = LatentBlock(self.config, self.latent, kind.moe, kind.hidden, kind.shared)
            else:
                block = Block(replace(self.config, hidden=kind.hidden, moe=kind.moe))
                for name in ("input_layernorm", "post_attention_layernorm"):
                    setattr(block, name, RMSNorm(self.config.dim, self.config.norm_eps))
        for name, child in list(block.named_children()):
            if compiled and isinstance(child, models.FeedForward):
                parts = {"gate_proj": child.gate_proj, "up_proj": child.up_proj, "down_proj": child.down_proj}
                setattr(block, name, FusedMLP.from_linears(parts, "swiglu"))
        return block

    def matrices(self, kind: Kind) -> tuple[Matrix, ...]:
        """Return the weights of linear layers in one block."""
        return self._shapes[kind][0]

    def small(self, kind: Kind) -> int:
        """Elements of one block's parameters that are no weight of a linear layer: norms and routers."""
        return sum(map(prod, self.small_shapes(kind)))

    def small_shapes(self, kind: Kind) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of these."""
        return self._shapes[kind][1]

    @cached_property
    def _shapes(self) -> dict[Kind, tuple[tuple[Matrix, ...], tuple[tuple[int, ...], ...]]]:
        return {kind: _shapes(self.block(kind, compiled=False)) for kind in self.kinds}

    @cached_property
    def expert_parameters(self) -> int:
        """Those of routed experts."""
        return sum(k.count * m.numel for k in self.kinds for m in self.matrices(k) if m.experts > 1)

    @property
    def edges(self) -> int:
        """Parameters of the embedding, the head and the last norm."""
        config = self.config
        return config.vocab_size * config.dim * (1 if config.tie_embeddings else 2) + config.dim

    @property
    def parameters(self) -> int:
        blocks = sum(k.count * (self.small(k) + sum(m.numel for m in self.matrices(k))) for k in self.kinds)
        return blocks + self.edges

    @property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        idle = sum(
            k.count * m.numel * (m.experts - m.per_token) // m.experts for k in self.kinds for m in self.matrices(k)
        )
        return self.parameters - idle


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight [rows, cols] of a block, once for each expert; `per_token` of them multiply a token."""

    name: str
    rows: int
    cols: int
    experts: int = 1
    per_token: int = 1

    @property
    def numel(self) -> int:
        return self.experts * self.rows * self.cols


def _shapes(block: nn.Module) -> tuple[tuple[Matrix, ...], tuple[tuple[int, ...], ...]]:
    """Return the weights of linear layers in a block, and the shapes of its other parameters."""
    found = []
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            found.append(Matrix(name=name, rows=module.out_features, cols=module.in_features))
        elif isinstance(module, MoE):
            experts = {"experts": module.config.experts, "per_token": module.config.per_token}
            for part in ("gate_up_proj", "down_proj"):
                _, rows, cols = getattr(module, part).weight.shape
                found.append(Matrix(name=f"{name}.{part}", rows=rows, cols=cols, **experts))
    weights = {f"{matrix.name}.weight" for matrix in found}
    return tuple(found), tuple(tuple(p.shape) for name, p in block.named_parameters() if name not in weights)


def architecture_of(name: str, config: ModelConfig) -> Architecture:
    """Return a model of halfbyte's own kind."""
    return Architecture(
        name=name, config=config, kinds=(Kind(count=config.layers, hidden=config.hidden, moe=config.moe),)
    )


def llama3_70b() -> Architecture:
    """70.6B parameters: the shape of Llama 3 70B (arXiv 2407.21783, table 3)."""
    shape = replace(models.model_preset("8b"), dim=8192, hidden=28_672, layers=80, heads=64)
    return architecture_of("llama3-70b", shape)


def deepseek_v3() -> Architecture:
    """671B parameters, 37B of them active: the shape of DeepSeek-V3 (arXiv 2412.19437, 4.2) without its MTP module."""
    config = ModelConfig(dim=7168, hidden=18_432, layers=61, heads=128, kv_heads=128, vocab_size=129_280, norm_eps=1e-6)
    experts = MoEConfig(experts=256, per_token=8)
    return Architecture(
        name="deepseek-v3",
        config=config,
        kinds=(Kind(count=3, hidden=18_432), Kind(count=58, hidden=2048, moe=experts, shared=1)),
        latent=Latent(query_rank=1536, kv_rank=512, head=128, rotary=64),
    )


LARGE: dict[str, Callable[[], Architecture]] = {
    "llama3-8b": lambda: architecture_of("llama3-8b", models.model_preset("8b")),
    "llama3-70b": llama3_70b,
    "deepseek-v3": deepseek_v3,
}


def names() -> tuple[str, ...]:
    """Return the names of all models."""
    return (*LARGE, *models.PRESETS)


def find_architecture(name: str, vocabulary: int | None = None) -> Architecture:
    """Return the model called `name`, with another vocabulary if one is given.

    Raises:
        ValueError: none has that name, or the vocabulary is empty.
    """
    if name not in names():
        raise ValueError(f"model={name!r} cannot be planned; use one of {', '.join(names())}")
    found = LARGE[name]() if name in LARGE else architecture_of(name, models.model_preset(name))
    if vocabulary is None:
        return found
    return replace(found, config=replace(found.config, vocab_size=vocabulary))
