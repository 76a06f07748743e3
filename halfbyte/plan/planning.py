"""From what is asked to a plan: memory, traffic and time of one GPU, or a mesh that fits and why others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from halfbyte.plan import architecture, hardware, held, seconds, traffic
from halfbyte.plan import mesh as meshes
from halfbyte.plan.assumptions import ROOM
from halfbyte.plan.held import HeldBytes
from halfbyte.plan.job import Gather, Head, Host, Job, Sharding, Values, gathers_codes, kept_blocks
from halfbyte.plan.kept import Recompute
from halfbyte.plan.mesh import Mesh
from halfbyte.plan.seconds import PlannedStep
from halfbyte.plan.traffic import Collective
from halfbyte.train import treatment

AUTO = "auto"
GIB = 2**30
MOST_GPUS, MOST_TOKENS = 2**30, 2**40
"""What a plan counts with: beyond, the sizes of tensors overflow."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan.

    Raises:
        ValueError: `plan` finds no model, recipe or hardware of that name, or a mesh that cannot be.
    """

    model: str = "llama3-8b"
    """llama3-8b, llama3-70b, deepseek-v3, or a preset of `halfbyte train`."""
    gpus: int = 8
    mesh: str = AUTO
    """`dp_shard=64,tp=8`, of dp_replicate, dp_shard, tp and ep; auto finds the fastest that fits."""
    recipe: str = "nvfp4"
    """As `halfbyte train` takes it, but of one kind of step: with `@all` behind it no layer stays in high precision."""
    hardware: str = "h200"
    """h100, h200, b200 or gb300."""
    sequences: int = 1
    """Sequences of a micro-batch on every data-parallel rank."""
    sequence: int = 8192
    """Tokens of one."""
    accumulate: int = 1
    """Micro-batches of a step."""
    sharding: Literal["auto", "none", "zero1", "fsdp"] = AUTO
    """none: `halfbyte train`'s whole fp32 parameters; zero1: ZeroOptimizer; fsdp: FSDP2. auto: fsdp if dp_shard > 1."""
    gather: Literal["auto", "bf16", "nvfp4"] = AUTO
    """In what form weights travel. auto: nvfp4 where the recipe has one set of 16x16 tiles."""
    values: Values = "bf16"
    """In what FSDP2 gathers weights that are no codes: fp32 as `halfbyte train --dp-shard`."""
    reduce: Literal["auto", "bf16", "fp32"] = AUTO
    """In what FSDP2 reduces gradients: MixedPrecisionPolicy's reduce_dtype. auto: as `values`."""
    recompute: Literal["auto", "nothing", "selective", "full"] = AUTO
    """Activation checkpointing. auto: with a given mesh nothing; with --mesh auto what is fastest and fits."""
    kernels: Literal["auto", "compiled", "fused", "eager"] = AUTO
    """Whether what lies between GEMMs is compiled, fused (as fast, but launched by the host), or runs op by op. auto:
    compiled, but for recompute selective."""
    vocabulary: int | None = None
    """Another vocabulary than the model's own."""
    high_precision_blocks: float = 0.15
    """Share of the blocks at the end that stays in bf16; with `@all` none does."""
    head: Head = "gathered"
    """shared: rows of embedding and head stay with their ranks, where rows and activations are fewer bytes (fsdp)."""
    host: Host = "ahead"
    """measured: a step takes no less than the hosts of the measured machines take to launch it."""
    holds_logits: bool = False
    """The training loop keeps the bf16 logits alive during the backward."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one GPU of a run holds, sends and computes.

    Args:
        request: what was asked.
        job: the run.
        moments: what is held when.
        collectives: of a step.
        step: seconds and flops of a step.
        refused: (mesh, recompute, reason) of those that `--mesh auto` left.
    """

    request: PlanRequest
    job: Job
    moments: tuple[HeldBytes, ...]
    collectives: tuple[Collective, ...]
    step: PlannedStep
    refused: tuple[tuple[str, str, str], ...] = field(default=())

    @property
    def peak(self) -> HeldBytes:
        """The moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= room(self.job)

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.job.step_tokens / self.step.total

    @property
    def utilization(self) -> float:
        """Share of the dense bf16 peak that the model's own multiplications take."""
        return self.step.useful / self.step.total / self.job.hardware.flops["bf16"]

    def _repr_html_(self) -> str:
        from halfbyte.plan.show import as_html  # it reads plans

        return as_html(self)


