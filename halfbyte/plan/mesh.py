"""The device mesh of a planned run: how many ways what is split, and which meshes cannot be."""

from __future__ import annotations

from dataclasses import dataclass, fields

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.plan.architecture import Architecture

LONGEST = 12
"""Digits of a number of a mesh."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ways of parallelism; neighbouring GPUs differ in tp first, then in dp_shard, then in dp_replicate.

    Args:
        dp_replicate: groups that hold the same shards, and average their gradients.
        dp_shard: GPUs that share masters, gradients and optimizer state, each with tokens of its own.
        tp: GPUs that split every matrix and, outside of them, the sequence.
        ep: GPUs of dp_shard that split the experts.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"mesh.{field.name}={value!r}: give a whole number, 1 or more")
        if self.dp_shard % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp_shard={self.dp_shard}, whose ranks split the experts; give a "
                f"multiple, as in ep={self.ep},dp_shard={self.ep}"
            )

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks with tokens of their own."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        parts = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        return ",".join(part for part in parts if not part.endswith("=1")) or "dp_shard=1"


def parse_mesh(text: str) -> Mesh:
    """Return the mesh written as `dp_shard=64,tp=8`.

    Raises:
        ValueError: a name or number is none.
    """
    known = [field.name for field in fields(Mesh)]
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, number = part.partition("=")
        if name not in known or not number.isdecimal():
            raise ValueError(
                f"mesh={text!r}: {part!r} is not one of {', '.join(f'{n}=N' for n in known)}, nor is it auto"
            )
        if len(number) > LONGEST:
            raise ValueError(f"mesh: {name} has {len(number):,} digits; give a number of GPUs")
        if name in sizes:
            raise ValueError(f"mesh={text!r}: {name} is there twice; give it once")
        sizes[name] = int(number)
    return Mesh(**sizes)


def check_mesh(mesh: Mesh, architecture: Architecture, gpus: int) -> None:
    """Raise unless a model can lie on a mesh of so many GPUs.

    Raises:
        ValueError: the message names argument, value and remedy.
    """
    if mesh.gpus != gpus:
        raise ValueError(
            f"mesh={mesh}: dp_replicate x dp_shard x tp = {mesh.gpus:,} GPUs, and gpus={gpus:,}; {_remedy(mesh, gpus)}"
        )
    config = architecture.config
    heads = config.heads if architecture.latent is not None else config.kv_heads
    if heads % mesh.tp:
        kind = "heads" if architecture.latent is not None else "kv_heads"
        raise ValueError(f"tp={mesh.tp} does not divide {kind}={heads} of {architecture.name}; use a divisor of it")
    for kind in architecture.kinds:
        if kind.hidden % (NVFP4_BLOCK * mesh.tp):
            raise ValueError(
                f"tp={mesh.tp}: parts of hidden={kind.hidden} of {architecture.name} are no whole blocks of "
                f"{NVFP4_BLOCK}; use a smaller tp"
            )
        if kind.moe is not None and kind.moe.experts % mesh.ep:
            raise ValueError(f"ep={mesh.ep} does not divide experts={kind.moe.experts}; use a divisor of it")
    if mesh.ep > 1 and not architecture.has_experts:
        raise ValueError(f"ep={mesh.ep}: {architecture.name} has no experts; use ep=1")


def _remedy(mesh: Mesh, gpus: int) -> str:
    rest = mesh.dp_replicate * mesh.tp
    if gpus % rest == 0 and (gpus // rest) % mesh.ep == 0:
        return f"use dp_shard={gpus // rest}, or gpus={mesh.gpus}"
    return f"use gpus={mesh.gpus}, or --mesh auto"
