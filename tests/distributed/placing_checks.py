"""What ranks check about their random bits; every function runs on every rank."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import small_models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import halfbyte as hb
from halfbyte.distributed import ZeroOptimizer, place_ranks_

TIMEOUT = timedelta(seconds=20)
FRESH = hb.recipes.nvfp4(hadamard=hb.Hadamard(size=16, signs="fresh"))
CPU = torch.device("cpu")


def build(state: hb.RunState | None = None, width: int = 16, recipe=FRESH) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 16))
    hb.quantize_(model, recipe, keep=small_models.NOTHING_KEPT, state=hb.RunState(3) if state is None else state)
    return model


def state_of(model: nn.Module) -> hb.RunState:
    return model[0].run_state


def gathered(value, group=None) -> list:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def bases(state: hb.RunState) -> tuple[list[int], list[int]]:
    place = state.philox(0)
    return place.on(CPU).base.tolist(), place.signs_on(CPU).base.tolist()


def is_on(state: hb.RunState, seed: int, rank: int) -> bool:
    """Whether bits have the key of the rank and signs that of the run."""
    bits, signs = bases(state)
    return (bits[0] - seed) % 2**64 == rank * 2**48 and signs[0] == seed and state.is_placed and state.rank == rank


def four_ranks(rank: int, world: int) -> None:
    groups_and_meshes(rank)
    differing_runs(rank)
    warnings_of_forgotten_ranks(rank)
    optimizers(rank)
    another_world_size(rank)


def groups_and_meshes(rank: int) -> None:
    """Who sees other data draws other bits; who holds a part of the same tensor draws the same."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    two = {
        names: init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for names in (("dp", "tp"), ("dp", "etp"), ("dp_replicate", "dp_shard"), ("dp", "cp"), ("pp", "dp"))
    }
    unnamed = init_device_mesh("cpu", (2, 2))
    for where, dims, expected in (
        (None, None, rank),
        (pair, None, rank % 2),
        (two["dp", "tp"], None, rank // 2),
        (two["dp", "etp"], None, rank // 2),
        (two["dp", "tp"]["dp"], None, rank // 2),
        (two["dp", "tp"]["tp"], None, 0),
        (two["dp_replicate", "dp_shard"], None, rank),
        (two["dp_replicate", "dp_shard"], ("dp_shard",), rank % 2),
        (two["dp_replicate", "dp_shard"], (1, "dp_replicate"), rank),
        (two["dp", "cp"], None, rank),
        (two["dp", "cp"], (), 0),
        (unnamed, (0,), rank // 2),
        (init_device_mesh("cpu", (4,)), None, rank),
        (init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_replicate", "dp_shard")), None, rank),
    ):
        model = build()
        assert place_ranks_(model, where, dims=dims, timeout=TIMEOUT) == expected, (where, dims)
        assert is_on(state_of(model), 3, expected), (where, dims)
    stage = nn.Sequential(*(build()[0] for _ in range(1 + rank // 2)))  # its layers are others
    assert place_ranks_(stage, two["pp", "dp"]) == rank and is_on(state_of(stage), 3, rank)
    state = hb.RunState(8)
    assert place_ranks_(nn.parallel.DistributedDataParallel(build(state))) == rank == place_ranks_(state)
    for where, dims, error, words in (
        (unnamed, None, ValueError, "2 dimensions without names.*dims="),
        (two["dp", "tp"], ("fsdp",), ValueError, "'fsdp' is no dimension of the mesh; use some of 'dp', 'tp', 0, 1"),
        (two["dp", "tp"], (True,), ValueError, "True is no dimension"),
        (two["dp", "tp"], "dp", TypeError, "dims='dp': give a tuple"),
        (pair, ("dp",), ValueError, "give the DeviceMesh"),
        (4, None, TypeError, "ranks=4: give a process group, a DeviceMesh"),
        ([dist.new_group([0, 1]), dist.new_group([2, 3])][1 - rank // 2], None, ValueError, "not in the group"),
    ):
        with pytest.raises(error, match=words):
            place_ranks_(build(), where, dims=dims)


def differing_runs(rank: int) -> None:
    """Whatever differs on one rank is named on every rank, and nobody is placed."""

    def advanced(times: int) -> hb.RunState:
        state = hb.RunState(3)
        for _ in range(times):
            state.advance()
        return state

    is_odd = rank == 2
    for make, words in (
        (lambda: build(hb.RunState(3 + is_odd)), "differ in seed: 3 on rank 0, 4 on rank 2; use one"),
        (lambda: build(advanced(is_odd)), "differ in position: 0 on rank 0, 1 on rank 2; load the same checkpoint"),
        (lambda: build()[: 3 - is_odd], None),  # the same RunState, whoever holds its layers
        (lambda: nn.Sequential(*build(), *(build() if is_odd else ())), "their number: 1 on rank 0, 2 on rank 2"),
        (lambda: nn.Linear(2, 2) if is_odd else build(), "^rank 2: model=Linear: no layer has a RunState; call hb.qu"),
        (lambda: hb.nn.Linear(16, 16) if is_odd else build()[0], "differ in seed: 3 on rank 0, none given on rank 2"),
    ):
        model = make()
        if words is None:
            place_ranks_(model)
            continue
        with pytest.raises(ValueError, match=words):
            place_ranks_(model, timeout=TIMEOUT)
        states = [layer.run_state for layer in model.modules() if isinstance(layer, hb.nn.Linear)]
        assert not any(state.is_placed or state.rank for state in states)
    state = hb.RunState(3)
    state.reserve_streams(256 * (1 + is_odd))
    with pytest.raises(ValueError, match="differ in streams: 256 on rank 0, 512 on rank 2; convert"):
        place_ranks_(state)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"ranks \[0, 2, 3\] did not make the same call within 0.2 s"):
            place_ranks_(build(), timeout=timedelta(seconds=0.2))
    dist.barrier()
    torch.manual_seed(rank)  # and so layers that make their own RunState have other seeds
    layer = hb.nn.Linear(16, 16)
    own = layer.run_state.seed
    assert place_ranks_(layer) == rank
    seeds = gathered(own)
    assert len(set(seeds)) == 4 and is_on(layer.run_state, seeds[0], rank) and layer.run_state.seed == seeds[0]


def forward(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 16)).sum()


def caught(function) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in found]


def warnings_of_forgotten_ranks(rank: int) -> None:
    """One warning, where bits are drawn in training and nobody said on which rank."""

    def train(model: nn.Module, steps: int = 3) -> list[str]:
        def run():
            for _ in range(steps):
                forward(model).backward()
                state_of(model).advance()

        return caught(run)

    forgotten = build()
    words = train(forgotten)
    assert len(words) == 1 and "4 processes" in words[0] and "hb.distributed.place_ranks_(model)" in words[0]
    assert not train(forgotten)
    for explicit in (0, rank):
        assert not train(build(hb.RunState(3, rank=explicit)))
    placed = build()
    place_ranks_(placed)
    assert not train(placed)
    assert not train(build(recipe=hb.recipes.mxfp8()))  # draws nothing
    idle = build()
    with torch.no_grad():
        assert not caught(lambda: forward(idle))
    assert not caught(lambda: forward(idle.eval()))
    stuck = build()  # whose position nobody moves
    assert len(caught(lambda: [forward(stuck) for _ in range(3)])) == 1
    unseen = build()  # compiled code warns of nothing, and its steps do
    assert len(caught(state_of(unseen).advance)) == 1 and not caught(state_of(unseen).advance)


def optimizers(rank: int) -> None:
    """ZeroOptimizer places what nobody placed, in its group, and refuses ranks that draw alike."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = build()
    ZeroOptimizer(model)
    assert is_on(state_of(model), 3, rank)
    model = build()
    ZeroOptimizer(model, group=pair)
    assert is_on(state_of(model), 3, rank % 2)
    model = build(hb.RunState(3, rank=10 * rank))  # somebody knows better
    ZeroOptimizer(model)
    assert is_on(state_of(model), 3, 10 * rank)
    with pytest.raises(ValueError, match="^RunState: rank=7 on ranks 0 and 2, which see other data"):
        ZeroOptimizer(build(hb.RunState(3, rank=(7, 1, 7, 2)[rank])))
    with pytest.raises(ValueError, match="^RunState: ranks differ in seed: 0 on rank 0, 1 on rank 1"):
        ZeroOptimizer(build(hb.RunState(rank)))
    torch.manual_seed(rank)
    layer = hb.nn.Linear(16, 16)
    ZeroOptimizer(layer)
    assert is_on(layer.run_state, gathered(layer.run_state.seed)[0], rank)


def gradients(model: nn.Module, data: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(data).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def step_of(model: nn.Module, grads: list[Tensor]) -> None:
    with torch.no_grad():
        for param, grad in zip(model.parameters(), grads, strict=True):
            param -= 0.1 * grad


def run_alone(state: dict, weights: dict, world: int, steps: range) -> nn.Module:
    """What so many ranks train, in one process: each micro-batch with the bits of its rank."""
    model = build(hb.RunState(0))
    model.load_state_dict(weights)
    for step in steps:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(world):
            state_of(model).set_rank(rank).load_state_dict({**state, "position": step})
            for total, grad in zip(sums, gradients(model, batch(rank, step)), strict=True):
                total += grad
        step_of(model, [total / world for total in sums])
    return model


def another_world_size(rank: int) -> None:
    """DDP trains as one process that takes the ranks in turn; fewer ranks go on from the checkpoint of one."""
    pair = dist.new_group([0, 1])
    model = build()
    start, state = {name: p.clone() for name, p in model.state_dict().items()}, state_of(model).state_dict()

    def train(model: nn.Module, group, steps: range) -> None:
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
        place_ranks_(wrapped, group)
        for step in steps:
            step_of(model, gradients(wrapped, batch(rank, step)))
            state_of(model).advance()

    def same(a: nn.Module, b: nn.Module) -> bool:
        pairs = zip(a.parameters(), b.parameters(), strict=True)
        return all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in pairs)

    sharded = build()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (4,)))
    place_ranks_(sharded)
    gradients(sharded, batch(rank, 0))
    grads = [param.grad.full_tensor() for param in sharded.parameters()]
    train(model, None, range(1))
    for name, grad in zip(start, grads, strict=True):  # FSDP2 has the mean gradient that DDP stepped by
        assert torch.allclose(start[name] - 0.1 * grad, model.state_dict()[name], rtol=1e-5, atol=1e-7), name
    train(model, None, range(1, 2))
    alone = run_alone(state, start, 4, range(2))
    assert same(model, alone)
    saved = gathered([model.state_dict(), state_of(model).state_dict()])[3]  # whosever it is
    assert all(other[1] == saved[1] for other in gathered([None, state_of(model).state_dict()]))
    if rank < 2:
        resumed = build(hb.RunState(99))
        resumed.load_state_dict(saved[0])
        state_of(resumed).load_state_dict(saved[1])
        train(resumed, pair, range(2, 4))
        assert is_on(state_of(resumed), 3, rank)
        assert same(resumed, run_alone(state, saved[0], 2, range(2, 4)))
    resumed = build(hb.RunState(99))  # the same rank of as many: not a bit differs
    place_ranks_(resumed)
    resumed.load_state_dict(saved[0])
    state_of(resumed).load_state_dict(saved[1])
    one, other = (gradients(m, batch(rank, 2)) for m in (model, resumed))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    dist.barrier()


DRAWS = 24
KINDS = ("equal", "one-signed", "independent")


def weight_gradients(rank: int, world: int) -> dict[tuple[str, bool], Tensor]:
    """Return float [DRAWS, 256], the weight gradient at successive positions, by data and whether ranks are told."""
    results = {}
    for kind in KINDS:
        generator = torch.Generator().manual_seed(0 if kind == "equal" else 1 + rank)
        x, dy = torch.randn(2, 32, 16, generator=generator)
        if kind == "one-signed":
            x, dy = x.abs(), dy.abs()
        for told in (True, False):
            torch.manual_seed(0)
            state = hb.RunState(5)
            layer = hb.nn.Linear(16, 16, bias=False, recipe=hb.recipes.nvfp4(hadamard=None), state=state)
            if told:
                place_ranks_(layer)
            else:
                state.set_rank(0)  # what all of them are if nobody says
            drawn = []
            for _ in range(DRAWS):
                layer.weight.grad = None
                layer(x).backward(dy)
                state.advance()
                drawn.append(layer.weight.grad.flatten())
            results[kind, told] = torch.stack(drawn).numpy()
    return results
