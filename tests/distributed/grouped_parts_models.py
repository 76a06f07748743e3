"""A module of experts under GroupedColwise and GroupedRowwise, beside one process; and what they refuse."""

from __future__ import annotations

import tempfile
import warnings

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_parallel_checks import same
from shared_experts import HIDDEN, Answers, Experts, K, given, given_to_all, limit, off, step, unlike, within
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import halfbyte as hb

COLWISE, ROWWISE = hb.distributed.GroupedColwise, hb.distributed.GroupedRowwise


def plan() -> dict:
    return {"gate_up_proj": COLWISE(sections=2), "down_proj": ROWWISE()}


def shared(world: int, **options) -> nn.Module:
    mesh = ranks.mesh(world, names=("tp",))
    return parallelize_module(Experts(**options), mesh, plan())


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens that every rank has."""
    return given(0, 1, dtype)


def under_the_styles(rank: int, world: int) -> list[str]:
    """Return what differs from one process by more than the order of sums moves; codes at a tie may be among it."""
    found = []
    for context in ("plain", "autocast", "high precision", "bf16", "with bias", "odd"):
        options = {"biased": context == "with bias", "hidden": 21 if context == "odd" else HIDDEN}
        module, alone = shared(world, **options), Experts(**options)
        if context == "bf16":
            hb.set_recipe_(module, "bf16"), hb.set_recipe_(alone, "bf16")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of borders that cut blocks
            with within(context, module):
                mine = step(module, *inputs())
            with within(context, alone):
                want = step(alone, *inputs())
        names = ("y", "dx", *dict(module.named_parameters()))
        pairs = {n: off(a, b) for n, a, b in zip(names, mine, want, strict=True)}
        found += [f"{context}: {n} {error}" for n, error in pairs.items() if not error <= limit(context)]
    return found


def in_other_ways(rank: int, world: int, compiled: bool) -> list[str]:
    """Recomputed, under inference, after a checkpoint; or compiled: the same bits."""
    module = shared(world)
    want = step(module, *inputs())
    if compiled:
        runs = {"compiled": step(torch.compile(module, backend="aot_eager"), *inputs())}
    else:
        runs = {"recomputed": step(module, *inputs(), recompute=True), "loaded": step(loaded(module, world), *inputs())}
        with torch.inference_mode():
            x, _, offsets = inputs()
            runs["inference"] = [module(x, offsets)]
    return unlike(runs, want)


def loaded(module: nn.Module, world: int) -> nn.Module:
    """Return another module on the same ranks, with what a checkpoint of this one holds."""
    other = shared(world)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(module.state_dict(), checkpoint_id=folder[0])
    whole = Experts().state_dict()
    assert {name: p.shape for name, p in module.state_dict().items()} == {name: p.shape for name, p in whole.items()}
    alone = {name: torch.zeros_like(p) for name, p in whole.items()}
    dcp.load(alone, checkpoint_id=folder[0])
    assert all(same(alone[name], p) for name, p in whole.items()), "one process reads what it would have written"
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    return other


def under_both_styles(rank: int, world: int) -> list[str]:
    """Return in what 2 x 2 ranks differ from one process with all tokens, by more than the order of sums moves."""
    mesh = ranks.mesh(2, world // 2, names=("ep", "tp"))
    tokens = given(mesh.get_local_rank("ep"), 2)
    style = hb.distributed.ExpertParallel("gate_up_proj", reduce="mean")
    module = parallelize_module(parallelize_module(Experts(biased=True), mesh["tp"], plan()), mesh, style)
    assert module.down_proj.weight.to_local().shape == (2, K, HIDDEN // 2)
    mine = step(module, *tokens)
    *of_all, owners = given_to_all(2)
    y, dx, *grads = step(Experts(biased=True), *of_all)
    here = owners == mesh.get_local_rank("ep")
    want = [y[here], dx[here], *[grad / 2 for grad in grads]]
    names = ("y", "dx", *dict(module.named_parameters()))
    return [f"{n}: {off(a, b)}" for n, a, b in zip(names, mine, want, strict=True) if off(a, b) > 1e-2]


def whose_values(rank: int, world: int) -> dict[str, tuple]:
    """Return which values a rank has of weights that were other ones on every rank, and which of them are trained."""
    found = {}
    for over in ("tp", "ep"):
        sizes = (1, world) if over == "tp" else (world, 1)
        mesh = ranks.mesh(*sizes, names=("ep", "tp"))
        for source in (0, None):
            module = Experts()
            module.down_proj.weight.requires_grad_(False)
            with torch.no_grad():
                for p in module.parameters():
                    p.fill_(rank + 1)
            parallelize_module(module, mesh["tp"], plan(), src_data_rank=source)
            if over == "ep":
                parallelize_module(module, mesh, hb.distributed.ExpertParallel(), src_data_rank=source)
            local: list = [p.to_local() for p in module.parameters()]
            found[f"{over} of {source}"] = [t.unique().tolist() for t in local], [t.requires_grad for t in local]
    return found


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return what every misuse is answered with."""
    found = Answers()
    mesh = ranks.mesh(world, names=("tp",))
    _ask_when_wrapping(found.ask, mesh)
    _ask_with_experts_shared(found.ask, mesh)
    _ask_in_forwards(found.ask, world)
    return found


