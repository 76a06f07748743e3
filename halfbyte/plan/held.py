"""Memory of one GPU by kind, at the moments of a step that may be its peak.

Sizes follow from shapes and from what `hb.memory_report` says a block keeps; nothing here is fitted to a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.plan.architecture import Kind, Matrix
from halfbyte.plan.job import Job
from halfbyte.plan.kept import WORD, BlockKept, kept
from halfbyte.plan.shared_edges import shared_edges
from halfbyte.reference.logits import WORK

FP32, BF16 = 4, 2
CODES = 0.5 + 1 / NVFP4_BLOCK
"""Bytes of a weight in NVFP4 as a GEMM reads it: its code, and the scale of its block."""
TILE_SCALE = 1 / NVFP4_BLOCK**2
"""Bytes of scale to each weight of a 16x16 tile, as it travels."""
LOSS_WORDS = 3
"""fp32 tensors of the logits' size at once: log-softmax, its gradient, and the gradient of the logits (torch's
`cross_entropy`, not chunked)."""
SHARED_WORDS = 4 + 4 + 8
"""Bytes of a logit among the few at once whose exponentials a shared head adds up without kernels: twice in fp32, once
in 64 bits, 0.5 GiB. Kernels hold none, but peaks measured on two H100s are as high: it is counted for them too."""
PREFETCHED = 2
"""Blocks whose weights FSDP2 holds gathered: the one that computes and the next."""

KINDS = (
    "masters",
    "optimizer moments",
    "gradients",
    "weights",
    "gathered layers",
    "activations",
    "logits and loss",
    "workspace",
)


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes by kind at one moment."""

    moment: str
    bytes: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def peak(job: Job) -> HeldBytes:
    """Return the moment at which a GPU holds most."""
    return max(moments(job), key=lambda held: held.total)


def moments(job: Job) -> tuple[HeldBytes, ...]:
    """Return what is held when the loss is differentiated, in a block's backward, and while the optimizer steps."""
    always = {"masters": FP32 * job.shard, "optimizer moments": 2 * FP32 * job.shard, "weights": _weights(job)}
    gradients = _gradients(job)
    early = gradients if job.sharding == "zero1" or job.accumulate > 1 else 0.0
    kept_all = _activations(job)
    gathered = _gathered(job, PREFETCHED, job.kept_blocks > 0)
    loss = always | {
        "gradients": early,
        "gathered layers": gathered,
        "activations": kept_all,
        "logits and loss": _loss(job),
    }
    block = {"activations": kept_all + _again(job), "workspace": _workspace(job)}
    edge = FP32 * job.architecture.edges / job.mesh.tp if job.sharding == "none" else 0.0
    first = always | block | {"gradients": max(early, edge), "gathered layers": gathered + _whole_gradients(job)}
    alone = _gathered(job, 1, False) + _whole_gradients(job)
    last = first | {"gradients": gradients, "activations": _again(job), "gathered layers": alone}
    step = always | {"gradients": gradients}
    names = ("the loss", "the last block's backward", "the first block's backward", "the optimizer's step")
    found = zip(names, (loss, first, last, step), strict=True)
    return tuple(HeldBytes(moment=name, bytes={k: held.get(k, 0.0) for k in KINDS}) for name, held in found)


def _weights(job: Job) -> float:
    """What is there of weights beside the masters: bf16 or 4-bit copies, and transposes kept for the backward."""
    copies = 0.0
    if job.sharding == "none":  # autocast's copy of the head; those of blocks are in what blocks keep
        copies = BF16 * job.architecture.config.vocab_size * job.architecture.config.dim / job.mesh.tp
    elif job.sharding == "zero1":
        tiled = tiled_numel(job)
        copies = BF16 * (job.numel - tiled) + tiled * (CODES + TILE_SCALE if job.gather == "nvfp4" else BF16)
    if (
        job.gather == "nvfp4" and job.sharding == "fsdp"
    ):  # codes of the shards, written after a step for all its gathers
        copies = _tiled(job, lambda matrix: matrix.numel / job.mesh.tp) * _sent(job) / job.mesh.dp_shard
    regathered = job.sharding == "fsdp" and (job.gather == "nvfp4" or job.recipe.fprop is None)
    return copies + (0.0 if regathered else sum(_of_blocks(job, "weights")))


def _sent(job: Job) -> float:
    """Bytes of a weight as codes that travel for the forward and, where they are others, for the backward."""
    reading = job.reading
    each = 0.5 + (TILE_SCALE if reading.spec.is_tile else 1 / NVFP4_BLOCK)
    if reading.columns is not None:
        each += (reading.columns.format.block_bytes + 1) / reading.columns.block_length
    return each


def tiled_numel(job: Job) -> float:
    """Elements of weights that ZeroOptimizer and a 4-bit gather send as codes: two-dimensional, under the recipe."""
    return _tiled(job, job.local)


