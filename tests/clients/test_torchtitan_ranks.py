"""Expert and context parallelism of torchtitan 0.3.0 on two gloo ranks: what experts and layers compute there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_gather_tensor_autograd

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import test_torchtitan as alone
from test_torchtitan import _one_process, ours, runs  # noqa: F401

import halfbyte as hb
from halfbyte.policy import plain_name

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
PARTS = "x", "y", "dy", "dx", "w", "dw"


def watched(calls: dict, function):
    """Note what the first call of every product or layer is given and returns, and the gradients of both."""

    def forward(self, x, *others):
        x = x.view_as(x)
        weight = others[0].view_as(others[0]) if others else None
        y = function(self, x, *((weight, *others[1:]) if others else ()))
        name = plain_name(self.title.split("(")[0])
        if name in calls:  # what is recomputed
            return y
        seen = calls[name] = {"layer": self, "x": x.detach().clone(), "y": y.detach().clone()}
        seen["place"], seen["others"] = self.peek(0, x.device), others[1:]
        seen["w"] = (self.weight if weight is None else weight).detach().clone()
        y.register_hook(lambda g: seen.update(dy=g.clone()))
        if x.requires_grad:
            x.register_hook(lambda g: seen.update(dx=g.clone()))
        if weight is not None:
            weight.register_hook(lambda g: seen.update(dw=g.clone()))
        return y

    return forward


def train(config, recipe: str, folder: str, watch, **options):
    """Train a step with unclipped gradients; return the trainer, its losses and what a class's calls had."""
    config.dump_folder, config.training.max_norm, config.training.disable_cuda_graphs = folder, 1e9, True
    config.parallelism.spmd_backend = "partial_dtensor"
    calls, forward = {}, watch.forward
    watch.forward = watched(calls, forward)
    try:
        trainer, losses = runs.run(ours.quantize_config_(config, recipe, **options), weights=True)
    finally:
        watch.forward = forward
    return trainer, losses, calls


def experts(world: int, folder: str, recipe: str):
    """Train experts alone in a recipe, four sequences over all ranks; return the losses, the place and each product."""
    config = alone.moe(steps=1)
    config.parallelism.expert_parallel_degree = world
    config.training.local_batch_size, config.training.global_batch_size = 4 // world, 4
    with torch.backends.mkldnn.flags(enabled=False):  # whose products of a row depend on the number of rows, with AMX
        trainer, losses, calls = train(config, "bf16", folder, ours._Products, rules={"*.inner_experts": recipe})
    found = {}
    for name, seen in calls.items():
        x, w = seen["x"].clone().requires_grad_(), seen["w"].clone().requires_grad_()
        y = hb.functional.grouped_linear(x, w, *seen["others"], recipe, rng=seen["place"])
        y.backward(seen["dy"])
        assert torch.equal(y, seen["y"]) and torch.equal(x.grad, seen["dx"]) and torch.equal(w.grad, seen["dw"]), name
        end = int(seen["others"][0][-1])  # rows behind it are padding of whoever dispatched
        kept = {part: seen[part][:end] if part in PARTS[:4] else seen[part] for part in PARTS}
        found[name] = {part: tensor.float().numpy() for part, tensor in kept.items()}
    return losses, trainer.checkpointer.run_state.rank, found


def experts_on_a_rank(rank: int, world: int, folder: str, recipe: str):
    runs.alone(rank, world)
    return experts(world, folder, recipe)


@pytest.mark.parametrize("recipe", ["naive_fp4", "nvfp4"])
def test_expert_parallel_ranks_have_the_operands_of_one_process(tmp_path, recipe):
    """Where nothing is drawn every operand, result and gradient; else all but the gradients that draw by rank."""
    left, right = ranks.run(2, experts_on_a_rank, str(tmp_path), recipe, seconds=200)
    losses, _, whole = experts(1, str(tmp_path), recipe)
    assert [left[1], right[1]] == [0, 1] and left[0] == right[0] == losses
    assert len(whole) == len(left[2]) == len(right[2]) == 3
    parts = PARTS if recipe == "naive_fp4" else ("x", "w")
    for name, tensors in whole.items():
        for part in parts:
            both = [torch.from_numpy(side[2][name][part]) for side in (left, right)]
            assert min(map(len, both)) and torch.equal(torch.cat(both), torch.from_numpy(tensors[part])), (name, part)


def whole_context(modules, mesh) -> None:
    """What stands in for torchtitan's attention under context parallelism, which is written for GPUs' kernels alone."""

    def forward(q, k, v, **options):
        length, rank = q.shape[1], mesh.get_local_rank()
        k, v = (all_gather_tensor_autograd(t.contiguous(), 1, mesh.get_group()) for t in (k, v))
        seen = torch.ones(length, k.shape[1], dtype=torch.bool).tril(rank * length)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    for module in modules:
        module.forward = forward


def context_on_a_rank(rank: int, world: int, folder: str, recipe: str):
    """Train a step, each rank half of every sequence; return the losses, the place, and which gradients were met."""
    from torchtitan.models.llama3 import parallelize

    runs.alone(rank, world)
    parallelize.apply_cp_to_forward = whole_context
    config = alone.short(layers=1, steps=1)
    config.parallelism.context_parallel_degree, config.parallelism.context_parallel_load_balancer = world, None
    config.training.global_batch_size = 2
    trainer, losses, calls = train(config, recipe, folder, ours.RecipeLinear, keep=hb.Keep(last_fraction=0))
    met = {}
    for name, seen in calls.items():
        x, w = seen["x"].clone().requires_grad_(), seen["w"].clone().requires_grad_()
        group = [plain_name(m.title.split("(")[0]) for m in seen["layer"].amax_group or (seen["layer"],)]
        amax = torch.stack([calls[member]["w"].abs().max() for member in group]).amax().float()
        y = hb.linear(x, w, None, recipe, rng=seen["place"], weight_amax=amax)
        y.backward(seen["dy"])
        total = w.grad.float()
        dist.all_reduce(total)
        met[name] = (
            tuple(x.shape[:2]),
            torch.equal(y, seen["y"]),
            "dx" not in seen or torch.equal(x.grad, seen["dx"]),
            torch.equal(total, seen["layer"].weight.grad.full_tensor()),
        )
    return losses, trainer.checkpointer.run_state.rank, met


def test_context_parallel_ranks_quantize_their_own_tokens(tmp_path):
    left, right = ranks.run(2, context_on_a_rank, str(tmp_path), "nvfp4", seconds=200)
    assert [left[1], right[1]] == [0, 1] and left[0] == right[0] and len(left[2]) == 5
    for _, _, met in (left, right):
        assert all(all(equal) and shape == (2, 32) for shape, *equal in met.values()), met
    config = alone.short(layers=1, steps=1)
    config.parallelism.spmd_backend = "partial_dtensor"
    os.chdir(tmp_path)
    _, losses = runs.run(ours.quantize_config_(config, "nvfp4", keep=hb.Keep(last_fraction=0)), weights=True)
    assert losses == pytest.approx(left[0], rel=1e-3)
