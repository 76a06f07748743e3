"""What a model does whose ranks exchange rows of its embedding, beside one that FSDP2 gathers whole: for ranks.run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ranks
import torch
from fsdp_checks import BF16, locals_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte.distributed import embedding, fixed_rows

DIM = 24
WAYS = ("one size", "counts")
"""Messages of one size, and those that are counted first."""


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
    "fp32 gathers, bf16 sums": Case(policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    "frozen": Case(frozen=True),
    "bf16 gathers": Case(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


@contextmanager
def exchanging(way: str) -> Iterator[None]:
    """Let a way be chosen, whatever its bytes: those of messages of one size are few, or more than any gather's."""
    rule = embedding.row_bytes_exchanged

    def decided(*shape: Any) -> tuple[int, int]:
        return rule(*shape)[0], 1 if way == "one size" else 1 << 60

    try:
        embedding.row_bytes_exchanged = decided
        yield
    finally:
        embedding.row_bytes_exchanged = rule


def model_of(case: Case) -> nn.Module:
    """An embedding, a quantized layer and a head."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(case.rows, DIM), nn.Linear(DIM, 32), nn.Linear(32, case.rows)).to(case.dtype)
    model[0].weight.requires_grad_(not case.frozen)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("2",), last_fraction=0), state=hb.RunState(0))
    return model.to(ranks.device())


def batch(case: Case, rank: int, step: int, part: int) -> torch.Tensor:
    """This rank's tokens of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randint(case.named, case.shape, generator=generator).to(ranks.device())


def train(case: Case, rank: int, world: int, way: str | None) -> tuple[list, Any]:
    """Losses, gradients and parameters of every step, and the handle."""
    model, shape = model_of(case), case.mesh or (world,)
    hb.distributed.place_ranks_(model)
    state = next(module.run_state for module in model.modules() if getattr(module, "run_state", None) is not None)
    mesh = ranks.mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {"mesh": mesh} | ({} if case.policy is None else {"mp_policy": case.policy})
    handle = None
    if way is not None:
        tokens = min(case.shape[0] * case.shape[1], case.rows - 1)
        with exchanging(way):
            handle = hb.distributed.shard_embedding_(model, mesh, tokens=tokens, policy=case.policy)
        options["ignored_params"] = handle.params
        assert len(handle.params) == 1, str(handle)
        assert handle.rows[0].is_fixed == (way == "one size")
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


