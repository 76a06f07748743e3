"""What a model does whose weights FSDP2 gathers as NVFP4, beside one that it gathers in bf16: for ranks.run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import halfbyte as hb
from halfbyte.distributed.fsdp import reason_for_values
from halfbyte.train import model as models
from halfbyte.train import treatment

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)


def two_layers(rows: int = 48, middle: int = 80, cols: int = 32) -> nn.Module:
    """Two linear layers, named so that they share no amax."""
    return nn.Sequential(nn.Linear(cols, middle), nn.GELU(), nn.Linear(middle, rows, bias=False))


def adamw(params: Any) -> torch.optim.Optimizer:
    """With a rate that moves codes in every step."""
    return torch.optim.AdamW(params, lr=1e-2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How one model is built, wrapped and trained.

    make: the model in fp32.
    dtype: of its parameters.
    wrap: model, mesh -> None.
    shape: of the input of one rank: floats, or tokens of a vocabulary.
    before_step: what is done to it before a step; what it returns is compared too.
    aside: the steps whose forward is in hb.high_precision.
    computes: of torch.autocast, and what weights are rounded to before they are quantized.
    finish: what is done to the model last, with and without the 4-bit gather.
    casts: how often its weights change before they are used.
    """

    make: Callable[[], nn.Module] = two_layers
    dtype: torch.dtype = torch.bfloat16
    recipe: Any = "nvfp4"
    options: dict = field(default_factory=dict)
    policy: MixedPrecisionPolicy | None = None
    reshard: Any = True
    blocks: Callable[[nn.Module], list[nn.Module]] = lambda model: []
    mesh: tuple[int, ...] | None = None
    shape: tuple[int, ...] = (6, 32)
    tokens: int | None = None
    micro_batches: int = 1
    syncs_last_only: bool = False
    optimizer: Callable = adamw
    before_wrap: Callable[[nn.Module], None] = lambda model: None
    after_wrap: Callable[[nn.Module], None] = lambda model: None
    finish: Callable[[nn.Module], None] = lambda model: None
    before_step: Callable[[int, nn.Module], torch.Tensor | None] = lambda step, model: None
    aside: tuple[int, ...] = ()
    computes: torch.dtype | None = None
    steps: int = 3
    casts: int = 3


def mesh_of(case: Case, world: int) -> DeviceMesh:
    """The mesh of a case: by default one dimension."""
    shape = case.mesh or (world,)
    return ranks.mesh(*shape, names=("replicate", "shard")[-len(shape) :])


def wrapped(case: Case, world: int) -> tuple[nn.Module, hb.RunState]:
    """Build, convert and wrap the model of a case."""
    torch.manual_seed(0)
    model = case.make().to(ranks.device(), case.dtype)
    state = hb.quantize_(model, case.recipe, **{"keep": NOTHING_KEPT, **case.options}).state
    mesh = mesh_of(case, world)
    options = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.policy is not None:
        options["mp_policy"] = case.policy
    hb.distributed.place_ranks_(model)
    case.before_wrap(model)
    for block in case.blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    case.after_wrap(model)
    return model, state


