"""Collectives of a step: what travels between which GPUs, in bytes and seconds.

`message` is what a collective gathers, scatters, reduces or exchanges in all; `wire` is what one GPU receives of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from halfbyte.distributed.config import ZeroConfig
from halfbyte.distributed.fixed_rows import ID_BYTES
from halfbyte.distributed.head import STATISTIC_BYTES, TARGET_BYTES
from halfbyte.distributed.plan import Item, scale_room, storage_plan
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.plan.architecture import Kind, Matrix
from halfbyte.plan.calibration import NETWORK_SHARE, NVLINK_SHARE
from halfbyte.plan.hardware import Hardware
from halfbyte.plan.held import BF16, FP32
from halfbyte.plan.job import Job
from halfbyte.plan.shards import (
    blocks_gathered,
    codes_gathered,
    filled,
    small_gathered,
    splitting_ranks,
    table_gathered,
    values_gathered,
)
from halfbyte.plan.shared_edges import shared_edges
from halfbyte.spec import Recipe

Verb = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Phase = Literal["forward", "backward", "step"]
TP_FORWARD, TP_BACKWARD = 4, 6
"""Collectives of a block under tensor parallelism with a split sequence (arXiv 2205.05198): its two halves gather their
input and scatter their output; the backward does the reverse and gathers the inputs of weight gradients again."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of one collective: how many, and the distance of neighbours in the numbering of GPUs."""

    size: int
    stride: int

    def local(self, hardware: Hardware) -> int:
        """How many of them lie in one NVLink domain."""
        return max(1, min(self.size, hardware.domain // self.stride))


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of collective of a step.

    Args:
        what: is sent.
        verb, phase: how, and beside what.
        group: between whom.
        message: bytes of all calls of a step together.
        is_hidden: whether GEMMs run beside it.
    """

    what: str
    verb: Verb
    phase: Phase
    group: Group
    message: float
    is_hidden: bool

    @property
    def wire(self) -> float:
        """Bytes that one GPU receives."""
        share = (self.group.size - 1) / self.group.size
        return self.message * share * (2 if self.verb == "all-reduce" else 1)

    def seconds(self, hardware: Hardware) -> float:
        """Seconds of all calls, by bandwidth alone."""
        local = self.group.local(hardware)
        nodes = self.group.size / local
        nvlink, network = hardware.nvlink * NVLINK_SHARE.value, hardware.network * NETWORK_SHARE.value
        if self.verb == "all-to-all":  # every rank sends to every other through its own adapter
            across = self.message * (self.group.size - local) / self.group.size / network
            return max(across, self.message * (local - 1) / self.group.size / nvlink)
        twice = 2 if self.verb == "all-reduce" else 1
        # What a node lacks enters it once, through the adapters of its ranks.
        across = twice * self.message * (nodes - 1) / nodes / (local * network)
        return max(across, self.wire / nvlink if local > 1 else 0.0)


def collectives(job: Job) -> tuple[Collective, ...]:
    """Return the collectives of a step; none on one GPU."""
    found = [*_weights(job), *_gradients(job), *_activations(job), *_of_edges(job)]
    return tuple(c for c in found if c.group.size > 1 and c.message)


def _shards(job: Job, experts: bool) -> Group:
    mesh = job.mesh
    return Group(size=splitting_ranks(mesh, experts), stride=mesh.tp * (mesh.ep if experts else 1))


def _weights(job: Job) -> Iterator[Collective]:
    """Yield gathers of weights."""
    if job.sharding == "zero1":
        verb, group = "all-gather", _shards(job, False)
        gathered, tiles = zero_gather(job)
        yield Collective(what="weights", verb=verb, phase="forward", group=group, message=gathered, is_hidden=True)
        maxima = FP32 * tiles
        yield Collective(
            what="maxima of tiles", verb="all-reduce", phase="step", group=group, message=maxima, is_hidden=False
        )
    if job.sharding != "fsdp":
        return
    for phase, others in (("forward", _edges(job)), ("backward", 0.0)):
        for experts in (False, True):
            message = job.accumulate * (bytes_of_block(job, experts, phase) + (0.0 if experts else others))
            what = "weights of experts" if experts else "weights"
            group = _shards(job, experts)
            yield Collective(what=what, verb="all-gather", phase=phase, group=group, message=message, is_hidden=True)


def _edges(job: Job) -> float:
    """Return what embedding, last norm and head take as they are gathered; FSDP2 keeps them for the backward."""
    values = job.value_bytes * _edge_values(job, is_head_coded=_is_head_coded(job))
    return values + (matrix_bytes(job, _head(job), job.recipe) if _is_head_coded(job) else 0.0)


def _head(job: Job) -> Matrix:
    config = job.architecture.config
    return Matrix(name="lm_head", rows=config.vocab_size, cols=config.dim)


def _is_head_coded(job: Job) -> bool:
    return job.follows_head and not shared_edges(job).head


def _edge_values(job: Job, *, is_head_coded: bool) -> float:
    """Return the elements of embedding, last norm and head that FSDP2 gathers in values, of one of tp ranks."""
    config, shared, ranks = job.architecture.config, shared_edges(job), job.mesh.dp_shard
    is_kept = (shared.head,) if config.tie_embeddings else (shared.embedding, shared.head or is_head_coded)
    tables = len(is_kept) - sum(is_kept)
    return filled((config.dim,), ranks) / job.mesh.tp + tables * table_gathered(job.mesh, config)


def bytes_of_block(job: Job, experts: bool, phase: Phase) -> float:
    """Return what all blocks' weights, of experts or the others, take as they are gathered for one phase."""
    total = 0.0
    for span in job.spans:
        chosen = [m for m in job.architecture.matrices(span.kind) if (m.experts > 1) == experts]
        sizes = [matrix_bytes(job, matrix, span.recipe, phase) for matrix in chosen]
        small = 0 if experts else job.value_bytes * small_gathered(job.mesh, job.architecture, span.kind)
        total += span.count * (sum(sizes) + small)
    return total


def matrix_bytes(job: Job, matrix: Matrix, recipe: Recipe, phase: Phase = "forward") -> float:
    """Return the bytes of one weight as it is gathered: codes and a scale byte for each block, or values."""
    is_backward = phase == "backward"
    if not job.sends_codes(matrix) or recipe is not job.recipe or (is_backward and job.reading.is_in_values):
        return job.value_bytes * values_gathered(job.mesh, matrix)
    return codes_gathered(job.mesh, matrix, job.reading, is_backward)


def zero_gather(job: Job) -> tuple[int, int]:
    """Return the bytes that ZeroOptimizer gathers in a step, from its storage plan, and the tiles of its weights."""
    plans = storage_plan(items(job), job.mesh.dp_shard, ZeroConfig().bucket_numel)
    coded = [plan.tiled and job.gather == "nvfp4" for plan in plans]
    count = sum(plan.numel // 2 if code else BF16 * plan.numel for plan, code in zip(plans, coded, strict=True))
    tiles = sum(place.tile_count for plan, code in zip(plans, coded, strict=True) if code for place in plan.places)
    return count + (scale_room(plans) * job.mesh.dp_shard if any(coded) else 0), tiles


def items(job: Job) -> list[Item]:
    """Return the parameters of the model in their order, those in tiles marked."""
    config = job.architecture.config
    found = [Item("embed_tokens.weight", 1, config.vocab_size * config.dim, False)]
    for span in job.spans:
        found += _block_items(job, span.kind, span.recipe) * span.count
    found.append(Item("norm.weight", 1, config.dim, False))
    if not config.tie_embeddings:
        size = (config.vocab_size, config.dim) if job.follows_head else (1, config.vocab_size * config.dim)
        found.append(Item("lm_head.weight", *size, job.follows_head))
    return found


def _block_items(job: Job, kind: Kind, recipe: Recipe) -> list[Item]:
    is_tiled = recipe is job.recipe and recipe.fprop is not None
    matrices = job.architecture.matrices(kind)
    coded = {f"{m.name}.weight" for m in matrices if m.experts == 1 or m.rows % NVFP4_BLOCK == 0}
    found = []
    for name, parameter in job.architecture.block(kind, compiled=False).named_parameters():
        tiled = is_tiled and name in coded
        cols = parameter.shape[-1] if tiled else parameter.numel()  # experts as one matrix
        size = parameter.numel() // cols, cols
        found.append(Item(name, *size, tiled))
    return found


def _gradients(job: Job) -> Iterator[Collective]:
    """Yield reductions of gradients."""
    mesh = job.mesh
    across = Group(size=mesh.dp_replicate, stride=mesh.tp * mesh.dp_shard)
    if job.sharding == "none":
        yield _reduction("gradients", "all-reduce", across, FP32 * job.numel)
        return
    if job.sharding == "zero1":
        yield _reduction("gradients", "reduce-scatter", _shards(job, False), BF16 * job.numel)
        return
    others, experts = blocks_gathered(mesh, job.architecture)
    others += _edge_values(job, is_head_coded=False)
    for what, numel, is_expert in (("gradients", others, False), ("gradients of experts", experts, True)):
        yield _reduction(what, "reduce-scatter", _shards(job, is_expert), job.reduced_bytes * numel * job.accumulate)
    yield _reduction("gradients of shards", "all-reduce", across, job.reduced_bytes * job.shard)


def _reduction(what: str, verb: Verb, group: Group, message: float) -> Collective:
    return Collective(what=what, verb=verb, phase="backward", group=group, message=message, is_hidden=True)


def _of_edges(job: Job) -> Iterator[Collective]:
    """Yield what ranks exchange that share embedding and head, of every micro-batch."""
    config, group, shared = job.architecture.config, _shards(job, False), shared_edges(job)
    row, values = BF16 * config.dim, job.value_bytes * config.dim  # of activations, and of the embedding's weight
    each: list[tuple[str, Verb, Phase, float]] = []
    if shared.embedding:
        tokens = job.tokens * (group.size if shared.is_fixed else 1)
        verb: Verb = "all-gather" if shared.is_fixed else "all-to-all"
        each.append(("rows of the embedding", "all-to-all", "forward", tokens * (values + ID_BYTES)))
        sums = values if shared.is_fixed else job.reduced_bytes * config.dim
        each.append(("gradients of rows", verb, "backward", tokens * sums))
    if shared.head:
        tokens = group.size * job.tokens
        loss = tokens * (TARGET_BYTES + 2 * STATISTIC_BYTES)
        each.append(("activations of the head", "all-gather", "forward", tokens * row + loss))
        each.append(("gradients of activations", "all-to-all", "backward", tokens * row))
    for what, how, phase, message in each:
        message *= job.accumulate
        yield Collective(what=what, verb=how, phase=phase, group=group, message=message, is_hidden=False)


def _activations(job: Job) -> Iterator[Collective]:
    """Yield what tensor and expert parallelism exchange of every micro-batch, forward and backward."""
    mesh, dim = job.mesh, job.architecture.config.dim
    again = job.recompute == "full"
    each = BF16 * job.tokens * dim * job.accumulate * job.architecture.layers
    tp = Group(size=mesh.tp, stride=1)
    for phase, count in (("forward", TP_FORWARD), ("backward", TP_BACKWARD + (TP_FORWARD if again else 0))):
        yield Collective(
            what="activations", verb="all-gather", phase=phase, group=tp, message=count * each, is_hidden=False
        )
    copies = sum(kind.count * kind.moe.per_token for kind in job.architecture.kinds if kind.moe is not None)
    sent = BF16 * job.tokens / mesh.tp * dim * job.accumulate * copies
    ep = Group(size=mesh.ep, stride=mesh.tp)
    for phase, count in (("forward", 2), ("backward", 4 if again else 2)):
        yield Collective(
            what="tokens of experts", verb="all-to-all", phase=phase, group=ep, message=count * sent, is_hidden=False
        )