def compared(rank: int, world: int, names: list[str], way: str, close: bool = False) -> dict[str, Any]:
    """Which of the tensors of cases differ, in bits or in more than the rounding of a sum; and what travelled."""
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal
    if close:
        same = lambda a, b: torch.allclose(a, b, rtol=2e-5, atol=1e-6)  # noqa: E731
    found = {}
    for name in names:
        case = CASES.get(name) or Case(mesh=(2, world // 2), policy=BF16)
        (gathered, _), (exchanged, handle) = (train(case, rank, world, how) for how in (None, way))
        pairs = list(zip(gathered, exchanged, strict=True))
        differs = [i for i, (a, b) in enumerate(pairs) if a.dtype != b.dtype or a.shape != b.shape or not same(a, b)]
        found[name] = {"differs": differs, "moved": bool(gathered[-1].abs().sum()), **handle.traffic}
    return found


def counted(rank: int, world: int, way: str) -> dict[str, int]:
    """What one forward and backward takes of rank 0 and 1, who name rows 0, 1, 2, 20 and 21, 21, 22, 22."""
    model = nn.Sequential(nn.Embedding(40, DIM))
    mesh = ranks.mesh(world)
    with exchanging(way):
        handle = hb.distributed.shard_embedding_(model, mesh, tokens=5)
    assert handle.rows[0].is_fixed == (way == "one size")
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


class Called(TorchDispatchMode):
    """The names of what torch calls, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def waits(rank: int, world: int, way: str) -> list[str]:
    """For what a host would wait whose device is a GPU: values that it reads, and sizes that only the device knows."""
    model = nn.Sequential(nn.Embedding(40, DIM))
    with exchanging(way):
        handle = hb.distributed.shard_embedding_(model, ranks.mesh(world), tokens=5)
    fixed_rows.check_ids = lambda *arguments: None  # what a GPU reports itself
    with Called() as called:
        for is_last in (False, True):
            handle.set_requires_gradient_sync(is_last)
            model(torch.tensor([0, 20, 39, 20])).sum().backward()
    return [name for name in called.names if name in ("_local_scalar_dense", "nonzero", "bincount", "_unique2")]


def uneven(rank: int, world: int) -> dict[str, Any]:
    """Rows and gradients where ranks have other numbers of tokens, up to those that messages have room for."""
    model, mesh = nn.Sequential(nn.Embedding(43, DIM)), ranks.mesh(world)
    torch.manual_seed(0)
    torch.nn.init.normal_(model[0].weight)
    whole = model[0].weight.detach().clone()
    handle = hb.distributed.shard_embedding_(model, mesh, tokens=7)
    assert handle.rows[0].is_fixed
    few = torch.tensor([42], dtype=torch.int32)
    ids = [torch.tensor([5, 42, 5, 0, 17, 42, 30]), torch.empty(0, dtype=torch.int64), few]
    found, expected = True, torch.zeros_like(whole)
    for part, shift in enumerate((0, 1)):
        handle.set_requires_gradient_sync(part == 1)
        given = ids[(rank + shift) % len(ids)]
        rows = model(given)
        found &= torch.equal(rows, whole[given.long()])
        (rows * torch.arange(1, len(given) + 1)[:, None]).sum().backward()
        for other in ids[:world]:
            expected.index_add_(0, other.long(), torch.arange(1, len(other) + 1)[:, None].expand(-1, DIM).float())
    gradient = model[0].weight.grad.full_tensor()
    return {"rows": found, "gradients": torch.equal(gradient, expected / world), "traffic": handle.traffic}


def in_order(rank: int, world: int, way: str) -> float:
    """The gradient of a row that ranks name whose gradients are 2^30, -2^30 and 1."""
    model = nn.Sequential(nn.Embedding(43, DIM))
    with exchanging(way):
        hb.distributed.shard_embedding_(model, ranks.mesh(world), tokens=2)
    (model(torch.tensor([42])).sum() * [2.0**30, -(2.0**30), 1.0][rank]).backward()
    return model[0].weight.grad.full_tensor()[42, 0].item() * world


def ways(rank: int, world: int, tokens: list[int]) -> list[tuple]:
    """What is chosen of an embedding of 40 rows."""
    mesh, found = ranks.mesh(world), []
    for each in tokens:
        rows = hb.distributed.shard_embedding_(nn.Sequential(nn.Embedding(40, DIM)), mesh, tokens=each).rows
        found.append((rows[0].reason, rows[0].is_fixed, rows[0].exchanged, str(rows[0])))
    return found


def tied_ways(rank: int, world: int) -> list[tuple]:
    """What is chosen of an embedding of 68 rows and a head tied to it: whether a gather, whether one size."""
    mesh, found = ranks.mesh(world), []
    for each in (9, 10, 14, 15):
        tied = nn.Sequential(nn.Embedding(68, DIM), nn.Linear(DIM, 68, bias=False))
        tied[1].weight = tied[0].weight
        handle = hb.distributed.shard_embedding_(tied, mesh, tokens=each, head="1")
        found.append((bool(handle.rows[0].reason), handle.rows[0].is_fixed))
    return found


def choices(rank: int, world: int) -> list[str]:
    """Why embeddings are gathered."""
    mesh = ranks.mesh(world)
    tied = nn.Sequential(nn.Embedding(40, DIM), nn.Linear(DIM, 40, bias=False))
    tied[1].weight = tied[0].weight
    plain = [nn.Embedding(40, DIM, padding_idx=0), nn.Embedding(40, DIM, max_norm=1.0), nn.Embedding(6, DIM)]
    plain += [nn.Embedding(40, DIM, scale_grad_by_freq=True), nn.Embedding(40, DIM, sparse=True)]
    found = [hb.distributed.shard_embedding_(model, mesh, tokens=8) for model in (tied, nn.Sequential(*plain))]
    assert not any(handle.params for handle in found)
    apart = nn.Sequential(nn.Embedding(40, DIM), nn.Linear(DIM, 40, bias=False))
    of_one = SimpleNamespace(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda weight: torch.float32)
    of_none = SimpleNamespace(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda weight: None)
    found += [hb.distributed.shard_embedding_(apart, mesh, tokens=8, head="1", policy=of_one)]
    apart[0].weight.grad_dtype = torch.bfloat16
    found += [hb.distributed.shard_embedding_(apart, mesh, tokens=8, head="1", policy=of_none)]
    return [row.reason for handle in found for row in handle.rows]


def as_many_bytes(rank: int, world: int) -> list[tuple]:
    """What is chosen where ways take as many bytes: of 25 rows, 59 of a head, and one row more of each."""
    mesh, found = ranks.mesh(world), []
    for rows, tokens in ((25, 24 // (world - 1)), (26, 24 // (world - 1)), (25, 24), (26, 24)):
        model = nn.Sequential(nn.Embedding(rows, DIM))
        row = hb.distributed.shard_embedding_(model, mesh, tokens=tokens).rows[0]
        found.append((row.reason, row.is_fixed))
    for rows in (59, 60):
        model = nn.Sequential(nn.Linear(DIM, rows, bias=False))
        head = hb.distributed.shard_embedding_(model, mesh, tokens=48 // (world - 1), head="0").rows[0]
        found.append((head.reason, head.exchanged, head.gathered))
    return found


def more_than_one_message_holds(rank: int, world: int) -> list[bool]:
    """Whether rows and gradients are those of all tokens where ranks have 9, and messages hold 4."""
    model = nn.Sequential(nn.Embedding(43, DIM))
    whole = model[0].weight.detach().clone()
    with exchanging("one size"):
        hb.distributed.shard_embedding_(model, ranks.mesh(world), tokens=4)
    every = torch.randint(43, (world, 9), generator=torch.Generator().manual_seed(0))
    rows = model(every[rank])
    (rows * torch.arange(1.0, 10.0)[:, None]).sum().backward()
    weights = torch.arange(1.0, 10.0).repeat(world)
    expected = torch.zeros(43).index_add_(0, every.flatten(), weights)[:, None].expand(-1, DIM) / world
    gradient = model[0].weight.grad.full_tensor()
    return [torch.equal(rows, whole[every[rank]]), torch.equal(gradient, expected)]


class Unreadable:
    """What fails in words of its own as it is read."""

    def __len__(self) -> int:
        raise KeyError("no")

    __getitem__ = __array__ = __len__  # type: ignore[assignment]


def wrong_on_one(rank: int, world: int) -> list[str]:
    """What is said where rank 1 alone asks for what is no row of 41, which ranks do not divide."""
    said = []
    right = torch.tensor([0, 40])
    mesh = ranks.mesh(world)
    in_parts = DTensor.from_local(right, mesh, run_check=False)
    wrongs = [torch.tensor([3, 41]), torch.tensor([-1]), torch.tensor([0.5]), torch.tensor([True]), [0, 1], None]
    wrongs += [torch.tensor([1j]), right.to("meta"), in_parts, right.to_sparse(), Unreadable()]
    wrongs += [torch.nested.nested_tensor([right, right])]
    for way in WAYS:
        model = nn.Sequential(nn.Embedding(41, DIM))
        with exchanging(way):
            hb.distributed.shard_embedding_(model, mesh, tokens=4)
        for wrong in (*wrongs, [0] * 9):
            try:
                model(wrong if rank == 1 else right.repeat(5)[:9] if wrong == [0] * 9 else right)
                said.append("nothing")
            except (IndexError, TypeError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
        dtype = (torch.int64, torch.int32, torch.int16, torch.uint8)[rank]
        whole = model[0].weight.full_tensor()
        assert torch.equal(model(right.to(dtype)), whole[right]), "and goes on, of any integers on any rank"
    return said


def never_sent(rank: int, world: int) -> list[str]:
    """What is said at the next step where the micro-batch that sends gradients did not go through the embedding."""
    said = []
    for way in WAYS:
        model = nn.Sequential(nn.Embedding(43, DIM))
        with exchanging(way):
            handle = hb.distributed.shard_embedding_(model, ranks.mesh(world), tokens=4)
        for goes_through in (True, False):
            for is_last in (False, True):
                handle.set_requires_gradient_sync(is_last)
                if goes_through or not is_last:
                    model(torch.tensor([0, 20])).sum().backward()
        try:
            handle.set_requires_gradient_sync(False)
        except RuntimeError as error:
            said.append(str(error))
    return said


def replaced(rank: int, world: int) -> list[str]:
    """Why embeddings and heads are gathered that another module cannot stand for, and what they do then."""
    mesh, said = ranks.mesh(world), []
    backward = "a backward hook", "a hook before the backward"
    for case in ("two names", "a hook", "a hook of the head", "two names of the head", *backward, "the model"):
        model = nn.Module()
        model.embed, model.head, model.inner = nn.Embedding(400, DIM), nn.Linear(DIM, 400, bias=False), nn.Module()
        if case == "two names":
            model.inner.embed = model.embed
        if case == "a hook":
            model.embed.register_forward_hook(lambda module, inputs, output: 2 * output)
        if case == "a hook of the head":
            model.head.register_forward_pre_hook(lambda module, inputs: None)
        if case == "a backward hook":
            model.embed.register_full_backward_hook(lambda module, dx, dy: None)
        if case == "a hook before the backward":
            model.head.register_full_backward_pre_hook(lambda module, dy: None)
        if case == "two names of the head":
            model.inner.head = model.head
        alone, head = (model.embed, None) if case == "the model" else (model, "head")
        before = alone.state_dict().keys()
        rows = hb.distributed.shard_embedding_(alone, mesh, tokens=8, head=head).rows
        assert alone.state_dict().keys() == before
        said += [f"{case}: {row.name}: {row.reason}" for row in rows]
        inner = getattr(model.inner, "embed", model.embed), getattr(model.inner, "head", model.head)
        assert inner == (model.embed, model.head)
    return said


def options(rank: int, world: int) -> dict[str, Any]:
    """What a sharded embedding has of the options of torch.nn.Embedding, and what is said where one is set."""
    model = nn.Sequential(nn.Embedding(40, DIM, norm_type=3.0)).eval()
    names = [name for name in nn.Embedding.__constants__ if hasattr(model[0], name)]
    before = {name: getattr(model[0], name) for name in names}
    hb.distributed.shard_embedding_(model, ranks.mesh(world), tokens=4)
    assert not any(module.training for module in model.modules())
    found: dict[str, Any] = {"same": {name: getattr(model[0], name) for name in names} == before, "names": names}
    for name, value in (("padding_idx", 0), ("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)):
        setattr(model[0], name, before[name])
        try:
            setattr(model[0], name, value)
        except ValueError as error:
            found[name] = str(error)
        assert getattr(model[0], name) == before[name]
    return found


def refusals(rank: int, world: int) -> list[str]:
    """What is said of arguments and ids that cannot be."""
    mesh = ranks.mesh(world)
    model = nn.Sequential(nn.Embedding(40, DIM))
    said = []
    for ids, options in (
        ([0], {"tokens": 0}),
        ([40], {"tokens": 4}),
        ([-1], {"tokens": 4}),
        ([3.5], {"tokens": 4}),
        ([0], {"tokens": 4}),
    ):
        try:
            if not hasattr(model[0].weight, "device_mesh") or options["tokens"] == 0 or ids == [0]:
                hb.distributed.shard_embedding_(model, mesh, **options)
            model(torch.tensor(ids))
        except (ValueError, IndexError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def refused_models(rank: int, world: int) -> list[str]:
    """What is said of meshes, models and ids that cannot be."""
    mesh, sharded = ranks.mesh(world), nn.Sequential(nn.Embedding(40, DIM), nn.Linear(DIM, 40, bias=False))
    fully_shard(sharded, mesh=mesh)
    exchanged = nn.Sequential(nn.Embedding(40, DIM))
    hb.distributed.shard_embedding_(exchanged, mesh, tokens=4)
    three = ranks.mesh(1, 1, world, names=("pp", "replicate", "shard"))
    head_alone = nn.Sequential(sharded[1])
    said = []
    for call in (
        lambda: hb.distributed.shard_embedding_(nn.Sequential(nn.Embedding(40, DIM)), three, tokens=4),
        lambda: hb.distributed.shard_embedding_(sharded, mesh, tokens=4),
        lambda: hb.distributed.shard_embedding_(head_alone, mesh, tokens=4, head="0"),
        lambda: exchanged(torch.tensor([True, False])),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