def _ask_when_wrapping(ask, mesh) -> None:
    def wrapped(style, change=lambda m: None, layer="gate_up_proj", on=mesh, **options) -> None:
        module = Experts(**options)
        change(module)
        parallelize_module(module, on, {layer: style})

    ask("sections of a type", lambda: COLWISE(sections=2.0))
    ask("sections", lambda: COLWISE(sections=0))
    ask("linear", lambda: parallelize_module(nn.Linear(4, 4), mesh, COLWISE()))
    ask("odd sections", lambda: wrapped(COLWISE(sections=3)))
    ask("few features", lambda: wrapped(ROWWISE(), layer="down_proj", hidden=1))
    ask("mesh of two", lambda: COLWISE()._apply(Experts().down_proj, ranks.mesh(1, mesh.size())))
    ask("shared twice", lambda: parallelize_module(shared(mesh.size()), mesh, {"down_proj": ROWWISE()}))
    ask("fsdp2 first", lambda: wrapped(COLWISE(), lambda m: fully_shard(m, mesh=mesh)))
    ask("cached", lambda: wrapped(COLWISE(), hb.cache_weights))
    ask("cached after", lambda: hb.cache_weights(shared(mesh.size())))
    delayed = hb.recipes.delayed_amax()
    ask("delayed amaxes", lambda: wrapped(COLWISE(), lambda m: hb.set_recipe_(m, delayed, state=hb.RunState(0))))
    ask("main_grad", lambda: wrapped(COLWISE(), lambda m: setattr(m.gate_up_proj.weight, "main_grad", torch.zeros(()))))
    ask("observed", lambda: hb.collect_stats(shared(mesh.size())))
    ask("zero", lambda: hb.distributed.ZeroOptimizer(shared(mesh.size()), torch.optim.AdamW))


def _ask_with_experts_shared(ask, mesh) -> None:
    share, world = hb.distributed.shard_experts_, mesh.size()
    both = ranks.mesh(1, world, names=("ep", "tp"))
    ask("experts over the same ranks", lambda: share(shared(world), mesh))
    ask("experts that are whole", lambda: share(Experts(), both))
    half = parallelize_module(Experts(), mesh, {"down_proj": ROWWISE()})
    ask("one layer whole", lambda: share(half, both))
    ask("rows of codes", lambda: share(shared(world), both, "down_proj", dispatch="nvfp4"))
    spread = parallelize_module(Experts(), mesh, hb.distributed.ExpertParallel())
    ask("after experts", lambda: parallelize_module(spread, mesh, {"down_proj": ROWWISE()}))


def _ask_in_forwards(ask, world: int) -> None:
    x, _, offsets = inputs()
    ask("x in parts", lambda: shared(world).gate_up_proj(x[:, :-1], offsets))
    ask("x whole", lambda: shared(world).down_proj(x[:, :HIDDEN], offsets))
    layer = shared(world).gate_up_proj
    ask("a DTensor", lambda: layer(DTensor.from_local(x, layer.weight.device_mesh), offsets))
    late = shared(world)
    late.down_proj.weight.main_grad = torch.zeros(())
    ask("main_grad later", lambda: late(x, offsets))
    grads = torch.autograd.grad
    ask("second derivative", lambda: grads(grads(shared(world)(x, offsets).sum(), x, create_graph=True)[0].sum(), x))