def plan(request: PlanRequest) -> Plan:
    """Return the plan of what is asked; with mesh="auto" that of the fastest mesh that fits.

    Raises:
        ValueError: a name is unknown, a mesh cannot be, or no mesh fits; the message names argument, value and remedy.
    """
    _check(request)
    if request.mesh == AUTO:
        return _search(request)
    job = job_of(
        request, meshes.parse_mesh(request.mesh), "nothing" if request.recompute == AUTO else request.recompute
    )
    return _of(request, job)


def _check(request: PlanRequest) -> None:
    """Raise ValueError for what is wrong on every mesh, and so is no reason against one."""
    for name, most in (("gpus", MOST_GPUS), *((n, MOST_TOKENS) for n in ("sequences", "sequence", "accumulate"))):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={_short(value)}: give a whole number, 1 or more")
        if value > most:
            raise ValueError(f"{name}={_short(value)}: a plan counts to {most:,}; give fewer")
    if request.sequences * request.sequence > MOST_TOKENS:
        raise ValueError(
            f"sequences={request.sequences}, sequence={request.sequence}: a plan counts to {MOST_TOKENS:,} tokens of a "
            "micro-batch; give fewer"
        )
    if not 0.0 <= request.high_precision_blocks <= 1.0:
        raise ValueError(f"high_precision_blocks={request.high_precision_blocks}: give a share, from 0 to 1")
    chosen = treatment.treatment_of(request.recipe)
    if chosen.schedule is not None:
        raise ValueError(
            f"recipe={request.recipe!r}: steps of a schedule differ, and a plan is of one; plan each of its recipes "
            "alone, with gather='bf16' where a later one reads the weights in another form"
        )
    if chosen.halves:
        raise ValueError(
            f"recipe={request.recipe!r}: leave +order out, and halve sequences={request.sequences} and double "
            f"accumulate={request.accumulate} instead"
        )
    hardware.find_hardware(request.hardware)
    _architecture(request.model, request.vocabulary)


