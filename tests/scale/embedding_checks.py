"""What a model does whose ranks exchange rows of its embedding, beside one that FSDP2 gathers whole: for ranks.run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fsdp_checks import BF16, locals_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import halfbyte as hb

DIM = 24


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows: of the embedding; named: how many of them batches name; micro_batches: of which the last is reduced."""

    rows: int = 41
    named: int = 41
    shape: tuple[int, ...] = (2, 6)
    dtype: torch.dtype = torch.float32
    policy: MixedPrecisionPolicy | None = None
    micro_batches: int = 1
    mesh: tuple[int, ...] | None = None
    frozen: bool = False
    steps: int = 3


CASES = {
    "fp32": Case(),
    "bf16 gathers, fp32 sums": Case(policy=BF16),
    "bf16": Case(dtype=torch.bfloat16),
    "few rows, named often": Case(rows=200, named=3, shape=(4, 12)),
    "a rank that keeps none": Case(rows=3, named=3, shape=(1, 2)),
    "synchronized once": Case(rows=60, named=60, policy=BF16, micro_batches=3),
    "frozen": Case(frozen=True),
}


def model_of(case: Case) -> nn.Module:
    """An embedding, a quantized layer and a head."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(case.rows, DIM), nn.Linear(DIM, 32), nn.Linear(32, case.rows)).to(case.dtype)
    model[0].weight.requires_grad_(not case.frozen)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("2",), last_fraction=0), state=hb.RunState(0))
    return model


def batch(case: Case, rank: int, step: int, part: int) -> torch.Tensor:
    """This rank's tokens of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randint(case.named, case.shape, generator=generator)


def train(case: Case, rank: int, world: int, exchanges: bool) -> tuple[list, Any]:
    """Losses, gradients and parameters of every step, and the handle."""
    model, shape = model_of(case), case.mesh or (world,)
    hb.distributed.place_ranks_(model)
    state = next(module.run_state for module in model.modules() if getattr(module, "run_state", None) is not None)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {"mesh": mesh} | ({} if case.policy is None else {"mp_policy": case.policy})
    handle = None
    if exchanges:
        tokens = case.shape[0] * case.shape[1]
        handle = hb.distributed.shard_embedding_(model, mesh, tokens=min(tokens, case.rows - 1), policy=case.policy)
        options["ignored_params"] = handle.params
        assert len(handle.params) == 1, str(handle)
    fully_shard(model, **options)
    hb.distributed.fsdp_gather_nvfp4_(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen = []
    for step in range(case.steps):
        for part in range(case.micro_batches):
            is_last = part == case.micro_batches - 1
            model.set_requires_gradient_sync(is_last)
            if handle is not None:
                handle.set_requires_gradient_sync(is_last)
            loss = model(batch(case, rank, step, part)).float().square().mean()
            loss.backward()
            state.advance()
            seen.append(loss.detach().clone())
        seen += [t for t in locals_of(model, lambda param: param.grad) if t is not None]
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()
        seen += [t for t in locals_of(model, lambda param: param) if t is not None]
    return seen, handle


def compared(rank: int, world: int, names: list[str], close: bool = False) -> dict[str, Any]:
    """Which of the tensors of cases differ, in bits or in more than the rounding of a sum; and what travelled."""
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal
    if close:
        same = lambda a, b: torch.allclose(a, b, rtol=2e-5, atol=1e-6)  # noqa: E731
    found = {}
    for name in names:
        case = CASES.get(name) or Case(mesh=(2, world // 2), policy=BF16)
        (gathered, _), (exchanged, handle) = (train(case, rank, world, exchanges) for exchanges in (False, True))
        pairs = list(zip(gathered, exchanged, strict=True))
        differs = [i for i, (a, b) in enumerate(pairs) if a.dtype != b.dtype or a.shape != b.shape or not same(a, b)]
        found[name] = {"differs": differs, "moved": bool(gathered[-1].abs().sum()), **handle.traffic}
    return found


def counted(rank: int, world: int) -> dict[str, int]:
    """What one forward and backward takes of rank 0 and 1, who name rows 0, 1, 2, 20 and 21, 21, 22."""
    model = nn.Sequential(nn.Embedding(40, DIM))
    mesh = init_device_mesh("cpu", (world,))
    handle = hb.distributed.shard_embedding_(model, mesh, tokens=5)
    ids = torch.tensor([[0, 1, 2, 20], [21, 21, 22, 22]][rank])
    rows = model(ids)
    rows.sum().backward()
    whole = model[0].weight.full_tensor()
    gradient = model[0].weight.grad.full_tensor()
    return handle.traffic | {
        "equal": bool(torch.equal(rows, whole[ids])),
        "gradient": gradient.sum(1).div(DIM).nonzero().flatten().tolist(),
        "twice": gradient[21, 0].item(),
    }


def choices(rank: int, world: int) -> list[str]:
    """Why embeddings are gathered."""
    mesh = init_device_mesh("cpu", (world,))
    tied = nn.Sequential(nn.Embedding(40, DIM), nn.Linear(DIM, 40, bias=False))
    tied[1].weight = tied[0].weight
    plain = [nn.Embedding(40, DIM, padding_idx=0), nn.Embedding(40, DIM, max_norm=1.0), nn.Embedding(6, DIM)]
    found = [hb.distributed.shard_embedding_(model, mesh, tokens=8) for model in (tied, nn.Sequential(*plain))]
    assert not any(handle.params for handle in found)
    return [row.reason for handle in found for row in handle.rows]


def refusals(rank: int, world: int) -> list[str]:
    """What is said of arguments and ids that cannot be."""
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(nn.Embedding(40, DIM))
    said = []
    for ids, options in (([0], {"tokens": 0}), ([40], {"tokens": 4}), ([-1], {"tokens": 4}), ([0], {"tokens": 4})):
        try:
            if not hasattr(model[0].weight, "device_mesh") or options["tokens"] == 0 or ids == [0]:
                hb.distributed.shard_embedding_(model, mesh, **options)
            model(torch.tensor(ids))
        except (ValueError, IndexError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
