"""What a plan takes for granted, in lines that stand below it."""

from __future__ import annotations

from halfbyte.plan import calibration
from halfbyte.plan.calibration import Constant
from halfbyte.plan.job import Job, gathers_codes
from halfbyte.plan.seconds import host_seconds

ROOM = 0.92
"""Of a GPU's memory for tensors: the rest is CUDA's context, NCCL's buffers and what the allocator cannot fill."""

UNMEASURED = {
    "tp": "tensor parallelism (docs/tensor_parallel.md)",
    "ep": "expert parallelism (docs/expert_parallel.md)",
}


def computed(job: Job) -> tuple[str, ...]:
    """Return what the run needs that no record is of: figures for it are computed."""
    needs = {"tp": job.mesh.tp > 1, "ep": job.mesh.ep > 1}
    return tuple(UNMEASURED[name] for name, is_needed in needs.items() if is_needed)


def constants() -> dict[str, Constant]:
    """Return the constants of the step time by name."""
    return {name: value for name, value in vars(calibration).items() if isinstance(value, Constant)}


def assumptions(job: Job) -> tuple[str, ...]:
    """Return the lines, what is least certain first."""
    lines = []
    if computed(job):
        lines.append(f"In halfbyte and not measured yet, so computed: {', '.join(computed(job))}.")
    if job.mesh.tp > 1:
        lines.append(
            "tp divides embedding, head, norms and activations too, as a model of your own can; halfbyte train --tp "
            "shares the blocks' linear layers alone, and every rank holds the rest."
        )
    in_values = "tensor" if job.mesh.tp > 1 else "expert" if job.mesh.ep > 1 and job.gather == "nvfp4" else ""
    if in_values and job.sharding == "fsdp" and gathers_codes(job.recipe, job.sharding):
        lines.append(f"Weights that {in_values} parallelism shares are gathered in their values, not as codes.")
    gpu = job.hardware
    if gpu.name != "h200":
        lines.append(f"No {gpu.name} was measured: it is taken to reach of its peaks what an H200 reaches of its own.")
    if gpu.multiplies_fp4:
        lines.append("GEMMs in fp4 and fp8 are taken to reach the share of their peak that bf16 reaches.")
    elif job.recipe.specs:
        lines.append(f"{gpu.name} has no FP4 tensor cores: operands are decoded, and every GEMM runs at bf16's rate.")
    if job.recipe.fprop is not None and job.recipe.wgrad is None:
        lines.append("A quantized forward before a bf16 backward: such layers took up to 35 % longer on an H200.")
    lines.append(f"Peaks: {gpu.source}.")
    lines.append(
        "Memory follows from shapes and from what hb.memory_report says a block keeps; AdamW with fp32 moments, the "
        f"loss not chunked; it fits if it takes at most {ROOM:.0%} of the GPU's."
    )
    if any(kind.moe is not None for kind in job.architecture.kinds):
        lines.append("Every expert gets equally many tokens; experts run op by op.")
    if job.mesh.gpus > 1:
        lines.append("Collectives take bandwidth and no latency, and slow no kernel that runs beside them.")
    launches = host_seconds(job)
    if launches:
        rest = "then the GPU waits" if job.host == "measured" else "host='measured' lets the GPU wait for it"
        lines.append(
            f"A host like those measured launches a step in {launches * 1e3:,.0f} ms, where that is longer: {rest}."
        )
    if job.host == "ahead" or not launches:
        lines.append("The GPU always has work queued: small models without a CUDA graph wait for their host instead.")
    for name, constant in constants().items():
        since = f"{constant.record}, {constant.date}" if constant.record else "not measured"
        lines.append(f"{name} = {constant.value:g}: {constant.means} ({since}).")
    return tuple(lines)
