"""A run to be planned: model, mesh, recipe and what a step does, as one value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import halfbyte as hb
from halfbyte.distributed.fsdp_reading import Reading, reading_of
from halfbyte.plan import mesh as meshes
from halfbyte.plan.architecture import Architecture, Kind, Matrix
from halfbyte.plan.hardware import Hardware
from halfbyte.plan.kept import Masters, Recompute
from halfbyte.plan.mesh import Mesh
from halfbyte.plan.shards import blocks_gathered, filled, splitting_ranks, table_gathered
from halfbyte.recipes import bf16
from halfbyte.spec import Recipe

Sharding = Literal["none", "zero1", "fsdp"]
"""none: whole fp32 parameters on every data-parallel rank under bf16 autocast, as `halfbyte train` runs. zero1:
`hb.distributed.ZeroOptimizer` around a bf16 model. fsdp: FSDP2 with fp32 shards, computing in bf16."""
Gather = Literal["bf16", "nvfp4"]
Values = Literal["bf16", "fp32"]
"""In what dtype FSDP2 gathers weights that are no codes, or reduces gradients. bf16: MixedPrecisionPolicy's
param_dtype, or reduce_dtype. fp32: without a policy, under autocast, as `halfbyte train --dp-shard` runs."""
BYTES = {"bf16": 2, "fp32": 4}
Kernels = Literal["compiled", "fused", "eager"]
"""compiled: all between GEMMs. fused: as few kernels, each launched by the host. eager: op by op."""
Head = Literal["gathered", "shared"]
Host = Literal["ahead", "measured"]
"""ahead: launches before the GPU is done, as with a fast host, CUDA graphs or a large model. measured: as slowly as
those of the machines that were measured."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run.

    Args:
        architecture, hardware, mesh, recompute: what runs where.
        recipe: of the layers that follow it; `follows_head` says whether the head is one of them.
        kept_blocks: this many blocks at the end stay in bf16.
        sequences, sequence, accumulate: sequences of a micro-batch on every data-parallel rank, tokens of one,
            micro-batches of a step.
        sharding, gather, values, reduce: see Sharding; in what form weights travel; see Values, of weights and of
            gradients.
        kernels: see Kernels.
        head: whether FSDP2 gathers embedding and head, or ranks share them where that is fewer bytes.
        host: how fast it launches.
        holds_logits: the loop keeps a reference to the bf16 logits while the backward runs.

    Raises:
        ValueError: the parts do not fit together.
    """

    architecture: Architecture
    hardware: Hardware
    mesh: Mesh
    recipe: Recipe
    follows_head: bool
    kept_blocks: int
    sequences: int
    sequence: int
    accumulate: int
    sharding: Sharding
    gather: Gather
    recompute: Recompute = "nothing"
    kernels: Kernels = "compiled"
    head: Head = "gathered"
    host: Host = "ahead"
    holds_logits: bool = False
    values: Values = "bf16"
    reduce: Values = "bf16"

    def __post_init__(self) -> None:
        for name in ("sequences", "sequence", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a whole number, 1 or more")
        if self.sequence % self.mesh.tp:
            raise ValueError(f"tp={self.mesh.tp} does not divide sequence={self.sequence}, which it splits; change one")
        self._check_sharding()
        if self.gather == "nvfp4" and not gathers_codes(self.recipe, self.sharding):
            raise ValueError(
                "gather='nvfp4': the recipe's weights are not one set of 16x16 tiles for forward and backward (with "
                "sharding='fsdp': or 1x16 blocks in forward); use gather='bf16', or recipe nvfp4 or four_over_six"
            )
        if self.recompute == "selective" and self.kernels != "eager":
            raise ValueError(
                f"recompute='selective' with kernels={self.kernels!r}: {self.kernels} blocks write over what it keeps; "
                "use recompute='full' or kernels='eager'"
            )

    def _check_sharding(self) -> None:
        mesh = self.mesh
        if self.sharding == "none" and mesh.dp_shard > 1:
            raise ValueError(f"dp_shard={mesh.dp_shard} with sharding='none': use dp_replicate, or sharding='fsdp'")
        if self.head == "shared" and (self.sharding != "fsdp" or mesh.tp > 1):
            raise ValueError(
                f"head='shared' with sharding={self.sharding!r}, tp={mesh.tp}: ranks that share weights as FSDP2 does "
                "share it; use sharding='fsdp' and tp=1, or head='gathered'"
            )
        for name, does in (("values", "gathers"), ("reduce", "reduces")):
            if getattr(self, name) == "fp32" and self.sharding != "fsdp":
                raise ValueError(
                    f"{name}='fp32' with sharding={self.sharding!r}: it says what FSDP2 {does}; use "
                    f"sharding='fsdp', or {name}='bf16'"
                )
        if self.sharding == "none" and self.gather == "nvfp4":
            raise ValueError("gather='nvfp4' with sharding='none': no weight travels; use gather='bf16'")
        if self.gather == "nvfp4" and mesh.tp > 1:
            raise ValueError(
                f"gather='nvfp4' with tp={mesh.tp}: parts of tensor-parallel weights travel in their values; use "
                "gather='bf16', or tp=1"
            )
        if self.sharding == "zero1" and (mesh.tp, mesh.ep, mesh.dp_replicate) != (1, 1, 1):
            raise ValueError(f"sharding='zero1' shards over dp_shard alone, and mesh={mesh}; use sharding='fsdp'")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one data-parallel rank."""
        return self.sequences * self.sequence

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.tokens * self.accumulate * self.mesh.data_ranks

    @property
    def reading(self) -> Reading:
        """In which forms forward and backward read a weight that FSDP2 gathers as codes."""
        found = reading_of(self.recipe)
        assert isinstance(found, Reading), "only codes are asked for"
        return found

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight that travels in its values, and of its gradient before it is reduced."""
        return BYTES[self.values]

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient on its way to its shard."""
        return BYTES[self.reduce]

    @property
    def masters(self) -> Masters:
        """What the forward sees of the parameters."""
        return "fp32" if self.sharding == "none" else "bf16"

    @property
    def spans(self) -> tuple[Span, ...]:
        """The blocks, with those that stay in bf16 apart."""
        left, found = self.kept_blocks, []
        for kind in reversed(self.architecture.kinds):
            kept = min(left, kind.count)
            left -= kept
            found += [Span(kind, bf16(), kept), Span(kind, self.recipe, kind.count - kept)]
        return tuple(span for span in reversed(found) if span.count)

    def local(self, matrix: Matrix) -> float:
        """Elements of a weight that one GPU multiplies with: what tp and ep leave of it."""
        return matrix.numel / self.mesh.tp / (self.mesh.ep if matrix.experts > 1 else 1)

    def sends_codes(self, matrix: Matrix) -> bool:
        """Whether FSDP2 gathers a weight that follows the recipe as codes: not experts that ranks share already."""
        return self.gather == "nvfp4" and (matrix.experts == 1 or self.mesh.ep == 1)

    def block_numel(self, kind: Kind) -> float:
        """Elements of a block that one GPU computes with."""
        return sum(map(self.local, self.architecture.matrices(kind))) + self.architecture.small(kind)

    @property
    def numel(self) -> float:
        """Elements of the model that one GPU computes with."""
        blocks = sum(kind.count * self.block_numel(kind) for kind in self.architecture.kinds)
        return blocks + self.architecture.edges / self.mesh.tp

    @property
    def shard(self) -> float:
        """Elements whose masters one GPU holds, the one that holds most."""
        if self.sharding == "zero1":  # of all weights laid end to end
            return self.numel / self.mesh.dp_shard
        config, mesh = self.architecture.config, self.mesh
        tables = 1 if config.tie_embeddings else 2
        edges = filled((config.dim,), mesh.dp_shard) / mesh.tp + tables * table_gathered(mesh, config)
        others, experts = blocks_gathered(mesh, self.architecture)
        return (edges + others) / splitting_ranks(mesh, False) + experts / splitting_ranks(mesh, True)

    def check(self, gpus: int) -> None:
        """Raise unless the model can lie on the mesh, and the mesh is of so many GPUs."""
        meshes.check_mesh(self.mesh, self.architecture, gpus)


@dataclass(frozen=True)
class Span:
    """`count` blocks of a kind under one recipe."""

    kind: Kind
    recipe: Recipe
    count: int


def gathers_codes(recipe: Recipe, sharding: Sharding) -> bool:
    """Whether weights travel as codes: 16x16 that serve forward and backward, or where FSDP2 gathers them 1x16."""
    reading = reading_of(recipe)
    if isinstance(reading, str):
        return False
    return sharding == "fsdp" or (reading.spec.is_tile and recipe.backward == "original")


def kept_blocks(architecture: Architecture, share: float) -> int:
    """Return how many blocks at the end stay in bf16 by the policy of `hb.Keep`."""
    return hb.Keep(last_fraction=share).last_blocks(architecture.layers)
