"""Random orders of what people do to a model around fully_shard and the 4-bit gather: each is exact, or is refused.

Every order is done to two models, one of which FSDP2 gathers in bf16. Where that one trains on, the other has the same
losses and masters, bit for bit, and gathered codes; or it raised a ValueError that says what to do. Where FSDP2 itself
raises, so may the other.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from fsdp_checks import BF16, NOTHING_KEPT, locals_of, same, two_layers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import halfbyte as hb

SHAPE = (4, 40)


class Run:
    """One model on its way; `codes`: whether its weights are gathered as codes."""

    def __init__(self, codes: bool, world: int) -> None:
        self.codes, self.mesh = codes, init_device_mesh("cpu", (world,))
        self.policy, self.offloads, self.reshard = None, False, True
        self.model: nn.Module = nn.Sequential(two_layers(37, 83, 40), nn.ReLU(), two_layers(3, 18, 37))
        self.state: hb.RunState | None = None
        self.gather: Any = None
        self.prepared: Any = None
        self.saved: dict[str, torch.Tensor] = {}
        self.trained: list = []
        torch.manual_seed(0)
        for param in self.model.parameters():
            param.data.normal_(std=0.2)

    def is_wrapped(self) -> bool:
        """Whether fully_shard has been called."""
        return isinstance(self.model, torch.distributed.fsdp.FSDPModule)


def convert(run: Run) -> None:
    """hb.quantize_; one weight of each half goes to its backward in another form."""
    apart = {"0.2": "nvfp4_mxfp8_bwd", "2.2": "nvfp4_forward"}
    run.state = hb.quantize_(run.model, "nvfp4", keep=NOTHING_KEPT, rules=apart).state
    hb.distributed.place_ranks_(run.model)


def wrap(run: Run) -> None:
    """fully_shard of both halves and the whole."""
    options = {"mesh": run.mesh, "reshard_after_forward": run.reshard}
    if run.policy is not None:
        options["mp_policy"] = run.policy
    if run.offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for part in (run.model[0], run.model[2]):
        fully_shard(part, **options)
    fully_shard(run.model, **options)


def prepared(run: Run, is_efficient: bool = False) -> None:
    """accelerate's prepare(): it wraps both halves and the whole, or takes what is wrapped; its optimizer steps."""
    if is_efficient and not run.is_wrapped() and any(param.is_meta for param in run.model.parameters()):
        raise RuntimeError("the first rank has nothing to send, and accelerate's others would wait for it")
    here = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": run.mesh.size()}
    os.environ.update({name: str(value) for name, value in (here | {"LOCAL_WORLD_SIZE": run.mesh.size()}).items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29997", ACCELERATE_USE_CPU="true")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=700,  # the halves, and the layers of the first
        reshard_after_forward=run.reshard,
        mixed_precision_policy=run.policy,
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if run.offloads else False,
        cpu_ram_efficient_loading=is_efficient,
    )
    # accelerate shards on GPUs alone, so it is told that these ranks are of that kind.
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    run.model, run.prepared = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(run.model, optimizer)


def prepared_on_meta(run: Run) -> None:
    """The same by way of the meta device: the first rank sends the others their shards."""
    prepared(run, is_efficient=True)


def gather(run: Run) -> None:
    """fsdp_gather_nvfp4_, of the one model."""
    if run.codes:
        run.gather = hb.distributed.fsdp_gather_nvfp4_(run.model)


def meta(run: Run) -> None:
    """Without values, until `empty`."""
    run.saved = {name: t.detach().clone() for name, t in run.model.state_dict().items()}
    run.model.to("meta")


def empty(run: Run) -> None:
    """Of `meta`: memory, then the values of before."""
    run.model.to_empty(device="cpu")
    loaded = dict(run.saved)
    if run.is_wrapped():
        for name, param in run.model.state_dict().items():
            if not isinstance(loaded[name], torch.distributed.tensor.DTensor):
                loaded[name] = torch.distributed.tensor.distribute_tensor(
                    loaded[name].to(param.dtype), param.device_mesh, param.placements
                )
    run.model.load_state_dict(loaded)


def to_cpu(run: Run) -> None:
    """Nothing, as it says."""
    run.model.to("cpu")


def to_float(run: Run) -> None:
    """Masters in fp32."""
    run.model.float()


def to_bf16(run: Run) -> None:
    """Masters in bf16."""
    run.model.bfloat16()


def round_trip(run: Run) -> None:
    """Through fp64 and back."""
    dtype = next(run.model.parameters()).dtype
    run.model.double().to(dtype)


def apply_clone(run: Run) -> None:
    """Every parameter a clone."""
    run.model._apply(torch.clone)


def data_clone(run: Run) -> None:
    """Every parameter's data a clone."""
    for param in run.model.parameters():
        param.data = param.data.clone()


def deepcopied(run: Run) -> None:
    """The copy goes on."""
    run.model = copy.deepcopy(run.model)


def scaled(run: Run) -> dict[str, torch.Tensor]:
    """A state dict of other values."""
    return {name: t.detach() * 1.25 for name, t in run.model.state_dict().items()}


def load(run: Run) -> None:
    """In place."""
    run.model.load_state_dict(scaled(run))


def load_assign(run: Run) -> None:
    """New tensors."""
    run.model.load_state_dict(scaled(run), assign=True)


def load_dcp(run: Run) -> None:
    """From a sharded checkpoint, in place."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        dcp.save(scaled(run), checkpoint_id=folder[0])
        state = run.model.state_dict()
        dcp.load(state, checkpoint_id=folder[0])
    except dcp.api.CheckpointException as error:  # no Exception: of a model on meta, for one
        raise RuntimeError("DCP saved or loaded nothing") from error
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    run.model.load_state_dict(state)


def written(run: Run) -> None:
    """In place, by nobody's optimizer."""
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.75)


