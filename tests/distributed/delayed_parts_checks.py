"""Layers that ranks share whose x and dy are quantized with amaxes of earlier steps, beside those of one process."""

from __future__ import annotations

import copy
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
from delayed_follower import NAMES, SEED, Follower
from tensor_parallel_checks import differing_operands, recorded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import halfbyte as hb
from halfbyte.distributed.tp_styles import _Entry
from halfbyte.state import FORWARDS_UNBEGUN

STEPS = 5
RECIPES = {
    "every2": hb.recipes.delayed_amax(every=2, margin=1.25),
    "every1": hb.recipes.delayed_amax(),
    "fresh": hb.recipes.delayed_amax(base=hb.recipes.nvfp4(hadamard=hb.Hadamard(size=32, signs="fresh"))),
    "quartet2": hb.recipes.delayed_amax(every=2, base="quartet2"),
    "mxfp8_bwd": hb.recipes.delayed_amax(base="nvfp4_mxfp8_bwd"),
}


class Case(NamedTuple):
    """One layer: M tokens, N out_features, K in_features."""

    recipe: str
    style: str
    sizes: tuple[int, int, int]
    sequences: int = 1


class Found(NamedTuple):
    """The operands of every step, its results, and the state in the end."""

    operands: list[list]
    results: list[list[Tensor]]
    state: dict


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return x and dy of a step, whose largest values lie now with one rank, now with another."""
    m, n, k = case.sizes
    g = torch.Generator().manual_seed(step)
    size = (1.0, 4.0, 0.3, 9.0, 2.0)[step]
    x, dy = torch.randn(m, k, generator=g) * size, torch.randn(m, n, generator=g) * size / 100
    for t in (x, dy):
        t.view(-1)[(step * 1013 + 7) % t.numel()] = 8 * size
    if case.sequences > 1:
        x, dy = (t.unflatten(0, (case.sequences, -1)) for t in (x, dy))
    return x, dy


def layer_of(case: Case) -> hb.nn.Linear:
    torch.manual_seed(1)
    _, n, k = case.sizes
    return hb.nn.Linear(k, n, recipe=RECIPES[case.recipe], state=hb.RunState(SEED, rank=0))


def trained(layer: hb.nn.Linear, case: Case, given) -> Found:
    """Run steps, the state written and read in the middle; `given` returns x and dy as the layer takes them."""
    found = Found([], [], {})
    for step in range(STEPS):
        if step == 3:
            layer.run_state.load_state_dict(copy.deepcopy(layer.run_state.state_dict()))
        layer.run_state.begin_step(layer)
        x, backward = given(*batch(case, step))
        with recorded() as operands:
            y = layer(x)
            backward(y)
        layer.run_state.advance()
        found.operands.append(operands)
        found.results.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
        layer.zero_grad()
    return found._replace(state=layer.run_state.state_dict())


def whole(case: Case) -> Found:
    return trained(layer_of(case), case, lambda x, dy: (x.requires_grad_(), lambda y: y.backward(dy)))


def share_(layer: hb.nn.Linear, case: Case, mesh) -> Placement:
    """Let ranks share a layer, in place; return how its x lies."""
    of_sequence = int(case.sequences > 1)
    of_x, of_w, of_bias = {
        "colwise": (Replicate(), Shard(0), Shard(0)),
        "rowwise": (Shard(1), Shard(1), Replicate()),
        "tokens": (Shard(0), Replicate(), Replicate()),
        "x in codes": (Shard(of_sequence), Shard(0), Shard(0)),
        "dy in codes": (Shard(1 + of_sequence), Shard(1), Replicate()),
    }[case.style]
    for name, place in (("weight", of_w), ("bias", of_bias)):
        data = distribute_tensor(getattr(layer, name).detach(), mesh, [place], src_data_rank=None)
        setattr(layer, name, nn.Parameter(data))
    if case.style == "x in codes":
        layer.entry = _Entry(mesh, of_sequence, None, False)
    if case.style == "dy in codes":
        layer.entry = _Entry(mesh, -1, of_sequence, False)
    return of_x


def in_parts(case: Case, mesh) -> Found:
    """The same on the ranks of a mesh: operands of this rank, results whole."""
    layer = layer_of(case)
    of_x = share_(layer, case, mesh)

    def given(x: Tensor, dy: Tensor):
        def backward(y) -> None:
            (place,) = y.placements
            y.backward(distribute_tensor(dy, mesh, [Replicate() if place.is_partial() else place], src_data_rank=None))

        return distribute_tensor(x, mesh, [of_x], src_data_rank=None).requires_grad_(), backward

    found = trained(layer, case, given)
    return found._replace(results=[[t.full_tensor() for t in results] for results in found.results])


def followed(case: Case) -> list[list[float]]:
    """Return what is held in the end, operand by operand, by the definition."""
    follower = Follower(RECIPES[case.recipe])
    for step in range(STEPS):
        follower.begin()
        x, dy = (t.flatten(0, -2) for t in batch(case, step))
        for name, t in zip(NAMES, (x, x.T.contiguous(), dy, dy.T.contiguous()), strict=True):
            follower.note(name, t.numpy(), step)
    return [float(follower.held[name]) for name in NAMES]


def differing(case: Case, alone: Found, every: list[Found]) -> list[str]:
    """Return what of the parts of all ranks is not what one process has, and what of that is not the definition's."""
    found = []
    for step, operands in enumerate(alone.operands):
        lines = differing_operands(operands, [made.operands[step] for made in every])
        found += [f"{case}, step {step}: {line}" for line in lines]
        for name, ours, theirs in zip(
            ("y", "dx", "dw", "db"), every[0].results[step], alone.results[step], strict=True
        ):
            error = (ours - theirs).norm() / theirs.norm()
            found += [] if error <= 1e-5 else [f"{case}, step {step}: {name} is off by {float(error):.2g}"]
    found += [f"{case}: rank {i} has another state" for i, one in enumerate(every) if one.state != alone.state]
    (numbers,) = alone.state["amaxes"].values()
    held = followed(case)
    found += [] if numbers["held"] == held else [f"{case}: {numbers['held']} are held, {held} by definition"]
    return found


