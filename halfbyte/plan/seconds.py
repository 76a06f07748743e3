"""Seconds of a step: a roofline over its kernels, and the collectives that no kernel hides."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.plan import work as works
from halfbyte.plan.calibration import (
    ATTENTION_SHARE,
    BF16_SHARE,
    COPY_SHARE,
    GROUP_RAMP,
    HOST_CODES,
    HOST_COMPILED,
    HOST_EXPERTS,
    HOST_VALUES,
    STEP_SHARE,
    STOCHASTIC,
    TAIL,
)
from halfbyte.plan.hardware import H200, Hardware
from halfbyte.plan.job import Job
from halfbyte.plan.traffic import Collective
from halfbyte.plan.work import Work

EXPOSED = "exposed communication"
HOST = "waiting for the host"


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step of one GPU.

    Args:
        seconds: by what they are spent on.
        flops: multiplications and additions by precision, as run: recomputed ones included.
        useful: those of the model without recomputation.
    """

    seconds: dict[str, float]
    flops: dict[str, float]
    useful: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def kernel_seconds(work: Work, hardware: Hardware, step_share: float = STEP_SHARE.value) -> dict[str, float]:
    """Return the seconds of kernels by what they do.

    Args:
        work, hardware: what runs where.
        step_share: of a step that the kernels' own rates explain.
    """
    found: dict[str, float] = {}
    for precision, flops in work.flops.items():
        found[f"GEMMs in {precision}"] = flops / (hardware.flops[precision] * BF16_SHARE.value)
    for part in work.grouped:
        rate = hardware.flops[part.precision] * BF16_SHARE.value * part.tokens / (part.tokens + GROUP_RAMP.value)
        key = f"GEMMs in {part.precision}"
        found[key] = found.get(key, 0.0) + part.flops / rate
    found["attention"] = work.attention / (hardware.flops["bf16"] * ATTENTION_SHARE.value)
    copy = hardware.hbm * COPY_SHARE.value
    for what, count in work.moved.items():
        found[what] = count / copy
    computing = STOCHASTIC.value * hardware.flops["bf16"] / H200.flops["bf16"]
    slow = sum(max(part.bytes / copy, part.elements / computing) for part in work.slow)
    found["quantization"] = found.get("quantization", 0.0) + slow
    found["tails of kernels"] = work.kernels * TAIL.value
    return {key: value / step_share for key, value in found.items() if value}


def passes(job: Job) -> dict[str, Work]:
    """Return the work of all micro-batches' forwards and backwards, and of the update."""
    found = {"forward": Work(), "backward": Work(), "step": works.update(job)}
    for span, parts in works.blocks_work(job):
        for name in ("forward", "backward"):
            found[name].add(parts[name], span.count * job.accumulate)
        again = _again(job, parts["forward"])
        found["backward"].add(again, span.count * job.accumulate)
    for name, part in works.head(job).items():
        found[name].add(part, job.accumulate)
    found["forward"].add(works.casts_work(job), job.accumulate)
    return found


def _again(job: Job, forward: Work) -> Work:
    """Return what a checkpointed block does once more: all of it, or what lies between GEMMs."""
    again = Work()
    if job.recompute == "full":
        again.add(forward)
    elif job.recompute == "selective":
        again.moved["between GEMMs"] = forward.moved["between GEMMs"]
    return again


def step(job: Job, collectives: tuple[Collective, ...]) -> PlannedStep:
    """Return the seconds of a step of one GPU."""
    work = passes(job)
    seconds: dict[str, float] = {}
    busy: dict[str, float] = {}
    for name, part in work.items():
        spent = kernel_seconds(part, job.hardware)
        busy[name] = sum(spent.values())
        for key, value in spent.items():
            seconds[key] = seconds.get(key, 0.0) + value
    seconds[EXPOSED] = exposed(job, collectives, busy)
    if job.host == "measured":
        seconds[HOST] = max(0.0, host_seconds(job) - sum(seconds.values()))
    total = Work()
    for part in work.values():
        total.add(part)
    flops = {key: value for key, value in total.flops.items() if value}
    for part in total.grouped:
        flops[part.precision] = flops.get(part.precision, 0.0) + part.flops
    flops["bf16"] = flops.get("bf16", 0.0) + total.attention
    useful = 6 * job.step_tokens * (job.architecture.active_parameters - _words(job)) / job.mesh.gpus
    return PlannedStep(seconds=seconds, flops=flops, useful=useful + _attention(job))


def host_seconds(job: Job) -> float:
    """Return the seconds in which a host launches a step; 0 where graphs or whole compiled steps leave it ahead."""
    if job.sharding == "fsdp":
        own = HOST_CODES if job.gather == "nvfp4" else HOST_VALUES
        block = HOST_COMPILED if job.kernels == "compiled" else own  # over codes as over values
    elif job.architecture.has_experts:
        block = HOST_EXPERTS
    else:
        return 0.0
    return block.value * job.architecture.layers * job.accumulate


def _words(job: Job) -> int:
    """Parameters that are looked up, not multiplied."""
    config = job.architecture.config
    return 0 if config.tie_embeddings else config.vocab_size * config.dim


def _attention(job: Job) -> float:
    """Flops of attention without recomputation."""
    widths = sum(job.architecture.attention_widths)
    pairs = job.sequence / 2 * job.step_tokens / job.mesh.gpus
    return 2.0 * widths * pairs * (1 + works.CAUSAL_BACKWARD) * job.architecture.layers


def exposed(job: Job, collectives: tuple[Collective, ...], busy: dict[str, float]) -> float:
    """Return the seconds of collectives that no kernel runs beside: what outlasts the pass, and one block's share."""
    total = 0.0
    for phase, compute in busy.items():
        mine = [c for c in collectives if c.phase == phase]
        hidden = sum(c.seconds(job.hardware) for c in mine if c.is_hidden)
        total += max(0.0, hidden - compute) + min(hidden, compute) / (job.architecture.layers * job.accumulate)
        total += sum(c.seconds(job.hardware) for c in mine if not c.is_hidden)
    return total
