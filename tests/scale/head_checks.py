"""What a model does whose ranks exchange activations of its head, beside one whose head is gathered: for ranks.run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ranks
import torch
import torch.nn.functional as F
from fsdp_checks import BF16
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfbyte as hb
from halfbyte import reference
from halfbyte.distributed import head
from halfbyte.distributed.head import HeadShards, LogitShards
from halfbyte.train.model import Decoder, ModelConfig

DIM, TOKENS = 32, (2, 8)


class Model(nn.Module):
    """Tokens to logits, through one layer."""

    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.lm_head = nn.Linear(DIM, rows, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        return self.lm_head(F.silu(self.layer(self.embed(ids))))


@dataclass(frozen=True, kw_only=True)
class Case:
    """quantized: the head alone has a recipe; else the layer before it has."""

    rows: int = 90
    tied: bool = False
    quantized: bool = False
    policy: MixedPrecisionPolicy | None = None
    autocast: bool = False
    micro_batches: int = 1
    mesh: tuple[int, ...] | None = None
    ignored: int = 0
    steps: int = 3


CASES = {
    "fp32": Case(),
    "tied": Case(tied=True),
    "bf16 gathers, fp32 sums": Case(policy=BF16),
    "autocast": Case(autocast=True),
    "synchronized once": Case(tied=True, micro_batches=3),
    "some do not count": Case(ignored=3),
    "HSDP": Case(tied=True, mesh=(2, 2), micro_batches=2),
    "quantized": Case(quantized=True, rows=96),
    "quantized, tied": Case(quantized=True, tied=True, rows=96),
    "a rank that keeps none": Case(rows=5, tied=True),
}
RECIPE = "nvfp4_forward"
"""It draws nothing: rows of one process and of several have the same bytes."""


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    model = Model(case.rows, case.tied)
    keep = hb.Keep(names=("layer",) if case.quantized else ("lm_head",), last_fraction=0)
    hb.quantize_(model, RECIPE, keep=keep, state=hb.RunState(0, rank=0))
    return model


def batch(case: Case, rank: int, step: int, part: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and targets of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    ids, targets = (torch.randint(case.rows, TOKENS, generator=generator) for _ in range(2))
    targets.view(-1)[: case.ignored] = -100
    return ids, targets


def loss_of(case: Case, model: Any, tokens: tuple[Tensor, Tensor]) -> Tensor:
    ids, targets = tokens
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        logits = model(ids)
    if isinstance(logits, LogitShards):
        return logits.cross_entropy(targets)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def whole(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def train(name: str, rank: int, world: int, exchanges: bool) -> tuple[list[Tensor], Any]:
    """Losses, gradients and parameters of every step, and the handle."""
    case = CASES[name]
    model, shape = model_of(case), case.mesh or (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {"mesh": mesh} | ({} if case.policy is None else {"mp_policy": case.policy})
    handle = None
    if exchanges:
        handle = hb.distributed.shard_embedding_(model, mesh, tokens=1, policy=case.policy, head="lm_head")
        options["ignored_params"] = handle.params
        assert len(handle.params) == 2 - case.tied, str(handle)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for step in range(case.steps):
        for part in range(case.micro_batches):
            is_last = part == case.micro_batches - 1
            model.set_requires_gradient_sync(is_last)
            if handle is not None:
                handle.set_requires_gradient_sync(is_last)
            loss = loss_of(case, model, batch(case, rank, step, part))
            loss.backward()
            seen.append(loss.detach().clone())
        seen += [whole(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [whole(param.detach()) for param in model.parameters()]
    seen.append(loss_of(case, model.eval(), batch(case, rank, 99, 0)).detach())
    assert sorted(model.state_dict()) == ["embed.weight", "layer.bias", "layer.weight", "lm_head.weight"]
    return seen, handle


def alone(name: str, world: int) -> list[Tensor]:
    """One process that has the tokens of all ranks, each rank's mean taken for itself."""
    case = CASES[name]
    model = model_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for step in range(case.steps):
        parts = [batch(case, rank, step, 0) for rank in range(world)]
        logits = model(torch.cat([ids for ids, _ in parts])).unflatten(0, (world, -1))
        losses = [F.cross_entropy(one.flatten(0, 1), t.flatten()) for one, (_, t) in zip(logits, parts, strict=True)]
        torch.stack(losses).mean().backward()
        seen += [torch.stack(losses).detach(), *(param.grad.clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        seen += [param.detach().clone() for param in model.parameters()]
    return seen


def sent(tensors: list[Tensor]) -> list:
    """Return what another process can be sent."""
    return [t.detach().cpu().numpy() for t in tensors]


def trained(rank: int, world: int, names: list[str], exchanges: bool) -> dict[str, tuple[list, dict]]:
    """What each case leaves, and what travelled."""
    found = {}
    for name in names:
        seen, handle = train(name, rank, world, exchanges)
        found[name] = sent(seen), {} if handle is None else handle.traffic
    return found


def logits_of(kind: str, rows: int, tokens: int, shift: int) -> tuple[Tensor, Tensor]:
    """Logits of one rank's tokens and their targets."""
    generator = torch.Generator().manual_seed(shift)
    logits = torch.randn(tokens, rows, generator=generator) * 9
    targets = torch.randint(rows, (tokens,), generator=generator)
    if kind == "ignored":
        targets[::3] = -100
    elif kind == "nan":
        logits[1, rows - 1] = logits[2, 0] = logits[3, rows // 2] = torch.nan
    elif kind == "nan, ignored":
        logits[1, rows - 1], targets[1] = torch.nan, -100
    elif kind == "inf":
        logits[0, 0], logits[2, 0] = torch.inf, -torch.inf
        targets[2] = 0
    elif kind == "low":
        logits[3] = -torch.inf
    return logits, targets


KINDS = [
    ("plain", 5001),
    ("nan, ignored", 41),
    ("plain", 41),
    ("plain", 3),
    ("ignored", 41),
    ("nan", 41),
    ("inf", 41),
    ("low", 41),
]


def losses(rank: int, world: int) -> list[list]:
    """Loss and gradient of rank 0's tokens, rows shared by all ranks, which have tokens of their own."""
    mesh = ranks.mesh(world)
    found = []
    for kind, rows in KINDS:
        shards = HeadShards(torch.empty(rows, 1), mesh, torch.float32)
        every = [tuple(t.to(ranks.device()) for t in logits_of(kind, rows, 6, shift)) for shift in range(world)]
        here = torch.cat(
            [logits.tensor_split([shards.first, shards.first + -(-rows // world)], 1)[1] for logits, _ in every]
        )
        here.requires_grad_()
        loss = LogitShards(here.clone(), shards).cross_entropy(every[rank][1])
        (loss * (rank + 2)).backward()
        assert here.grad is not None
        whole = [here.grad.new_empty(here.shape[0], -(-rows // world)) for _ in range(world)]
        padded = F.pad(here.grad, (0, whole[0].shape[1] - here.shape[1]))
        torch.distributed.all_gather(whole, padded)
        found.append(sent([loss, torch.cat(whole, 1)[6 * rank : 6 * rank + 6, :rows]]))
    return found


def saved_by_others(rank: int, world: int) -> list[str]:
    """What becomes of gradients whose makers saved the logits that are used up: a cap's, and those of a loss before."""
    shards, targets = HeadShards(torch.empty(8, 1), ranks.mesh(world), torch.float32), torch.tensor([3, 1])
    leaf, said = torch.randn(2 * world, 8 // world, requires_grad=True), []
    # As a kernel does, whose writes torch does not see.
    head.ops.logit_gradient_ = lambda logits, *how: reference.logit_gradient_(logits.data, *how)

    def loss_before(logits: Tensor) -> Tensor:
        return logits.logsumexp(1).square().mean() + LogitShards(logits, shards).cross_entropy(targets)

    def loss_after(logits: Tensor) -> Tensor:
        return LogitShards(logits, shards).cross_entropy(targets) + logits.logsumexp(1).square().mean()

    def capped(logits: Tensor) -> Tensor:
        return LogitShards(torch.tanh(logits), shards).cross_entropy(targets)

    for loss_of_logits in (loss_before, loss_after, capped):
        try:
            loss_of_logits(leaf * 1).backward()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def of_other_integers(rank: int, world: int) -> list[bool]:
    """Whether targets of every integer dtype have the loss of int64; some of them hold no number of rows."""
    shards = HeadShards(torch.empty(40_000, 1), ranks.mesh(world), torch.float32)
    logits, found = torch.randn(2 * world, 20_000), []
    for targets in (torch.tensor([3, 100]), torch.tensor([255, 100])):
        losses = [LogitShards(logits, shards).cross_entropy(targets, 255)]
        small = [torch.uint8, torch.int16, torch.int32] + [torch.int8] * (int(targets[0]) < 128)
        losses += [LogitShards(logits, shards).cross_entropy(targets.to(dtype), 255) for dtype in small]
        found += [torch.equal(loss, losses[0]) and bool(loss.isfinite()) for loss in losses]
    return found


def compiled_loss(rank: int, world: int) -> tuple[bool, list[str]]:
    """Whether a loss in compiled code has the bits that it has in other code, and what of it was compiled."""
    shards, called = HeadShards(torch.empty(41, 1), ranks.mesh(world), torch.float32), []
    every = [logits_of("plain", 41, 6, shift) for shift in range(world)]
    here = torch.cat([logits for logits, _ in every])[:, shards.first :][:, : -(-41 // world)]

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes)
        return graph.forward

    def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
        return LogitShards(logits * 2, shards).cross_entropy(targets) * 3

    seen = []
    for function in (loss_of_logits, torch.compile(loss_of_logits, backend=backend)):
        logits = here.clone().requires_grad_()
        loss = function(logits, every[rank][1])
        loss.backward()
        seen.append((loss.detach(), logits.grad))
    return all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), sorted({"all", "clamp"} & set(called))


def unwaited(rank: int, world: int, rows: int) -> tuple[list[float], dict[str, int]]:
    """Losses of steps through embedding and head; torch makes an error of what a host waits for after the first."""
    device, torch_waits = ranks.device(), torch.cuda.set_sync_debug_mode
    torch.manual_seed(0)
    model = Model(rows, False).to(device)
    tokens = TOKENS[0] * TOKENS[1]
    handle = hb.distributed.shard_embedding_(model, ranks.mesh(world), tokens=tokens, head="lm_head")
    assert [row.reason for row in handle.rows] == ["", ""] and handle.rows[0].is_fixed
    case = Case(rows=rows, ignored=2)
    batches = [[t.to(device) for t in batch(case, rank, 0, part)] for part in range(4)]
    found = []
    try:
        for step, (ids, targets) in enumerate(batches):
            if device.type == "cuda" and step == 1:
                torch_waits("error")
            handle.set_requires_gradient_sync(step % 2 == 1)
            loss = model(ids).cross_entropy(targets)
            loss.backward()
            found.append(loss.detach())
    finally:
        if device.type == "cuda":
            torch_waits("default")
    return [loss.item() for loss in found], handle.traffic


def choices(rank: int, world: int) -> list[str]:
    """Why heads are gathered."""
    mesh = init_device_mesh("cpu", (world,))
    few, tied, biased, kept = Model(8, False), Model(30, True), Model(400, False), Model(60, True)
    cut = Model(400, False)
    hb.quantize_(cut, "nvfp4", keep=hb.Keep(names=("layer",), last_fraction=0), state=hb.RunState(0))
    biased.lm_head = nn.Linear(DIM, 400)
    kept.other = nn.Linear(DIM, 60)
    kept.other.weight = kept.embed.weight
    found = []
    for model, tokens in ((few, 16), (tied, 16), (biased, 1), (kept, 1), (cut, 1)):
        handle = hb.distributed.shard_embedding_(model, mesh, tokens=tokens, head="lm_head")
        found.append(handle.rows[-1].reason)
        assert isinstance(model.lm_head, nn.Linear) and (model.lm_head.weight not in handle.params)
    return found


def refusals(rank: int, world: int) -> list[str]:
    """What is said of arguments that cannot be."""
    mesh = init_device_mesh("cpu", (world,))
    said = []

    def sharded() -> LogitShards:
        model = Model(40, False)
        hb.distributed.shard_embedding_(model, mesh, tokens=1, head="lm_head")
        return model(torch.tensor([[1, 2]]))

    def twice() -> None:
        loss = sharded().cross_entropy(torch.tensor([[1, 2]]))
        loss.backward(retain_graph=True)
        loss.backward()

    for call in (
        lambda: hb.distributed.shard_embedding_(Model(40, False), mesh, tokens=1, head="head"),
        lambda: sharded().cross_entropy(torch.tensor([1])),
        lambda: sharded().cross_entropy(torch.tensor([1, 40])),
        lambda: sharded().cross_entropy(torch.tensor([0.9, 0.1])),
        twice,
    ):
        try:
            call()
        except (ValueError, IndexError, TypeError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


class Collectives(TorchDispatchMode):
    """Counts bytes of collectives by kind: of all ranks' messages together, of what is reduced as it is before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = dict.fromkeys(("gather", "reduce_scatter", "reduce", "to_all"), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            name = func.name().partition("::")[2].replace("_", "")
            (kind,) = (k for k, part in KINDS_OF_COLLECTIVES.items() if part in name)
            given = args[1] if kind == "reduce_scatter" and func.namespace == "c10d" else args[0]
            given = found if kind == "gather" and func.namespace != "c10d" else given
            self.bytes[kind] += sum(t.nbytes for t in tree_leaves(given) if isinstance(t, Tensor))
        return found


KINDS_OF_COLLECTIVES = {
    "gather": "allgather",
    "reduce_scatter": "reducescatter",
    "reduce": "allreduce",
    "to_all": "alltoall",
}


def whole_model(rank: int, world: int, tied: bool, head: str | None) -> dict[str, Any]:
    """What a step of a decoder brings, every kind of collective counted where it is called."""
    shape = ModelConfig(dim=128, hidden=384, layers=3, heads=4, kv_heads=2, vocab_size=6016, tie_embeddings=tied)
    torch.manual_seed(0)
    model = Decoder(shape)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(0))
    hb.distributed.place_ranks_(model)
    mesh, each = init_device_mesh("cpu", (world,)), 2 * 32
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": BF16}
    for block in model.layers:
        fully_shard(block, **options)
    if head is not None:
        handle = hb.distributed.shard_embedding_(model, mesh, tokens=each, policy=BF16, head=head)
        options["ignored_params"] = handle.params
    fully_shard(model, **options)
    gather = hb.distributed.fsdp_gather_nvfp4_(model)
    ids = torch.randint(6016, (2, 32), generator=torch.Generator().manual_seed(rank))
    with Collectives() as counted:
        logits = model(ids)
        if isinstance(logits, LogitShards):
            loss = logits.cross_entropy(ids)
        else:
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        loss.backward()
    matrices = sum(p.numel() for n, p in model.layers.named_parameters() if p.dim() == 2)
    small = sum(p.numel() for n, p in model.layers.named_parameters() if p.dim() == 1)
    traffic = 0 if head is None else handle.traffic["activations"]
    return counted.bytes | {"matrices": matrices, "small": small, "sent": gather.report.sent, "activations": traffic}


def compiled(rank: int, world: int) -> list[bool]:
    """Whether a model that is compiled as a whole has the loss and gradients that it has eagerly."""
    found = []
    for name in ("tied", "quantized"):
        seen = []
        for is_compiled in (False, True):
            case = CASES[name]
            model, mesh = model_of(case), init_device_mesh("cpu", (world,))
            handle = hb.distributed.shard_embedding_(model, mesh, tokens=1, head="lm_head")
            fully_shard(model, mesh=mesh, ignored_params=handle.params)
            called = torch.compile(model, backend="aot_eager") if is_compiled else model
            loss = loss_of(case, called, batch(case, rank, 0, 0))
            loss.backward()
            seen.append([loss.detach(), *(whole(param.grad) for param in model.parameters())])
        found.append(all(torch.equal(a, b) for a, b in zip(*seen, strict=True)))
    return found