def batch(case: Case, rank: int, step: int, part: int) -> torch.Tensor:
    """This rank's input of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    if case.tokens is not None:
        return torch.randint(case.tokens, case.shape, generator=generator).to(ranks.device())
    dtype = case.dtype if case.policy is None else torch.bfloat16
    return torch.randn(case.shape, generator=generator).to(ranks.device(), dtype)


def computing(case: Case) -> Any:
    """The context of its forwards."""
    return nullcontext() if case.computes is None else torch.autocast(ranks.device().type, case.computes)


def locals_of(model: nn.Module, of: Callable) -> list[torch.Tensor | None]:
    """This rank's shards of parameters or gradients, copied."""
    found = [of(param) for param in model.parameters()]
    return [None if t is None else (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in found]


def train(case: Case, rank: int, model: nn.Module, state: hb.RunState) -> list:
    """Losses, gradients and parameters of every step."""
    seen = []
    optimizer = case.optimizer(model.parameters())
    for step in range(case.steps):
        found = case.before_step(step, model)
        seen.extend([] if found is None else [found])
        for part in range(case.micro_batches):
            if case.syncs_last_only:
                model.set_requires_gradient_sync(part == case.micro_batches - 1)
            with hb.high_precision(model) if step in case.aside else nullcontext(), computing(case):
                y = model(batch(case, rank, step, part))
            loss = y.float().square().mean()
            loss.backward()
            state.advance()
            seen.append(loss.detach().clone())
        seen.extend(locals_of(model, lambda param: param.grad))
        optimizer.step()
        optimizer.zero_grad()
        seen.extend(locals_of(model, lambda param: param))
    return seen


def compared(case: Case, rank: int, world: int) -> dict[str, Any]:
    """Train both ways; what differed, and what travelled."""
    plain, state = wrapped(case, world)
    case.finish(plain)
    expected = train(case, rank, plain, state)
    model, state = wrapped(case, world)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gather = hb.distributed.fsdp_gather_nvfp4_(model, dtype=case.computes)
    case.finish(model)
    found = train(case, rank, model, state)
    assert len(expected) == len(found) > 0
    pairs = list(zip(expected, found, strict=True))
    differs = [i for i, (a, b) in enumerate(pairs) if not same(a, b)]
    return {
        "differs": differs,
        "traffic": gather.traffic,
        "casts": gather.traffic["casts"] - case.casts,
        "quantized": gather.report.quantized,
        "kept": gather.report.kept,
        "kept in backward": gather.report.kept_in_backward,
        "said": [str(one.message) for one in said if "fsdp_gather" in str(one.message)],
        "ratio": gather.report.ratio,
        "finite": all(t is None or bool(t.isfinite().all()) for t in found),
        "losses": [t.item() for t in found if t is not None and t.dim() == 0],
        "moved": any(a is not None and bool(a.ne(0).any()) for a in found),
    }


def long_run(rank: int, world: int, steps: int) -> dict[str, Any]:
    """fp32 masters for many steps; rows that no number of ranks divides."""
    make = partial(two_layers, 37, 83, 40)
    case = Case(make=make, shape=(16, 40), dtype=torch.float32, policy=BF16, steps=steps, casts=steps)
    return compared(case, rank, world)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return t.contiguous().view(-1).view(torch.uint8)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def told(rank: int, world: int, tells: bool) -> bool:
    """Whether a forward after a write that leaves no trace is that of FSDP2's bf16 gather."""
    outputs = []
    for codes in (False, True):
        model, _ = wrapped(Case(), world)
        gather = hb.distributed.fsdp_gather_nvfp4_(model) if codes else None
        model(batch(Case(), rank, 0, 0))
        model[0].weight.data.neg_()
        if gather is not None and tells:
            gather.mark_changed([model[0].weight])
        outputs.append(model(batch(Case(), rank, 0, 0)))
    return same(*outputs)


def arrived(rank: int, world: int, sizes: list[tuple[int, int]], recipe: str, poison: bool = False) -> dict[str, list]:
    """Whether each gathered weight is its quantization, in both orientations; and what was quantized in a step."""
    model = nn.Sequential(*(nn.Linear(cols, rows) for rows, cols in sizes)).bfloat16()
    torch.manual_seed(1)
    for param in model.parameters():  # magnitudes of their own in every row
        param.data.copy_(torch.randn(param.shape) * torch.rand(len(param)).view(-1, *[1] * (param.dim() - 1)).exp())
    if poison:
        model[0].weight.data[20, 7], model[1].weight.data[-1, -1] = torch.nan, -torch.inf
    model.to(ranks.device())
    state = hb.quantize_(model, recipe, keep=NOTHING_KEPT).state
    hb.distributed.place_ranks_(model)
    whole = [layer.weight.detach().clone() for layer in model]
    quantized = {}
    for how in ("in bf16", "as codes"):
        if how == "as codes":
            fully_shard(model, reshard_after_forward=False)
            hb.distributed.fsdp_gather_nvfp4_(model)
        with watched(quantized.setdefault(how, [])):
            model(torch.randn(5, sizes[0][1]).to(ranks.device(), torch.bfloat16)).float().square().mean().backward()
        state.advance()
    held = [list(layer.weight.to_local().shape) for layer in model if layer.weight.to_local().numel()]
    model.unshard()
    found = []
    for layer, w in zip(model, whole, strict=True):
        spec = layer.recipe.fprop.b
        both = [(layer.weight, hb.quantize(w, spec))]
        both += [(layer.weight.transpose(0, 1), hb.quantize(w.T, spec))] if spec.is_tile else []
        for got, want in both:
            pairs = ((got.qdata, want.qdata), (got.linear_scale(), want.linear_scale()), (got.amax, want.amax))
            found.append(all(same(a, b) for a, b in pairs))
        if not spec.is_tile:
            continue
        turned = hb.quantize(w.T.contiguous(), spec)
        layer.weight.turn()
        found.append(same(layer.weight.turned.qdata, turned.qdata))
        found.append(same(layer.weight.turned.block_scale, turned.linear_scale().view(torch.uint8)))
    return {"equal": found, "quantized": quantized, "shapes": [list(w.shape) for w in whole], "held": held}


def columns_arrived(rank: int, world: int, sizes: list[tuple[int, int]], recipe: str) -> dict[str, list]:
    """Whether what dgrad multiplies by is the quantization of each whole w.T; and what travelled."""
    model = nn.Sequential(*(nn.Linear(cols, rows, bias=False) for rows, cols in sizes)).bfloat16()
    torch.manual_seed(1)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape) * torch.rand(len(param), 1).exp())
    model[0].weight.data[20, 7], model[1].weight.data[-1, -1] = torch.nan, -torch.inf
    model.to(ranks.device())
    hb.quantize_(model, recipe, keep=NOTHING_KEPT)
    whole = [layer.weight.detach().clone() for layer in model]
    fully_shard(model, reshard_after_forward=True)
    gather = hb.distributed.fsdp_gather_nvfp4_(model)
    found = []
    model.unshard()
    forward = gather.traffic["gathered"]
    gather.weights[0].arrival.need_backward()  # nobody said that a backward follows
    for layer, w in zip(model, whole, strict=True):
        got, spec = layer.weight.dgrad, layer.recipe.dgrad.b
        want = hb.quantize(w.T.contiguous(), spec)
        found.append(same(got.blocks.qdata, want.qdata.view(torch.uint8)) and got.spec == spec and got.cols == len(w))
        found.append(same(got.blocks.block_scale, want.linear_scale().view(torch.uint8)))
        found.append(want.amax is None or same(got.blocks.amax, want.amax))
    report = gather.report
    moved = forward == report.sent and gather.traffic["gathered"] == report.sent + report.backward_sent
    return {"equal": found, "moved": moved}


