"""A module of experts under the style ExpertParallel, and what travels between its ranks."""

from __future__ import annotations

import traceback
from collections import Counter
from functools import partial

import ranks
import torch
from expert_parallel_checks import same
from shared_experts import (
    HIDDEN,
    SIZES,
    Answers,
    Experts,
    K,
    given,
    given_to_all,
    limit,
    off,
    step,
    unlike,
    within,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte.distributed import journey


def shared(world: int, *readers: str, **options) -> nn.Module:
    mesh = ranks.mesh(world, names=("ep",))
    return parallelize_module(
        Experts(**options.pop("sizes", {})), mesh, hb.distributed.ExpertParallel(*readers, **options)
    )


def under_the_style(rank: int, world: int) -> list[str]:
    """Return what differs from one process with the tokens of all ranks, on this rank; all but dw by its own tokens."""
    found = []
    for context in ("plain", "autocast", "high precision", "bf16", "with bias"):
        sizes = {"biased": context == "with bias"}
        module, alone = shared(world, sizes=sizes), Experts(**sizes)
        *of_all, owners = given_to_all(world)
        if context == "bf16":
            hb.set_recipe_(module, "bf16"), hb.set_recipe_(alone, "bf16")
        with within(context, module):
            mine = step(module, *given(rank, world))
        with within(context, alone):
            want = step(alone, *of_all)
        want[:2] = [whole[owners == rank] for whole in want[:2]]
        names = ("y", "dx", *dict(module.named_parameters()))
        found += [f"{context}: {n}" for n, a, b in zip(names, mine, want, strict=True) if not alike(a, b, context)]
    return found


def alike(got: Tensor, want: Tensor, context: str = "") -> bool:
    """Return whether results are the same: bit for bit, but for the order of sums where kernels run."""
    return same(got, want) if ranks.device().type == "cpu" else off(got, want) <= limit(context)


def called_by_name(rank: int, world: int) -> list[str]:
    """Return which ways of handing a module its tokens by name differ from handing them by place."""
    x, dy, offsets = given(rank, world)
    want = step(shared(world), x, dy, offsets)
    found = {}
    ways = {"both": ("x", "offsets"), "ends alone": ("offsets",), "renamed": ("tokens", "ends")}
    ways |= {"named alone": ("x", "offsets"), "renamed and alone": ("hidden", "ends")}
    kinds = {"renamed": Renamed, "named alone": NamedAlone, "renamed and alone": RenamedAlone}
    for way, own in ways.items():
        module = kinds.get(way, Experts)()
        parallelize_module(module, ranks.mesh(world, names=("ep",)), hb.distributed.ExpertParallel())
        arguments = dict(zip(own, (x, offsets)[-len(own) :], strict=True))
        y = module(**arguments) if len(own) == 2 else module(x, **arguments)
        x.grad = None
        y.backward(dy)
        found[way] = [y.detach(), x.grad]
    return unlike(found, want)


class Renamed(Experts):
    """Experts whose forward calls its arguments otherwise."""

    def forward(self, tokens: Tensor, ends: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(tokens * scale, ends)


class NamedAlone(Experts):
    """Experts whose forward takes its arguments by name alone."""

    def forward(self, *, scale: float = 1.0, offsets: Tensor, x: Tensor) -> Tensor:
        return super().forward(x * scale, offsets)


class RenamedAlone(Experts):
    """Experts whose forward takes the ends by a name of its own alone."""

    def forward(self, hidden: Tensor, *, ends: Tensor) -> Tensor:
        return super().forward(hidden, ends)


def without_values(rank: int, world: int) -> list[tuple[int, ...]]:
    """Return shapes of what experts with a capacity return on meta, of which nobody reads an offset."""
    module = Experts()
    parallelize_module(module, ranks.mesh(world, names=("ep",)), hb.distributed.ExpertParallel(capacity=8))
    x, _, offsets = given(rank, world)
    with torch.no_grad():
        return [tuple(module.to("meta")(x.to("meta"), offsets.to("meta")).shape), tuple(x.shape)]


def in_other_ways(rank: int, world: int, compiled: bool) -> list[str]:
    """Recomputed and with room for all, or compiled: the same bits, whatever the tokens travel as."""
    found = []
    for dispatch in ("plain", "nvfp4"):
        x, dy, offsets = given(rank, world)
        module, roomy = (shared(world, "gate_up_proj", dispatch=dispatch, capacity=room) for room in (None, 64))
        want = step(module, x, dy, offsets)
        if compiled:
            runs = {"compiled": step(torch.compile(module, backend="aot_eager"), x, dy, offsets)}
        else:
            runs = {"recomputed": step(module, x, dy, offsets, recompute=True)}
            with torch.inference_mode():
                runs["inference"] = [module(x, offsets)]
            pairs = zip(step(roomy, x, dy, offsets), want, strict=True)
            found += [f"{dispatch} capacity: {i}" for i, (a, b) in enumerate(pairs) if not alike(a, b)]
        found += [f"{dispatch} {name}" for name in unlike(runs, want)]
    return found


def beyond_the_capacity(rank: int, world: int, dispatch: str) -> tuple[int, list[int]]:
    """Return how many tokens were dropped, and which rows of y are zeros; the others are as in a run without them."""
    room, capacity = 3, shared(world, "gate_up_proj", dispatch=dispatch, capacity=3)
    x, dy, offsets = given(rank, world)
    y = capacity(x, offsets)
    exchange = capacity.gate_up_proj.entry.exchange
    y.backward(dy)
    zeros = (~y.any(1)).nonzero().flatten().tolist()
    assert (~x.grad.any(1)).nonzero().flatten().tolist() == zeros
    sizes, kept = torch.tensor(SIZES[rank]), []
    for of_rank in sizes.view(world, -1):  # the first tokens for every rank's experts
        left = room
        for size in of_rank.tolist():
            kept.append(min(size, left))
            left -= kept[-1]
    rows = [
        i
        for start, count in zip((sizes.cumsum(0) - sizes).tolist(), kept, strict=True)
        for i in range(start, start + count)
    ]
    assert zeros == sorted(set(range(len(x))) - set(rows))
    ends = torch.tensor(kept, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    alone = shared(world, "gate_up_proj", dispatch=dispatch)(x.detach()[rows], ends.to(x.device))
    assert alike(y[rows].detach(), alone.detach())
    return int(exchange.dropped), zeros


class _Traffic(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found, self.stage = Counter(), ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            tensor = args[0]
            key = self.stage, func.__name__.partition(".")[0], str(tensor.dtype).removeprefix("torch.")
            self.found[key] += tensor.numel() * tensor.element_size()
        return func(*args, **kwargs or {})


def traffic(rank: int, world: int, dispatch: str, dim: int) -> dict:
    """Return the bytes that this rank gives away in forward and backward, by direction and dtype; in bf16."""
    module = shared(world, "gate_up_proj", dispatch=dispatch, sizes={"dim": dim})
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(96, dim, generator=generator).to(ranks.device(), torch.bfloat16).requires_grad_()
    module.bfloat16()
    offsets = torch.tensor([16, 40, 40, 96], dtype=torch.int32, device=x.device)
    watch = _Traffic()
    with watch:
        watch.stage = "forward"
        y = module(x, offsets)
        watch.stage = "backward"
        y.backward(torch.ones_like(y))
    return dict(watch.found)


def waits(rank: int, world: int, dispatch: str, capacity: int | None) -> int:
    """Return how often the host asked for a value of a tensor between the tokens and their experts, and back."""
    module = shared(world, "gate_up_proj", dispatch=dispatch, capacity=capacity)
    x, _, offsets = given(rank, world)
    asked, kept = [], {name: getattr(Tensor, name) for name in ("item", "tolist", "__bool__", "__int__", "nonzero")}

    def asking(name):
        def ask(self, *arguments):
            if not any("/reference/" in frame.filename for frame in traceback.extract_stack(limit=12)):
                asked.append(name)  # the specification of quantization may
            return kept[name](self, *arguments)

        return ask

    exchange = module.gate_up_proj.entry.exchange
    x = x.detach().requires_grad_()
    if x.is_cpu:  # what a GPU's device reports itself
        journey.check_received = lambda *arguments: None
    try:
        for name in kept:
            setattr(Tensor, name, asking(name))
        arrived = exchange.send(x, offsets)
        y = exchange.back(arrived.x * 2, arrived)
        y.backward(torch.ones_like(y))
    finally:
        for name, method in kept.items():
            setattr(Tensor, name, method)
    return len(asked)


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return what every misuse is answered with."""
    found = Answers()
    _ask_of_arguments(found.ask, world)
    _ask_of_ranks_that_differ(found.ask, rank, world)
    _ask_of_layers(found.ask, world)
    _ask_of_forwards(found.ask, world, *given(rank, world)[::2])
    return found


def _ask_of_arguments(ask, world: int) -> None:
    mesh = ranks.mesh(world, names=("ep",))
    share = hb.distributed.shard_experts_
    ask("no experts", lambda: share(nn.Linear(4, 4), mesh))
    ask("weights of another", lambda: share(nn.ModuleList([hb.nn.GroupedRecipe(4, 8, 8)]), mesh))
    ask("mesh of two", lambda: share(Experts(), ranks.mesh(1, world)))
    ask("few experts", lambda: share(Experts(experts=1), mesh))
    ask("other numbers", lambda: share(nn.ModuleList([Experts(), Experts(experts=2)]), mesh))
    ask("dispatch", lambda: share(Experts(), mesh, dispatch="fp8"))
    ask("capacity", lambda: share(Experts(), mesh, capacity=0))
    ask("type of capacity", lambda: share(Experts(), mesh, capacity=1.5))
    ask("reduce", lambda: share(Experts(), mesh, reduce="avg"))
    ask("nobody reads", lambda: share(Experts(), mesh, dispatch="nvfp4"))
    ask("reader", lambda: share(Experts(), mesh, "up_proj", dispatch="nvfp4"))
    strange = Experts(biased=True)
    strange.down_proj.bias = StrangeBias(strange.down_proj.bias.detach())
    ask("strange bias", lambda: share(strange, mesh))
    ask("mxfp8", lambda: share(Experts(recipe="mxfp8"), mesh, "gate_up_proj", dispatch="nvfp4"))
    weights_alone = hb.recipes.weight_only()
    ask("weight only", lambda: share(Experts(recipe=weights_alone), mesh, "gate_up_proj", dispatch="nvfp4"))


def _ask_of_ranks_that_differ(ask, rank: int, world: int) -> None:
    """Ask with one thing else on the last rank: it would train apart, or wait for bytes that never come."""
    last = rank == world - 1
    ask("other dispatch", lambda: shared(world, "gate_up_proj", dispatch="nvfp4" if last else "plain"))
    ask("other capacity", lambda: shared(world, capacity=8 if last else None))
    ask("other reduce", lambda: shared(world, reduce="mean" if last else "sum"))

    module = Experts()
    module.down_proj.recipe = "four_over_six" if last else "nvfp4"
    ask("other recipe", lambda: hb.distributed.shard_experts_(module, ranks.mesh(world, names=("ep",))))


def _ask_of_layers(ask, world: int) -> None:
    mesh = ranks.mesh(world, names=("ep",))
    share = hb.distributed.shard_experts_

    def changed(change, **options) -> Experts:
        module = Experts(**options)
        change(module)
        return module

    ask("shared twice", lambda: share(shared(world), mesh))
    sharded = changed(lambda m: fully_shard(m, mesh=mesh))
    ask("fsdp2 first", lambda: share(sharded, mesh))
    in_parts = Experts()
    in_parts.down_proj.weight = nn.Parameter(distribute_tensor(in_parts.down_proj.weight.detach(), mesh, [Shard(1)]))
    ask("tensor parallel", lambda: share(in_parts, mesh))
    ask(
        "tensor parallel after",
        lambda: parallelize_module(shared(world), mesh, {"gate_up_proj": hb.distributed.NVFP4Colwise()}),
    )
    cached = Experts()
    kept = hb.cache_weights(cached)
    ask("cached", lambda: share(cached, mesh))
    kept.release()
    ask("cached after", lambda: hb.cache_weights(shared(world)))
    ask(
        "main_grad",
        lambda: share(changed(lambda m: setattr(m.down_proj.weight, "main_grad", torch.zeros(4, K, HIDDEN))), mesh),
    )
    ask("tied", lambda: share(nn.ModuleList([first := Experts(), tied_to(first)]), mesh))
    ask("tied to another", lambda: share(nn.ModuleList([first := Experts(), Holder(first.down_proj.weight)]), mesh))
    module = Experts()
    both = nn.ModuleDict({"a": module, "b": module})  # one module under two names is no tie
    ask("two names", lambda: share(both, mesh))
    ask("zero", lambda: hb.distributed.ZeroOptimizer(shared(world), torch.optim.AdamW))


class StrangeBias(nn.Parameter):
    """A bias that is another library's."""


class Holder(nn.Module):
    """Something else that has a weight of experts."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.kept = weight


def tied_to(first: Experts) -> Experts:
    """Return experts that have a weight of others."""
    module = Experts()
    module.down_proj.weight = first.down_proj.weight
    return module


def _ask_of_forwards(ask, world: int, x: Tensor, offsets: Tensor) -> None:
    ask("offsets", lambda: shared(world)(x, offsets[:2]))
    ask("one argument", lambda: shared(world)(x))
    ask("integers", lambda: shared(world)(x.long(), offsets))
    ask("another name", lambda: shared(world)(x=x, ends=offsets))
    ask("not what arrived", lambda: changed_tokens(world, x, offsets))
    _ask_of_what_arrived(ask, world, x, offsets)
    mixed = shared(world, "gate_up_proj", dispatch="nvfp4")
    hb.set_recipe_(mixed, "mxfp8")
    ask("mxfp8 later", lambda: mixed(x, offsets))
    unlike = nn.ModuleDict({name: hb.nn.GroupedLinear(4, K, K, recipe="nvfp4") for name in ("gate", "up")})
    mesh = ranks.mesh(world, names=("ep",))
    exchange = hb.distributed.shard_experts_(unlike, mesh, "gate", "up", dispatch="nvfp4")
    unlike["up"].recipe = "four_over_six"
    ask("two recipes", lambda: exchange.send(x, offsets))
    ask("ends behind the tokens", lambda: shared(world)(x[:-1], offsets))
    late = shared(world)
    late.down_proj.weight.main_grad = torch.zeros(4, K, HIDDEN)
    ask("main_grad later", lambda: late(x, offsets))
    twice = shared(world)
    ask(
        "second derivative",
        lambda: torch.autograd.grad(
            torch.autograd.grad(twice(x, offsets).square().sum(), x, create_graph=True)[0].sum(), x
        ),
    )


def _ask_of_what_arrived(ask, world: int, x: Tensor, offsets: Tensor) -> None:
    """Ask a layer that reads codes for other tokens than those which the codes are of."""
    module = shared(world, "gate_up_proj", dispatch="nvfp4")
    reader, other = module.gate_up_proj, module.down_proj
    exchange = reader.entry.exchange
    with torch.no_grad():
        arrived = exchange.send(x, offsets)
        assert torch.equal(reader(arrived.x.view_as(arrived.x), arrived.offsets), reader(arrived.x, arrived.offsets))
        ask("a copy", lambda: reader(arrived.x.clone(), arrived.offsets))
        turned = arrived.x.as_strided(arrived.x.shape, (1, len(arrived.x)))
        ask("other strides", lambda: reader(turned, arrived.offsets))
        own = arrived.x[:, :HIDDEN].contiguous()
        ask("another layer", lambda: other(own, arrived.offsets))  # it reads no codes
        ask("other rows", lambda: exchange.back(arrived.x[:-1], arrived))
        arrived.x.mul_(2)
        ask("changed in place", lambda: reader(arrived.x, arrived.offsets))
        again = exchange.send(x, offsets)
        exchange.back(again.x, again)
        ask("on its way back", lambda: reader(again.x, again.offsets))


def wrong_on_one(rank: int, world: int) -> list[str]:
    """Return what is said where offsets of rank 1 alone are wrong."""
    x, _, offsets = given(rank, world)
    wrong = (offsets.flip(0), offsets + len(x), offsets[:2], offsets.float(), offsets.tolist())
    said = []
    for capacity in (None, 40):
        module = shared(world, capacity=capacity)
        for each in wrong:
            found = Answers()
            found.ask("it", partial(module, x, each if rank == 1 else offsets))
            said.append(found["it"])
    return said


def other_tokens_on_one(rank: int, world: int) -> list[str]:
    """Return what is said where rank 1 alone brings other tokens, or leaves out an argument."""
    x, _, offsets = given(rank, world)
    said = []
    for capacity in (None, 40):
        module = shared(world, capacity=capacity)
        changes = {"x": x.double()}, {"x": x.bfloat16()}, {"x": x[:, :-16]}, {"x": x.tolist()}
        for named in (*changes, {"x": None}, {"offsets": None}):
            found, both = Answers(), {"x": x, "offsets": offsets}
            arguments = {k: v for k, v in (both | named).items() if v is not None} if rank == 1 else both
            found.ask("it", partial(module, **arguments))
            said.append(found["it"])
    return said


def changed_tokens(world: int, x: Tensor, offsets: Tensor) -> None:
    class Scaled(Experts):
        def forward(self, x, offsets):
            return super().forward(x * 2, offsets)

    mesh = ranks.mesh(world, names=("ep",))
    style = hb.distributed.ExpertParallel("gate_up_proj", dispatch="nvfp4")
    parallelize_module(Scaled(), mesh, style)(x, offsets)


def unlike_neighbours(rank: int, world: int) -> str:
    """Return what a mesh is answered with whose ranks are no neighbours."""
    mesh = ranks.mesh(world // 2, 2, names=("ep", "dp"))
    try:
        hb.distributed.shard_experts_(Experts(), mesh["ep"])
    except ValueError as error:
        return str(error)
    return ""


def behind_a_rank_of_their_own(rank: int, world: int) -> str:
    """Return what neighbours are answered with of which the first has no multiple of their number."""
    mesh = DeviceMesh(ranks.device().type, list(range(1, world)), mesh_dim_names=("ep",))
    if rank == 0:
        return ""
    try:
        hb.distributed.shard_experts_(Experts(), mesh)
    except ValueError as error:
        return str(error)
    return "nothing"