def _tiled(job: Job, size: Callable[[Matrix], float]) -> float:
    """Return the sum of the sizes of weights that are sent as codes."""
    total = 0.0
    for span in job.spans:
        if span.recipe is job.recipe:
            matrices = job.architecture.matrices(span.kind)
            if job.sharding == "fsdp":
                own = [m for m in matrices if job.sends_codes(m)]
            else:
                own = [m for m in matrices if m.experts == 1 or m.rows % NVFP4_BLOCK == 0]
            total += span.count * sum(map(size, own))
    config = job.architecture.config
    if job.follows_head and not config.tie_embeddings and not shared_edges(job).head:
        total += config.vocab_size * config.dim / job.mesh.tp
    return total if job.recipe.fprop is not None else 0.0


def _gradients(job: Job) -> float:
    """Gradients when all are there."""
    if job.sharding == "zero1":  # whole in bf16, as they are reduced, and the own share in fp32
        return BF16 * job.numel + FP32 * job.shard
    return FP32 * (job.numel if job.sharding == "none" else job.shard)


def _gathered(job: Job, blocks: int, is_kept: bool) -> float:
    """Weights that FSDP2 has gathered at a time: blocks as they come, embedding and head for the whole step.

    Args:
        blocks: how many.
        is_kept: they stay in bf16.
    """
    if job.sharding != "fsdp":
        return 0.0
    each = job.value_bytes if is_kept or job.gather != "nvfp4" else _bytes_of_codes(job)
    largest = max(_gathered_block(job, kind, each) for kind in job.architecture.kinds)
    shared, config = shared_edges(job), job.architecture.config
    edges = job.architecture.edges - shared.gathered(job)[1]
    is_coded = job.gather == "nvfp4" and job.follows_head and not shared.head
    head = config.vocab_size * config.dim if is_coded else 0
    held = job.value_bytes * (edges - head) + (_bytes_of_codes(job) * head if is_coded else 0.0)
    return blocks * largest + held / job.mesh.tp


def _gathered_block(job: Job, kind: Kind, each: float) -> float:
    """Return what a block takes as it is gathered; each: bytes of a weight where it comes as codes."""
    matrices = job.architecture.matrices(kind)
    weights = [job.local(m) * (each if job.sends_codes(m) else job.value_bytes) for m in matrices]
    return sum(weights) + job.value_bytes * job.architecture.small(kind)


def _bytes_of_codes(job: Job) -> float:
    """Return bytes of a weight that was gathered as codes, of forward or backward, whichever are more."""
    reading = job.reading
    each = CODES + (TILE_SCALE if reading.spec.is_tile else 0.0)  # scales of 1x16 blocks are read as they come
    if reading.columns is not None:
        return max(each, (reading.columns.format.block_bytes + 1) / reading.columns.block_length)
    return job.value_bytes if reading.is_in_values else each


def _whole_gradients(job: Job) -> float:
    """Gradients before they are scattered: of a block that computes, of one on its way, of the head for the step."""
    if job.sharding != "fsdp":
        return 0.0
    config, shared = job.architecture.config, shared_edges(job)
    head = 0 if shared.head else config.vocab_size * config.dim / job.mesh.tp
    block = max(map(job.block_numel, job.architecture.kinds))
    return (job.value_bytes + job.reduced_bytes) * block + job.value_bytes * head


def _of_blocks(job: Job, field: str) -> list[float]:
    """Return bytes that do not grow with tokens, or bytes per token, of all blocks of each span."""
    found = []
    for span in job.spans:
        held = block_kept(job, span.kind, span.recipe)
        matrices = job.architecture.matrices(span.kind)
        share = sum(map(job.local, matrices)) / sum(m.numel for m in matrices) if field == "weights" else 1.0
        found.append(span.count * share * getattr(held, field))
    return found


def block_kept(job: Job, kind, recipe) -> BlockKept:
    """Return what one block of a job keeps."""
    compiled = job.kernels != "eager"
    return kept(job.architecture, kind, recipe, job.sequence, job.masters, job.recompute, compiled)


def _activations(job: Job) -> float:
    """What all blocks keep, the input of the last norm and that of the head; tp splits all of it."""
    dim = job.architecture.config.dim
    edges = dim * (WORD[job.masters] + BF16) + FP32
    return job.tokens / job.mesh.tp * (sum(_of_blocks(job, "per_token")) + edges)


def _again(job: Job) -> float:
    """What one block keeps while it is run again for its backward."""
    return job.tokens / job.mesh.tp * max(block_kept(job, s.kind, s.recipe).again for s in job.spans)


def _loss(job: Job) -> float:
    if shared_edges(job).head:  # logits become their gradient; activations of all ranks, and the gradient of these
        config = job.architecture.config
        every = 2 * BF16 * job.mesh.dp_shard * job.tokens * config.dim
        return BF16 * job.tokens * config.vocab_size + every + SHARED_WORDS * WORK
    each = LOSS_WORDS * FP32 + (BF16 if job.holds_logits else 0)
    return each * job.tokens * job.architecture.config.vocab_size / job.mesh.tp


def _workspace(job: Job) -> float:
    """Gradients inside a block and operands decoded for its GEMMs, an estimate: it counts where logits are small."""
    widths = []
    for kind in job.architecture.kinds:
        active = kind.hidden * ((kind.moe.per_token if kind.moe else 1) + kind.shared)
        widths.append(6 * active + 4 * job.architecture.config.dim)
    return BF16 * max(widths) * job.tokens / job.mesh.tp