@contextmanager
def watched(shapes: list) -> Iterator[None]:
    """Note the shape of everything that is quantized."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asks = "" if "row_col" not in str(func) else args[1:3]  # specs; nothing is quantized where both are empty
            if "halfbyte.quantize" in str(func) and asks != ("", ""):
                shapes.extend(list(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


def cases(rank: int, world: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """What `compared` finds of some of fsdp_cases.CASES."""
    from fsdp_cases import CASES

    return {name: compared(CASES[name], rank, world) for name in names}


def launched(rank: int, world: int, layers: int) -> dict[str, Any]:
    """What the gathers of one wrapped module and its backward do on the device: torch's ops, and turns."""
    case = Case(make=lambda: nn.Sequential(*(nn.Linear(32 + 16 * (i % 2), 48 - 16 * (i % 2)) for i in range(layers))))
    model, _ = wrapped(case, world)
    gather = hb.distributed.fsdp_gather_nvfp4_(model)
    model.set_reshard_after_forward(True)  # of the root it is not the default
    model(batch(case, rank, 0, 0)).float().sum().backward()
    arrival = gather.weights[0].arrival
    assert all(weight.arrival is arrival for weight in gather.weights)
    found: dict[str, Any] = {}
    turns: list[int] = []
    inner = arrival._turner.transpose

    def turn() -> None:
        turns.append(len(arrival.weights))
        with _disable_current_modes():  # one launch where kernels run
            inner()

    arrival._turner.transpose = turn
    message = gather.weights[0].arrival.message(gather.weights[0])
    for phase in ("forward", "backward"):
        with noted_ops(found.setdefault(phase, [])):
            if phase == "forward":
                y = model(batch(case, rank, 0, 0))
                found["turned after forward"] = len(turns), arrival._turned.untyped_storage().size()
            else:
                y.float().sum().backward()
        found[phase] = [op for op in found[phase] if op.split(".")[0] not in (*VIEWS, *OF_FSDP2)]
    return found | {"turns": turns, "messages": len(message)}


VIEWS = ("view", "detach", "split_with_sizes", "narrow", "as_strided", "_record_function_enter_new")
OF_FSDP2 = (
    *("all_gather_copy_in", "_foreach_copy_", "_allgather_base_", "split_with_sizes_copy", "empty"),
    "_record_function_exit",
)
"""What a gather of FSDP2 takes, of values too, however many parameters there are."""


