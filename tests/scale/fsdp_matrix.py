"""What the 4-bit gather of FSDP2 goes with, and what it refuses: the table of docs/fsdp2.md.

PYTHONPATH=tests:tests/distributed python tests/scale/fsdp_matrix.py --write     writes it, if every row is so

It says with which versions of torch each row was run: fsdp_matrix.json has what `--write` found with each, such as the
torch 2.15 of `make torch-next` (PYTHONPATH=.:tests:tests/distributed, .venv/torch-2.15/bin/python). `--again` writes
the table from it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ranks
import torch
from fsdp_cases import CASES, SGD
from fsdp_checks import Case, compared, mesh_of, two_layers
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import halfbyte as hb
from halfbyte.distributed.fsdp_choice import groups_of

RUNS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "fsdp2.md"
BEGIN, END = "<!-- matrix: tests/scale/fsdp_matrix.py --write -->\n", "<!-- end of matrix -->"


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 32), nn.Linear(32, 32), nn.Linear(32, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def on_meta(model: nn.Module) -> None:
    """Take the values away before fully_shard."""
    model.to("meta")


def with_values(model: nn.Module) -> None:
    """Give it memory and values after it was wrapped."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            whole = (torch.randn(param.shape, generator=generator) / 4).to(param.dtype)
            param.copy_(distribute_tensor(whole, param.device_mesh, param.placements))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line: what is asked for, the model that trains so, or what refuses it with which words."""

    name: str
    case: Case | None = None
    refusal: Callable[[int], None] | None = None
    parts: tuple[str, ...] = ()
    text: str = ""
    world: int = 2


def wrapped_with(world: int, **options: Any) -> nn.Module:
    """A converted model, wrapped with other options than a case has."""
    model = two_layers().bfloat16()
    hb.quantize_(model, options.pop("recipe", "nvfp4"), keep=hb.Keep(names=(), last_fraction=0))
    fully_shard(model, mesh=mesh_of(Case(), world), **options)
    return model


def gathered(world: int, **options: Any) -> nn.Module:
    """The same with the 4-bit gather."""
    model = wrapped_with(world, **options)
    hb.distributed.fsdp_gather_nvfp4_(model)
    return model


X = torch.ones(4, 32, dtype=torch.bfloat16)


def offloaded(world: int) -> None:
    """fully_shard with CPU offload."""
    gathered(world, offload_policy=CPUOffloadPolicy(pin_memory=False))


def to_an_integer(world: int) -> None:
    """fully_shard that reshards to fewer ranks."""
    gathered(world, reshard_after_forward=2)


def cached(world: int) -> None:
    """hb.cache_weights of a gathered model."""
    model = gathered(world)
    hb.cache_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))


def late(world: int) -> None:
    """After a forward."""
    model = wrapped_with(world)
    model(X)
    hb.distributed.fsdp_gather_nvfp4_(model)


def twice(world: int) -> None:
    """Called two times."""
    hb.distributed.fsdp_gather_nvfp4_(gathered(world))


def nothing(world: int) -> None:
    """No weight that a forward reads as NVFP4."""
    gathered(world, recipe="mxfp8")


def other_recipe(world: int) -> None:
    """Weights in another form than was gathered."""
    model = gathered(world)
    hb.set_recipe_(model, "four_over_six")
    model(X)


def autocast(world: int) -> None:
    """Rounded to another dtype than the gathered codes were."""
    model = two_layers()
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    fully_shard(model, mesh=mesh_of(Case(), world))
    hb.distributed.fsdp_gather_nvfp4_(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(X.float())


def two_roundings(world: int) -> None:
    """Values that are rounded to fp16 as they travel, and to bf16 to be quantized."""
    model = wrapped_with(world, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    hb.distributed.fsdp_gather_nvfp4_(model, dtype=torch.bfloat16)


def lost(world: int) -> None:
    """The hooks taken off a shard, and the weight gathered without them."""
    model = gathered(world)
    for param in model.parameters():
        local = param._local_tensor
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            vars(local).pop(name, None)
    model.unshard()
    model[2](torch.ones(4, 80, dtype=torch.bfloat16))


def changed_while_whole(world: int) -> None:
    """Masters written between two forwards that share one gather."""
    model = gathered(world, reshard_after_forward=False)
    with torch.no_grad():
        model(X)
        groups_of(model)[0].fsdp_params[0].sharded_param.mul_(2)
        model(X)


def captured(world: int) -> None:
    """A forward under torch.cuda.graph, of the model or a block, before others and after: nothing is gathered for it.

    Others ask once whether a graph is captured, however many blocks there are. torch is told that one is.
    """
    model = two_layers().bfloat16()
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh_of(Case(), world))
    gather = hb.distributed.fsdp_gather_nvfp4_(model)
    errors: list[ValueError] = []
    with (
        patch("torch.cuda.is_initialized", lambda: True),
        patch("torch.cuda.is_current_stream_capturing", return_value=True) as asked,
    ):
        for _ in range(2):
            before = gather.traffic
            for module in (model, model[0]):
                try:
                    module(X)
                except ValueError as error:
                    errors.append(error)
            assert gather.traffic == before
            asked.return_value = False
            asked.reset_mock()
            model(X).sum().backward()
            assert asked.call_count == 1, asked.call_count
            asked.return_value = True
    assert len({str(error) for error in errors}) == 1 and len(errors) == 4, errors
    raise errors[0]


def zero(world: int) -> None:
    """A ZeroOptimizer over parameters that FSDP2 has split."""
    hb.distributed.ZeroOptimizer(wrapped_with(world))


ROWS = (
    Row(name="FSDP2 over one dimension, any rows, empty shards", case=CASES["uneven rows"]),
    Row(name="HSDP", case=CASES["HSDP"], world=4),
    Row(name="fp32 masters, `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`", case=CASES["fp32 masters"]),
    Row(name="`reshard_after_forward=True`, `False`", case=CASES["kept in shards' reach"]),
    Row(
        name="`reshard_after_forward=` an integer",
        refusal=to_an_integer,
        parts=("reshard_after_forward is an integer", "use True or False"),
        world=4,
    ),
    Row(name="CPU offload", refusal=offloaded, parts=("CPUOffloadPolicy", "use fully_shard without it")),
    Row(name="meta init, `to_empty`, load", case=replace(CASES["decoder"], before_wrap=on_meta, finish=with_values)),
    Row(name="`torch.compile`", case=CASES["compiled"]),
    Row(name="gradient accumulation", case=CASES["accumulated"]),
    Row(
        name="gradient accumulation, `set_requires_gradient_sync(False)`",
        case=CASES["accumulated, synchronized once"],
    ),
    Row(name="activation checkpointing", case=CASES["checkpointed"]),
    Row(name="activation checkpointing around what FSDP2 wrapped", case=CASES["checkpointed around FSDP2's hooks"]),
    Row(name="`torch.autograd.graph.save_on_cpu`", case=CASES["saved tensors offloaded"]),
    Row(name="prefetching by hand, `unshard()`", case=CASES["prefetched"]),
    Row(name="layers in bf16 among others", case=CASES["mixed with bf16 layers"]),
    Row(name="frozen weights", case=CASES["frozen block"]),
    Row(name='weights in 1x16 blocks, `backward="dequantized"`', case=CASES["rows, rl"]),
    Row(name="such weights beside 16x16 tiles", case=CASES["rows, fp32 masters, beside tiles"]),
    Row(
        name='weights in 1x16 blocks, `backward="original"` in 1x16 blocks or MXFP8, beside 16x16 tiles',
        case=CASES["mixed with 1x16 weights"],
    ),
    Row(
        name='weights in 1x16 blocks, `backward="original"` in high precision',
        case=CASES["apart, gradients in high precision"],
        text="exact; gathered in their values for the backward, a warning and the report say so",
    ),
    Row(
        name="activation checkpointing of weights that a backward reads in another form",
        case=CASES["apart, checkpointed"],
    ),
    Row(name="shared amaxes (q/k/v, gate/up)", case=CASES["decoder"]),
    Row(name="fused layers (`hb.nn.LayerNormMLP`, …)", case=CASES["fused layers"]),
    Row(
        name="experts (`hb.nn.GroupedLinear`)",
        case=CASES["experts, nvfp4"],
    ),
    Row(
        name="a head tied to the embedding",
        case=Case(make=Tied, shape=(2, 5), tokens=11, optimizer=SGD),
        text="exact; gathered in its values, a warning and the report say so",
    ),
    Row(
        name="`hb.distributed.ZeroOptimizer` over what FSDP2 wrapped",
        refusal=zero,
        parts=("0.weight is sharded already", "without fully_shard", "fsdp_gather_nvfp4_"),
    ),
    Row(
        name="CUDA graphs: a forward of the model, or of a block, under `torch.cuda.graph`",
        refusal=captured,
        parts=("a CUDA graph is being captured", "outside of torch.cuda.graph"),
    ),
    Row(name="`hb.cache_weights`", refusal=cached, parts=("sharded",)),
    Row(name="`hb.high_precision`, to validate or to train", case=CASES["trained in high precision for a step"]),
    Row(name="another recipe for weights, later", refusal=other_recipe, parts=("now reads it in another form",)),
    Row(name="`torch.autocast` over fp32 parameters, `dtype=torch.bfloat16`", case=CASES["under autocast"]),
    Row(name="`torch.autocast` over fp32 parameters without that", refusal=autocast, parts=("_nvfp4_(model,",)),
    Row(name="`dtype` beside another `param_dtype`", refusal=two_roundings, parts=("dtype=torch.bfloat16: FSDP2",)),
    Row(name="a call after the first forward", refusal=late, parts=("has run already", "before the first forward")),
    Row(name="a second call", refusal=twice, parts=("gathered as codes already",)),
    Row(
        name="a model of which no forward reads a weight as NVFP4",
        refusal=nothing,
        parts=("0.weight: forward reads it as mxfp8", "hb.quantize_"),
    ),
    Row(name="hooks taken off, `unshard()`", refusal=lost, parts=("was to arrive as NVFP4 codes",)),
    Row(name="parameters changed between `unshard` and `reshard`", refusal=changed_while_whole, parts=("reshard()",)),
)


def row_found(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """What some rows came to on one rank."""
    found: dict[str, Any] = {}
    for row in ROWS:
        if row.name not in names:
            continue
        if row.case is not None:
            case = compared(row.case, rank, world)
            is_exact = not case["differs"] and case["finite"] and case["moved"] and case["traffic"]["gathers"] > 0
            is_said = bool(case["said"] and (case["kept"] or case["kept in backward"])) == ("a warning" in row.text)
            found[row.name] = "exact" if is_exact and is_said else f"differs: {case}"
            continue
        try:
            assert row.refusal is not None
            row.refusal(world)
            found[row.name] = "not refused"
        except ValueError as error:
            missing = [part for part in row.parts if part not in str(error)]
            found[row.name] = f"refused without {missing}: {error}" if missing else "refused"
    return found


def matrix(asked: Collection[str] | None = None) -> dict[str, list[str]]:
    """What rows of these names, or all, came to, of every rank."""
    rows = [row for row in ROWS if asked is None or row.name in asked]
    found: dict[str, list[str]] = {}
    for world in sorted({row.world for row in rows}):
        names = [row.name for row in rows if row.world == world]
        for name in names:
            found[name] = []
        for rank in ranks.run(world, row_found, names, seconds=200):
            for name in names:
                found[name].append(rank[name])
    return {row.name: found[row.name] for row in rows}


def runs() -> dict[str, Any]:
    """With which versions of torch rows came to what the table says: of each where, at which tree, and their names."""
    return json.loads(RUNS.read_text(encoding="utf-8"))


def table() -> str:
    """The table, as it should be."""
    lines = ["| with | what happens | torch |", "|---|---|---|"]
    known = runs()
    for row in ROWS:
        what = "refused: a `ValueError` on every rank" if row.refusal is not None else row.text or "exact"
        versions = ", ".join(version for version, run in sorted(known.items()) if row.name in run["rows"])
        lines.append(f"| {row.name} | {what} | {versions} |")
    trees = "; ".join(f"{run['torch']} at tree {run['tree']} ({run['over']})" for version, run in sorted(known.items()))
    said = f"The last column names the versions that a row was run with, as it is: torch {trees}."
    return "\n".join(lines) + f"\n\n{said}\n"


def note_run() -> None:
    """Write down that every row is so with this torch, at the tree that is checked out."""
    git = ("git", "-C", str(PAGE.parent), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*")
    tree = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    version = torch.__version__
    short = ".".join(version.split(".")[:2])
    run = {"torch": version, "over": "gloo", "tree": tree, "rows": [row.name for row in ROWS]}
    text = json.dumps(dict(sorted((runs() | {short: run}).items())), indent=1, ensure_ascii=False)
    RUNS.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Write the table into its page, if every row is so, and what was run; with --again the table alone."""
    if sys.argv[1:] == ["--write"]:
        wrong = {name: found for name, found in matrix().items() if not set(found) <= {"exact", "refused"}}
        assert not wrong, wrong
        note_run()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    assert sys.argv[1:] in (["--write"], ["--again"]), __doc__
    main()
