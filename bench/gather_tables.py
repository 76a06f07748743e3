"""Tables of `bench.gather`: FSDP2 with weights gathered as NVFP4 codes beside its bf16 gather.

Bytes of whole models with their own words are those that `halfbyte.plan` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bench.markdown import percent, rows
from bench.records import Record
from halfbyte.plan import PlanRequest
from halfbyte.plan.architecture import find_architecture
from halfbyte.plan.mesh import parse_mesh
from halfbyte.plan.planning import job_of
from halfbyte.plan.traffic import Collective, collectives

MOST_OF_FIRST, MOST_OF_STEP = 1.2, 0.03
"""Of what the first block's gathers take, and of a step: what is asked of the time that nothing hides."""
WAYS = {
    "codes": "codes",
    "bf16": "bf16",
    "shared": "codes; embedding and head shared",
    "compiled": "bf16, blocks compiled",
}


def _title(record: Record) -> str:
    v = record.values
    gpus = f"{v['world']} {str(record.run['device']).split()[1]}s"
    tokens = f"{v['tokens'][0] * v['tokens'][1]:,} tokens a rank"
    blocks = {"fused": "fused blocks", "compiled": "compiled blocks"}.get(v.get("blocks", ""), "blocks")
    return f"{v['model']}, {v['layers']} {blocks}, {v['parameters'] / 1e6:,.0f}M parameters, {gpus}, {tokens}"


def steps(records: Sequence[Record]) -> str:
    """Return every timed step, a line each."""
    lines = [
        [
            _title(r),
            WAYS[v["way"]],
            f"{v['step_ms']:.0f}" + (f" ± {percent(v['spread'], 0)}" if "spread" in v else ""),
            f"{v['gathered_bytes'] / 1e6:,.0f}",
            f"{v['gather_kernels_ms']:.0f}",
            f"{v['exposed_ms']:.0f}",
            percent(v["hidden_share"], 0),
            f"{v['kernels_ms']:.0f}",
            f"{v['peak_GiB']:.1f}",
            r.stamp,
        ]
        for r in records
        for v in [r.values]
        if v["case"] == "gather/step"
    ]
    measured = ["step, ms", "arrives, MB", "gathers, ms", "hidden by nothing, ms", "hidden", "other kernels, ms"]
    return rows(["", "gathered as", *measured, "peak, GiB", "record"], lines)


def wires(records: Sequence[Record]) -> str:
    """Return what gathers take the rank that comes last to each, beside what is asked of them, a line each."""
    lines = [
        [
            _title(r),
            WAYS[v["way"]],
            f"{v['wires_ms']:.1f}",
            f"{v['wires_alone_ms']:.2f}",
            f"{v['first_wires_ms']:.2f}",
            f"{MOST_OF_FIRST * v['first_wires_ms'] + MOST_OF_STEP * v['step_ms']:.2f}",
            percent(v["others_hidden_share"], 0) if "others_hidden_share" in v else "",
            r.stamp,
        ]
        for r in records
        for v in [r.values]
        if v["case"] == "gather/step" and "wires_ms" in v
    ]
    measured = [
        "gathers, ms",
        "hidden by nothing, ms",
        "the first block's, ms",
        "at most asked, ms",
        "hidden of others",
    ]
    return rows(["", "gathered as", *measured, "record"], lines)


def bitwise(records: Sequence[Record]) -> str:
    """Return every comparison of losses, norms and masters, bit for bit."""
    lines = [
        [
            f"{v['model']}, {v['world']} GPUs" + (", compiled" if v.get("blocks") == "compiled" else ""),
            f"{v['steps']}",
            "every loss, norm and master equal" if v["equal"] else f"differ from step {v['first_difference']} on",
            f"{v['first_loss']:.3f} → {v['last_loss']:.3f}",
            r.stamp,
        ]
        for r in records
        for v in [r.values]
        if v["case"] == "gather/bitwise"
    ]
    return rows(["", "steps", "codes against bf16's gather", "loss", "record"], lines)


MODELS = ("1b", "3b", "8b")
LENGTHS = (8192, 16_384)
RANKS = (2, 4, 8, 32)
POLICIES = ("nvfp4@all", "nvfp4")
"""Every layer under the recipe; and as by default, the last 15 % of the blocks and the head in bf16."""
FEW_WORDS = 8192
"""A vocabulary of which a batch may name as many bytes as it has."""


def sent(model: str, ranks: int = 2, tokens: int = LENGTHS[0], **options: Any) -> list[Collective]:
    """Return the collectives of a step under FSDP2; options: of the plan's request."""
    mesh = f"dp_shard={ranks}"
    request = PlanRequest(model=model, gpus=ranks, mesh=mesh, sequence=tokens, **options)
    return list(collectives(job_of(request, parse_mesh(mesh), "nothing")))


def gathered_bytes(model: str, **options: Any) -> float:
    """Return the bytes of all weights that a step gathers."""
    return sum(c.message for c in sent(model, **options) if c.what == "weights")


def whole(_: Sequence[Record]) -> str:
    """Return what a step of whole models gathers, under both policies, with either treatment of embedding and head."""
    lines = []
    for model in MODELS:
        values = gathered_bytes(model, recipe="bf16")
        for head in ("gathered", "shared"):
            found = [gathered_bytes(model, recipe=policy, head=head) for policy in POLICIES]
            cells = [text for count in found for text in (f"{count / 1e9:.2f}", f"{count / values:.3f}")]
            lines.append([model, head, f"{values / 1e9:.2f}", *cells])
    columns = ["", "embedding, head", "`bf16`, GB"]
    return rows([*columns, *(text for policy in POLICIES for text in (f"`{policy}`, GB", "of bf16"))], lines)


def edges(_: Sequence[Record]) -> str:
    """Return what reaches a rank in place of embedding and head, or that these are gathered, a line each."""
    cases = [(model, None, tokens, ranks) for model in MODELS for tokens in LENGTHS for ranks in RANKS]
    cases += [("1b", FEW_WORDS, tokens, 2) for tokens in LENGTHS]
    lines = []
    for model, words, tokens, ranks in cases:
        found = {c.what: c for c in sent(model, ranks, tokens, vocabulary=words, recipe="nvfp4@all", head="shared")}
        kinds = ("rows of the embedding", "gradients of rows"), ("activations of the head", "gradients of activations")
        exchanged = [[found[what].wire for what in kind if what in found] for kind in kinds]
        cells = [f"{sum(each) / 1e6:,.0f}" if each else "gathered" for each in exchanged]
        config = find_architecture(model, words).config
        table = 2 * 2 * config.vocab_size * config.dim  # with the rank's own rows, as all that is gathered
        lines.append([model, f"{config.vocab_size:,}", f"{tokens:,}", str(ranks), *cells, f"{table / 1e6:,.0f}"])
    columns = ["", "words", "tokens a rank", "ranks", "rows, MB", "activations, MB", "a gather and a reduction, MB"]
    return rows(columns, lines)


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {
        "gather-steps": steps,
        "gather-wires": wires,
        "gather-bitwise": bitwise,
        "gather-whole": whole,
        "gather-edges": edges,
    }
)