def noted(rank: int, world: int) -> dict[str, list]:
    """Return what calls of several kinds have noted, operand by operand; x lies in parts by features."""
    mesh, case = init_device_mesh("cpu", (world,)), Case("every1", "rowwise", (32, 64, 96))
    x = batch(case, 0)[0]
    x[3, 95] = 70.1  # of the last rank; 70 in bf16
    found = {}
    for kind in ("plain", "autocast", "without gradients", "eval", "frozen"):
        layer = layer_of(case)
        place = share_(layer, case, mesh)
        layer.weight.requires_grad_(kind != "frozen")
        layer.train(kind != "eval")
        layer.run_state.begin_step(layer)
        given = distribute_tensor(x, mesh, [place], src_data_rank=None).requires_grad_()
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
        with autocast, torch.set_grad_enabled(kind != "without gradients"):
            y = layer(given)
        if y.requires_grad:
            y.full_tensor().sum().backward()
        found[kind] = [float(one) for one in layer.amaxes.seen]
    unbegun = layer_of(case)
    place = share_(unbegun, case, mesh)
    unbegun.run_state._unbegun = FORWARDS_UNBEGUN  # as after so many
    try:
        unbegun(distribute_tensor(x, mesh, [place], src_data_rank=None))
    except ValueError as error:
        found["unbegun"] = [str(error)]
    return found


def operands(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Return what differs in all cases, on rank 0."""
    warnings.simplefilter("ignore", UserWarning)  # of borders that cut blocks
    mesh = init_device_mesh("cpu", (world,))
    mine = [in_parts(case, mesh) for case in cases]
    alone = [whole(case) for case in cases]  # on every rank, since a step of one begins with those of all
    every = [None] * world
    dist.all_gather_object(every, mine)
    if rank:
        return []
    return [line for i, case in enumerate(cases) for line in differing(case, alone[i], [made[i] for made in every])]
