"""Shards that are copied, and models that FSDP2 wrapped otherwise, under a 4-bit gather: for ranks.run."""

from __future__ import annotations

import copy
import io
import warnings

import ranks
import torch
from fsdp_cases import CASES
from fsdp_checks import BF16, NOTHING_KEPT, Case, batch, same, train, two_layers, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard

import halfbyte as hb
from halfbyte.distributed import fsdp_arrival


def taken_along(rank: int, world: int) -> list[list[str]]:
    """Attributes of pickles and copies of a shard that has been through a forward and a backward, with one's own."""
    model, _ = wrapped(Case(), world)
    hb.distributed.fsdp_gather_nvfp4_(model)
    model(batch(Case(), rank, 0, 0)).float().sum().backward()
    model.reshard()
    shard = model[0].weight
    shard._local_tensor.own = 3
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file)["0.weight"]
    found = [sorted(vars(t._local_tensor)) for t in (loaded, copy.deepcopy(shard))]
    other, _ = wrapped(Case(), world)  # plain FSDP2 takes them as they are
    other.load_state_dict({**other.state_dict(), "0.weight": loaded}, assign=True)
    other(batch(Case(), rank, 0, 0))
    return found if same(loaded._local_tensor, shard._local_tensor) else []


def wrapped_otherwise(rank: int, world: int) -> dict[str, list]:
    """What is kept in values, and where losses and masters differ from a bf16 gather's, of models wrapped otherwise.

    Converted after they were wrapped, in part or whole, and blocks that one call wrapped.
    """
    mesh, found = ranks.mesh(world), {}
    for how in ("converted later", "half of it later", "blocks of one call"):
        seen, kept = [], []
        for codes in (False, True):
            torch.manual_seed(0)
            model, state = nn.Sequential(two_layers(32), two_layers(32)), hb.RunState(0)
            if how == "half of it later":
                hb.quantize_(model[0], "nvfp4", keep=NOTHING_KEPT, state=state)
            if how == "blocks of one call":
                hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, state=state)
                fully_shard([model[0], model[1]], mesh=mesh, mp_policy=BF16)
            else:
                for block in model:
                    fully_shard(block, mesh=mesh, mp_policy=BF16)
            fully_shard(model, mesh=mesh, mp_policy=BF16)
            if how != "blocks of one call":
                hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, state=state)
            if codes:
                kept = list(hb.distributed.fsdp_gather_nvfp4_(model).report.kept)
            seen.append(train(Case(), rank, model, state))
        found[how] = [*kept, *(i for i, (a, b) in enumerate(zip(*seen, strict=True)) if not same(a, b))]
    return found


def blocks_of_one_call(rank: int, world: int) -> list[bool]:
    """Whether compiled blocks that one call of fully_shard wrapped leave no graph to validate in high precision."""
    model = nn.Sequential(two_layers(32), two_layers(32))
    hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, state=hb.RunState(0))
    fully_shard([model[0], model[1]], mesh=ranks.mesh(world), mp_policy=BF16)
    fully_shard(model, mesh=ranks.mesh(world), mp_policy=BF16)
    hb.distributed.fsdp_gather_nvfp4_(model)
    x = batch(Case(), rank, 0, 0)
    with torch.no_grad(), hb.high_precision(model):
        plain = model(x)
        for block in model:
            block.compile(fullgraph=True, backend="eager")
        return [same(plain, model(x))]


def shorter_than_a_block(rank: int, world: int, rows: int) -> tuple[str, tuple[int, int]]:
    """What is said of a weight whose ranks hold few rows, of which a backward reads blocks of 32, and its bytes."""
    model = nn.Sequential(nn.Linear(64, rows, bias=False))
    hb.quantize_(model, "nvfp4_mxfp8_bwd", keep=NOTHING_KEPT, state=hb.RunState(0))
    fully_shard(model, mesh=ranks.mesh(world), mp_policy=BF16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (row,) = hb.distributed.fsdp_gather_nvfp4_(model).report.rows
    return " ".join(str(one.message) for one in caught), (row.backward_sent, row.values)


def two_shorter_than_a_block(rank: int, world: int) -> str:
    """What is said of two such weights, of which the second takes more times the bytes of its values."""
    model = nn.Sequential(nn.Linear(64, 24, bias=False), nn.Linear(24, 16, bias=False))
    hb.quantize_(model, "nvfp4_mxfp8_bwd", keep=NOTHING_KEPT, state=hb.RunState(0))
    fully_shard(model, mesh=ranks.mesh(world), mp_policy=BF16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hb.distributed.fsdp_gather_nvfp4_(model)
    return " ".join(str(one.message) for one in caught)


def without_its_group(rank: int, world: int) -> tuple[str, str]:
    """What is said of layers that a module further up gathers, beside others and alone."""
    mesh, said = ranks.mesh(world), []
    for deep in (True, False):
        block = nn.Sequential(two_layers(), two_layers(32, 80, 48))
        model = nn.Sequential(block)
        hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, state=hb.RunState(0))
        for part in (block[0], model) if deep else (model,):
            fully_shard(part, mesh=mesh)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                kept = hb.distributed.fsdp_gather_nvfp4_(block).report.kept
                said.append(f"{list(kept)}: {caught[0].message}")
            except ValueError as error:
                said.append(str(error))
    return said[0], said[1]


def left_behind(rank: int, world: int, name: str) -> list[tuple[bool, bool]]:
    """Of two steps: whether an operand is held behind the backward, and whether that asked for more messages."""
    case, asked = CASES[name], []
    model, state = wrapped(case, world)
    gather = hb.distributed.fsdp_gather_nvfp4_(model)
    usual = fsdp_arrival.all_gather
    fsdp_arrival.all_gather = lambda *tensors, group: (asked.append(group), usual(*tensors, group=group))

    def is_held() -> bool:
        arrived = [weight.arrived for weight in gather.weights]
        return any(t.untyped_storage().size() for w in arrived for t in (*w.blocks[:2], *w.dgrad.blocks[:2]))

    found = []
    for step in range(2):
        model(batch(case, rank, step, 0)).float().square().mean().backward()
        state.advance()
        model.reshard()
        found.append((is_held(), bool(asked)))
        asked.clear()
    fsdp_arrival.all_gather = usual
    return found