@contextmanager
def noted_ops(names: list) -> Iterator[None]:
    """Note every op that a gather of FSDP2 runs, by its name."""

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(frame.f_code.co_name in ("unshard", "wait_for_unshard", "turn") for frame in frames()):
                names.append(func.__name__.removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    with Note():
        yield


def frames() -> Iterator[Any]:
    """The frames of this thread, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def between(rank: int, world: int) -> dict[str, Any]:
    """What is held between forward and backward, and what a state dict holds then and at the end."""
    plain, _ = wrapped(Case(), world)
    model, state = wrapped(Case(), world)
    gather = hb.distributed.fsdp_gather_nvfp4_(model)
    loss = model(batch(Case(), rank, 0, 0)).float().square().mean()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    arrived = [weight.arrived for weight in gather.weights]
    after_forward = [t.untyped_storage().size() for w in arrived for t in (*w.blocks[:2], *w.turned[:2])]
    saved = model.state_dict()
    loss.backward()
    state.advance()
    ours, theirs = model.state_dict(), plain.state_dict()
    return {
        "after forward": after_forward,
        "sharded": all(isinstance(layer.weight, DTensor) for layer in layers),
        "keys": list(ours) == list(theirs) == list(saved),
        "values": all(same(ours[name].full_tensor(), t.full_tensor()) for name, t in theirs.items()),
        "types": {type(t).__name__ for t in (*ours.values(), *(t._local_tensor for t in ours.values()))},
        "attributes": [sorted(vars(t._local_tensor)) for t in ours.values()],
        "gathers": gather.traffic["gathers"],
    }


def compiled_whole(rank: int, world: int) -> list[int]:
    """Where torch.compile of the whole model differs from the same without the 4-bit gather."""
    seen = []
    for codes in (False, True):
        model, state = wrapped(Case(), world)
        if codes:
            hb.distributed.fsdp_gather_nvfp4_(model)
        torch._dynamo.reset()
        seen.append(train(Case(), rank, torch.compile(model, backend="eager"), state))
    return [i for i, (a, b) in enumerate(zip(*seen, strict=True)) if not same(a, b)]


def sent(rank: int, world: int, name: str, recipe: str) -> tuple[int, int]:
    """What one gather of a preset's decoder takes, and of all that its blocks hold."""
    chosen = treatment.treatment_of(recipe)
    model = models.Decoder(models.model_preset(name))
    hb.quantize_(model, chosen.recipe, keep=chosen.keep)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh_of(Case(), world), mp_policy=BF16)
    report = hb.distributed.fsdp_gather_nvfp4_(model).report
    return report.sent, sum(row.backward_sent for row in report.rows if row.name.startswith("layers."))


def ratios(rank: int, world: int, recipes: dict[str, Any]) -> dict[str, tuple[tuple[float, float], tuple[int, int]]]:
    """What a [256, 256] weight's gathers take of bf16; bytes that came in a step, and those that the report says."""
    found = {}
    for name, recipe in recipes.items():
        case = Case(make=lambda: nn.Sequential(nn.Linear(256, 256, bias=False)), recipe=recipe, shape=(4, 256))
        model, _ = wrapped(case, world)
        if reason_for_values(model) is not None:
            found[name] = (1.0, 1.0), (0, 0)
            continue
        gather = hb.distributed.fsdp_gather_nvfp4_(model)
        model(batch(case, rank, 0, 0).requires_grad_()).float().sum().backward()
        said = gather.report
        found[name] = (said.ratio, said.backward_ratio), (gather.traffic["gathered"], said.sent + said.backward_sent)
    return found


def disagreements(rank: int, world: int) -> list[str]:
    """What each rank is told where ranks are about to gather different things."""
    mesh, said = ranks.mesh(world), []

    def gather(width: int, recipe: str, dtype: torch.dtype | None) -> None:
        model = nn.Sequential(nn.Linear(32, width), nn.Linear(width, 32))
        hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(0))
        fully_shard(model, mesh=mesh)
        hb.distributed.fsdp_gather_nvfp4_(model, dtype=dtype)

    def exchange(tokens: int) -> None:
        hb.distributed.shard_embedding_(nn.Sequential(nn.Embedding(40, 8)), mesh, tokens=tokens)

    bf16 = torch.bfloat16
    calls = (
        lambda: gather(48 if rank else 64, "nvfp4", None),
        lambda: gather(64, "rl" if rank else "nvfp4", None),
        lambda: gather(64, "nvfp4", bf16 if rank else None),
        lambda: gather(64, "bf16" if rank else "nvfp4", None),
        lambda: exchange(4 if rank else 5),
    )
    for call in calls:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said