def evaluate(run: Run) -> None:
    """A forward without gradients."""
    with torch.no_grad():
        run.trained.append(run.model(torch.ones(SHAPE, dtype=dtype_of(run))).float())


def unshard(run: Run) -> None:
    """Gathered by hand."""
    run.model.unshard()


def reshard(run: Run) -> None:
    """And let go."""
    run.model.reshard()


def compiled(run: Run) -> None:
    """Half of it."""
    run.model[0].compile(backend="eager")


def checkpointed(run: Run) -> None:
    """Half of it is recomputed in backward."""
    run.model[2] = checkpoint_wrapper(run.model[2])


def offload(run: Run) -> None:
    """What `wrap` will do."""
    run.offloads = True


def mixed(run: Run) -> None:
    """What `wrap` will do."""
    run.policy = BF16


def whole(run: Run) -> None:
    """What `wrap` will do."""
    run.reshard = False


def integer(run: Run) -> None:
    """What `wrap` will do; FSDP2 wants a divisor of the ranks below all."""
    run.reshard = 1 if run.mesh.size() == 1 else run.mesh.size() // 2 or 1


def dtype_of(run: Run) -> torch.dtype:
    """Of an input."""
    return next(run.model.parameters()).dtype if run.policy is None else torch.bfloat16


def train(run: Run) -> None:
    """A step, by an optimizer made for it, or by accelerate's as long as it has the parameters."""
    params = list(run.model.parameters())
    optimizer = run.prepared
    if optimizer is None or {*map(id, params)} != {id(p) for group in optimizer.param_groups for p in group["params"]}:
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=len(run.trained) % 2 == 0)
    generator = torch.Generator().manual_seed(10 * len(run.trained) + dist.get_rank())
    x = torch.randn(SHAPE, generator=generator).to(dtype_of(run))
    loss = run.model(x).float().square().mean()
    loss.backward()
    if run.state is not None:
        run.state.advance()
    run.trained.append(loss.detach().clone())
    optimizer.step()
    optimizer.zero_grad()
    run.trained.extend(locals_of(run.model, lambda param: param))


Op = Callable[[Run], None]
BEFORE: tuple[Op, ...] = (
    *(to_cpu, to_float, to_bf16, round_trip, apply_clone, data_clone, deepcopied, load, load_assign, checkpointed),
    *(mixed, whole, meta),
)
AFTER: tuple[Op, ...] = (
    *(to_cpu, to_float, to_bf16, round_trip, apply_clone, data_clone, deepcopied, load, load_assign, load_dcp),
    *(written, evaluate, unshard, reshard, train, meta, prepared),
)
WRAPS: tuple[Op, ...] = (wrap, wrap, wrap, prepared, prepared_on_meta)
SELDOM: tuple[Op, ...] = (offload, integer, deepcopied)


def order_of(seed: int) -> list[Op]:
    """A random order: some of BEFORE around `convert`, then `wrap` and `gather` with some of AFTER around them."""
    rng = random.Random(seed)
    seldom = [rng.choice(SELDOM)] if rng.random() < 0.15 else []
    before = [*rng.sample(BEFORE, rng.randint(0, 3)), *[op for op in seldom if op is not deepcopied], convert]
    rng.shuffle(before)
    between = [op for op in rng.sample(AFTER, rng.randint(0, 2)) if op not in (train, evaluate)]
    ops = [*before, rng.choice(WRAPS), *between, gather]
    if rng.random() < 0.1:  # in no order that is promised
        rng.shuffle(ops)
    seldom += [compiled] if rng.random() < 0.1 else []
    after = [op for op in rng.choices(AFTER, k=rng.randint(1, 4)) if op is not deepcopied or op in seldom]
    ops = [
        *ops,
        *(op for op in seldom if op is compiled),
        *after,
        train,
        *rng.choices([op for op in AFTER if op not in (deepcopied, meta)], k=2),
        train,
        train,
    ]
    if meta in ops:
        at = ops.index(meta)
        ops = [op for i, op in enumerate(ops) if op is not meta or i == at]
        ops.insert(rng.randint(at + 1, min(len(ops), max(at + 1, ops.index(train)))), empty)
    return ops


def done(run: Run, ops: list[Op]) -> tuple[int, str] | None:
    """Do all; which one raised, and what."""
    for i, op in enumerate(ops):
        try:
            op(run)
        except Exception as error:  # what others raise is theirs to choose
            return i, f"{type(error).__name__}: {error}"
    return None


def outcome(seed: int, world: int) -> dict[str, Any]:
    """What an order came to on this rank."""
    ops = order_of(seed)
    torch._dynamo.reset()
    plain, codes = Run(False, world), Run(True, world)
    ours, theirs = done(codes, ops), done(plain, ops)
    common = min(len(plain.trained), len(codes.trained))
    equal = all(same(a, b) for a, b in zip(plain.trained[:common], codes.trained[:common], strict=True))
    steps = ours is None and len(codes.trained) == len(plain.trained)
    gathers = codes.gather is not None and codes.gather.traffic["gathers"]
    return {
        "order": [op.__name__ for op in ops],
        "ours": ours,
        "theirs": theirs,
        "equal": equal,
        "trained": steps,
        "gathers": gathers,
    }


def outcomes(rank: int, world: int, seeds: list[int]) -> dict[int, dict[str, Any]]:
    """What every order came to."""
    return {seed: outcome(seed, world) for seed in seeds}