def _short(value: object) -> str:
    """Write a value; of an int that fills more than a line, how long it is."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"{'-' if value < 0 else ''}10**{int((abs(value).bit_length() - 1) * 0.30103)} or more"
    return repr(value)


def job_of(request: PlanRequest, mesh: Mesh, recompute: Recompute) -> Job:
    """Return the run on one mesh.

    Raises:
        ValueError: it cannot be.
    """
    chosen, shape = treatment.treatment_of(request.recipe), _architecture(request.model, request.vocabulary)
    sharding: Sharding = request.sharding if request.sharding != AUTO else "fsdp" if mesh.dp_shard > 1 else "none"
    follows_head = chosen.keep is not None
    coded = sharding != "none" and mesh.tp == 1 and gathers_codes(chosen.recipe, sharding)
    gather: Gather = request.gather if request.gather != AUTO else "nvfp4" if coded else "bf16"
    meshes.check_mesh(mesh, shape, request.gpus)
    return Job(
        architecture=shape,
        hardware=hardware.find_hardware(request.hardware),
        mesh=mesh,
        recipe=chosen.recipe,
        follows_head=follows_head and not shape.config.tie_embeddings,
        kept_blocks=0 if follows_head else kept_blocks(shape, request.high_precision_blocks),
        sequences=request.sequences,
        sequence=request.sequence,
        accumulate=request.accumulate,
        sharding=sharding,
        gather=gather,
        recompute=recompute,
        kernels=request.kernels if request.kernels != AUTO else "eager" if recompute == "selective" else "compiled",
        head=request.head,
        host=request.host,
        holds_logits=request.holds_logits,
        values=request.values,
        reduce=request.reduce if request.reduce != AUTO else request.values,
    )


@lru_cache(maxsize=64)
def _architecture(model: str, vocabulary: int | None) -> architecture.Architecture:
    return architecture.find_architecture(model, vocabulary)


def _of(request: PlanRequest, job: Job) -> Plan:
    sent = traffic.collectives(job)
    return Plan(
        request=request,
        job=job,
        moments=held.moments(job),
        collectives=sent,
        step=seconds.step(job, sent),
    )


def _search(request: PlanRequest) -> Plan:
    """Return the plan with most tokens a second among those that fit.

    Raises:
        ValueError: none fits; the message has the smallest need and what takes it.
    """
    best: Plan | None = None
    smallest: tuple[HeldBytes, Job] | None = None
    refused: list[tuple[str, str, str]] = []
    fitting: set[Mesh] = set()
    for mesh, recompute in candidates(request):
        if mesh in fitting:  # where less is recomputed, which is faster
            continue
        try:
            job = job_of(request, mesh, recompute)
        except ValueError as error:
            refused.append((str(mesh), recompute, str(error)))
            continue
        peak = held.peak(job)
        if peak.total > room(job):
            refused.append((str(mesh), recompute, _too_much(peak, job)))
            smallest = min(smallest or (peak, job), (peak, job), key=lambda pair: pair[0].total)
            continue
        fitting.add(mesh)
        found = _of(request, job)
        if best is None or found.tokens_per_second > best.tokens_per_second:
            best = found
    if best is None:
        raise ValueError(_nothing_fits(request, smallest, refused))
    return replace(best, refused=tuple(refused))


def _nothing_fits(
    request: PlanRequest, smallest: tuple[HeldBytes, Job] | None, refused: list[tuple[str, str, str]]
) -> str:
    if smallest is None:
        return f"gpus={request.gpus}: no mesh can be; {refused[0][2]}"  # of shards alone, which asks least
    peak, job = smallest
    return (
        f"gpus={request.gpus}: {request.model} fits on no mesh of {request.hardware}; least is {job.mesh}, "
        f"recompute={job.recompute}: {_too_much(peak, job)}; use more GPUs, a smaller sequences x sequence or "
        "other hardware"
    )


def _too_much(peak: HeldBytes, job: Job) -> str:
    """Say what does not fit."""
    most = sorted(peak.bytes.items(), key=lambda item: -item[1])[:2]
    parts = ", ".join(f"{kind} {count / GIB:,.0f}" for kind, count in most)
    return f"needs {peak.total / GIB:,.0f} GiB of {room(job) / GIB:,.0f} at {peak.moment} ({parts})"


def room(job: Job) -> float:
    """Return the bytes of a GPU that tensors may take."""
    return ROOM * job.hardware.memory_GiB * GIB


def candidates(request: PlanRequest) -> Iterator[tuple[Mesh, Recompute]]:
    """Yield meshes of powers of two, tp within an NVLink domain, each with every recomputation asked for."""
    shape, domain = _architecture(request.model, request.vocabulary), hardware.find_hardware(request.hardware).domain
    every: tuple[Recompute, ...] = (
        ("nothing", "selective", "full") if request.kernels == "eager" else ("nothing", "full")
    )
    wanted = every if request.recompute == AUTO else (request.recompute,)
    experts = max((kind.moe.experts for kind in shape.kinds if kind.moe is not None), default=1)
    for tp in _powers(min(domain, request.gpus)):
        for replicate in _powers(request.gpus // tp):
            rest, left = divmod(request.gpus, tp * replicate)
            if left:
                continue
            for ep in _powers(min(experts, rest)):
                if rest % ep == 0:
                    for recompute in wanted:
                        yield Mesh(dp_replicate=replicate, dp_shard=rest, tp=tp, ep=ep), recompute


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
