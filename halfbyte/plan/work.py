"""What a step computes on one GPU: multiplications by operand precision, and bytes that kernels move.

Counted from shapes and recipes, without a measured constant but for the bytes that eager code moves.

A quantized operand is read once for its amax (NVFP4), once to be quantized for both of its uses, and written as codes
or, where a GEMM without FP4 tensor cores reads it at once, as the bf16 values that it multiplies. What is kept for the
backward is kept as codes and decoded there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from halfbyte.plan.architecture import Kind, Matrix
from halfbyte.plan.calibration import EAGER_TRAFFIC
from halfbyte.plan.hardware import Hardware
from halfbyte.plan.held import BF16, FP32
from halfbyte.plan.job import Job, Span
from halfbyte.plan.kept import WORD
from halfbyte.recipes import bf16
from halfbyte.spec import GemmSpec, Recipe, Spec

PASSES = ("fprop", "dgrad", "wgrad")
LOSS_BYTES = 36
"""Moved for each logit by torch's eager loss: bf16 and fp32 copies, log-softmax, both gradients, and back to bf16."""
ADAMW_BYTES = 28
"""Moved for each master: gradient read, master and two moments read and written, all fp32."""
CLIP_BYTES = 12
"""Moved for each gradient to be clipped: read for the norm, read and scaled."""
CAUSAL_BACKWARD = 2.5
"""Multiplications of attention's backward, of its forward's: five products for two."""


class Grouped(NamedTuple):
    """GEMMs of experts: operands' precision, flops, tokens of one expert."""

    precision: str
    flops: float
    tokens: float


class Slow(NamedTuple):
    """Quantizations that may compute longer than they move bytes: elements, bytes."""

    elements: float
    bytes: float


def _sums() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Work:
    """What kernels do.

    flops: of dense GEMMs by precision; attention: of attention.
    moved: bytes by what they are moved for.
    kernels: how many are launched.
    """

    flops: defaultdict[str, float] = field(default_factory=_sums)
    grouped: list[Grouped] = field(default_factory=list)
    attention: float = 0.0
    moved: defaultdict[str, float] = field(default_factory=_sums)
    slow: list[Slow] = field(default_factory=list)
    kernels: float = 0.0

    def add(self, other: Work, times: float = 1.0) -> None:
        """Add another's work, that many times."""
        for mine, theirs in ((self.flops, other.flops), (self.moved, other.moved)):
            for key, value in theirs.items():
                mine[key] += value * times
        self.grouped += [part._replace(flops=part.flops * times) for part in other.grouped]
        self.slow += [Slow(part.elements * times, part.bytes * times) for part in other.slow]
        self.attention += other.attention * times
        self.kernels += other.kernels * times


def precision(gemm: GemmSpec | None, hardware: Hardware) -> str:
    """Return in which precision the operands of a GEMM are multiplied."""
    if gemm is None or len(gemm.specs) < 2:
        return "bf16"
    found = f"fp{gemm.specs[0].format.element.bits}"  # both alike: a GemmSpec has one length of blocks
    return found if found in hardware.flops else "bf16"


def linear_work(job: Job, matrix: Matrix, recipe: Recipe, shares_input: float = 1.0) -> dict[str, Work]:
    """Return the work of one weight in a micro-batch, forward and backward apart.

    Args:
        job, matrix, recipe: of what.
        shares_input: 1 / the layers that read one quantized input with it.
    """
    tokens = job.tokens * matrix.per_token
    rows, cols = matrix.rows / job.mesh.tp, matrix.cols  # tp splits one of the two
    forward, backward = Work(), Work()
    for name in PASSES:
        gemm = getattr(recipe, name)
        kind, flops = precision(gemm, job.hardware), 2.0 * tokens * rows * cols
        into = forward if name == "fprop" else backward
        into.kernels += 1
        if matrix.experts > 1:
            into.grouped.append(Grouped(kind, flops, tokens * job.mesh.ep / matrix.experts))
        else:
            into.flops[kind] += flops
    sizes = {"x": tokens * cols * shares_input, "w": job.local(matrix), "dy": tokens * rows}
    _quantize(job, recipe, sizes, forward, backward)
    return {"forward": forward, "backward": backward}


def _quantize(job: Job, recipe: Recipe, sizes: dict[str, float], forward: Work, backward: Work) -> None:
    """Add the quantization of the three operands, and the decoding of what was kept as codes."""
    native = job.hardware.multiplies_fp4
    uses = {"x": ("fprop.a", "wgrad.b"), "w": ("fprop.b", "dgrad.b"), "dy": ("dgrad.a", "wgrad.a")}
    for operand, (first, second) in uses.items():
        specs = [_spec(recipe, first), _spec(recipe, second)]
        size, into = sizes[operand], backward if operand == "dy" else forward
        wanted = [spec for spec in specs if spec is not None]
        if not wanted:
            continue
        if any(spec.format.has_amax for spec in wanted):
            into.moved["quantization"] += BF16 * size
            into.kernels += 1
        into.kernels += 1
        moved = BF16 * size
        for spec, kept in zip(specs, (False, operand != "dy"), strict=True):
            if spec is not None:
                moved += size * (bits(spec) / 8 if native or kept else BF16)
                if kept and not native:
                    backward.moved["decoding"] += size * (bits(spec) / 8 + BF16)
                    backward.kernels += 1
        if any(map(_is_slow, wanted)):
            into.slow.append(Slow(size, moved))
        else:
            into.moved["quantization"] += moved


def _spec(recipe: Recipe, place: str) -> Spec | None:
    gemm, side = place.split(".")
    found = getattr(recipe, gemm)
    return None if found is None else getattr(found, side)


def _is_slow(spec: Spec) -> bool:
    """Whether a kernel may compute longer than it moves bytes: random bits, a rotation, several candidate scales."""
    return spec.rounding == "stochastic" or spec.tries_candidates or spec.rotation is not None


def bits(spec: Spec) -> float:
    """Return bits of an element with its share of the block's scale."""
    return spec.format.element.bits + spec.format.scale.bits / spec.format.length


def blocks_work(job: Job) -> Iterator[tuple[Span, dict[str, Work]]]:
    """Yield the work of one block of every span."""
    for span in job.spans:
        matrices = job.architecture.matrices(span.kind)
        total = {"forward": Work(), "backward": Work()}
        for matrix in matrices:
            sharing = sum(m.cols == matrix.cols and _reads_alike(m, matrix) for m in matrices)
            for name, work in linear_work(job, matrix, span.recipe, 1 / sharing).items():
                total[name].add(work)
        between(job, span.kind, total)
        yield span, total


INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that read one input, quantized once."""


def _reads_alike(one: Matrix, other: Matrix) -> bool:
    stem, _, name = one.name.rpartition(".")
    beside, _, second = other.name.rpartition(".")
    return one.name == other.name or (stem == beside and any({name, second} <= set(group) for group in INPUTS))


def between(job: Job, kind: Kind, total: dict[str, Work]) -> None:
    """Add norms, rotation, attention, activation and residual sums, and the way to experts and back."""
    config = job.architecture.config
    tokens, word = job.tokens / job.mesh.tp, WORD[job.masters]
    queries, values = job.architecture.attention_widths
    active = kind.hidden * ((kind.moe.per_token if kind.moe else 1) + kind.shared)
    rotated = 2 * BF16 * (queries + values)
    forward = config.dim * (5 * word + 8) + rotated + 6 * active
    backward = config.dim * (6 * word + 18) + rotated + 12 * active
    if kind.moe is not None:  # copies of tokens, sorted by expert, and their sum
        forward += 4 * BF16 * kind.moe.per_token * config.dim
        backward += 6 * BF16 * kind.moe.per_token * config.dim
    factor = 1.0 if job.kernels != "eager" and kind.moe is None else EAGER_TRAFFIC.value
    pair = 2.0 * job.sequence / 2 * (queries + values) * tokens  # causal: half of the square
    for name, count, times in (("forward", forward, 1.0), ("backward", backward, CAUSAL_BACKWARD)):
        total[name].moved["between GEMMs"] += count * tokens * factor
        total[name].attention += pair * times
        total[name].kernels += 12 * factor


def head(job: Job) -> dict[str, Work]:
    """Return the work of embedding, head and loss."""
    config = job.architecture.config
    matrix = Matrix(name="lm_head", rows=config.vocab_size, cols=config.dim)
    work = linear_work(job, matrix, job.recipe if job.follows_head else bf16())
    work["backward"].moved["loss"] += LOSS_BYTES * job.tokens * config.vocab_size / job.mesh.tp
    work["backward"].kernels += 8
    return work


def update(job: Job) -> Work:
    """Return the optimizer's work and what else happens once a step: clipping, casts, sums of gradients."""
    work = Work()
    work.moved["optimizer"] += (ADAMW_BYTES + CLIP_BYTES) * job.shard
    if job.sharding == "zero1":  # gradients into buckets, the own share to fp32, masters to bf16 or codes
        work.moved["optimizer"] += 2 * BF16 * job.numel + (BF16 + FP32 + FP32 + BF16) * job.shard
    if job.sharding == "fsdp":
        work.moved["optimizer"] += (BF16 + FP32 + FP32 + BF16) * job.shard
    return work


def casts_work(job: Job) -> Work:
    """Return what autocast moves for each micro-batch: fp32 weights to bf16, and bf16 gradients to fp32."""
    work = Work()
    if job.sharding == "none":
        work.moved["casts"] += 2 * (FP32 + BF16) * job.numel
    return work
