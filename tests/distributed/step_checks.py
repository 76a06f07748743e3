"""What a step of ZeroOptimizer does to masters, against gradients of autograd and arithmetic done here.

SGD, and values compared rather than losses of two runs: Adam divides by the size of gradients, so that one that is
scaled or replaced trains nearly alike, and two runs through the same code are wrong alike.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import small_models
import torch
import torch.distributed as dist
import zero_checks as checks

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer
from halfbyte.tensor import PrimaryWeight


class Two(torch.nn.Module):
    """Two layers of which a forward may use one, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 48), torch.nn.Linear(32, 48)
        self.scale = torch.nn.Parameter(torch.ones(48))

    def forward(self, x, use: str):
        return sum(getattr(self, name)(x).float().tanh() * self.scale for name in use.split())


def build(rank: int, weights: str, optimizer, options=None, **config):
    torch.manual_seed(0)
    model = Two().bfloat16()
    hb.quantize_(model, checks.LEAN, keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    settings = ZeroConfig(weights=weights, bucket_numel=1000, timeout=checks.TIMEOUT, **config)
    return model, ZeroOptimizer(model, optimizer, param_options=options, config=settings)


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * number + rank)).bfloat16()


def gradients(model, zero, x, use: str) -> dict[str, torch.Tensor]:
    """Return what autograd computes, summed over ranks; zeros for what the forward does not use."""
    zero.synchronize()
    params = dict(model.named_parameters())
    found = torch.autograd.grad(model(x, use).square().mean(), list(params.values()), allow_unused=True)
    out = {}
    for (name, param), grad in zip(params.items(), found, strict=True):
        out[name] = torch.zeros(param.shape) if grad is None else grad.float()
        if dist.is_initialized():
            dist.all_reduce(out[name])
    return out


def check_masters(zero, expected: dict[str, torch.Tensor], **options) -> None:
    masters = zero.state_dict()["masters"]
    for name, value in expected.items():
        torch.testing.assert_close(masters[name], value, msg=lambda text, name=name: f"{name}: {text}", **options)


def two_ranks(rank: int, world: int) -> None:
    for weights in ("nvfp4", "plain"):
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
            accumulated(rank, world, weights, dtype, tolerance)
        without_gradients(rank, world, weights)
        clipped(rank, world, weights)
        saved_at_once(rank, weights)
    options_of_groups(rank)
    values_of_the_first_rank(rank)
    what_only_some_ranks_have(rank)


def saved_at_once(rank: int, weights: str) -> None:
    """A state dict taken between a step and the next forward holds what the masters stand for, a part's too."""
    for read in (lambda model: model.state_dict(), lambda model: model.second.state_dict(prefix="second.")):
        model, zero = build(rank, weights, partial(torch.optim.SGD, lr=4.0))
        for number in range(2):
            model(batch(rank, number), "first second").square().mean().backward()
            zero.step()
        saved = {name: copy.deepcopy(value) for name, value in read(model).items()}
        check_saved(zero, saved)


def check_saved(zero, saved: dict[str, torch.Tensor]) -> None:
    """Raise unless these are the values of the masters, rounded to bf16 and where they are codes quantized."""
    masters = zero.state_dict()["masters"]
    for name, value in saved.items():
        expected = masters[name].bfloat16()
        if isinstance(value, PrimaryWeight):
            quantized = hb.quantize(expected, hb.NVFP4(block=(16, 16)))
            for ours, theirs in zip(value.blocks[:3], quantized.blocks[:3], strict=True):
                assert torch.equal(ours, theirs), name
        else:
            assert torch.equal(value, expected), name
    assert saved


def accumulated(rank: int, world: int, weights: str, dtype: torch.dtype, tolerance: float) -> None:
    """A step moves masters by the mean over ranks of the sum over micro-batches, as one buffer of gradients has it."""
    model, zero = build(rank, weights, partial(torch.optim.SGD, lr=0.5), grad_dtype=dtype)
    before = zero.state_dict()["masters"]
    uses = ("first", "second first", "first")
    sums = [gradients(model, zero, batch(rank, i), use) for i, use in enumerate(uses)]
    for i, use in enumerate(uses):
        with zero.accumulate() if i < 2 else torch.enable_grad():
            model(batch(rank, i), use).square().mean().backward()
    total = {name: sum(grads[name] for grads in sums) / world for name in before}
    norm = zero.step()
    elements = sum(param.numel() for param in model.parameters()) if world > 1 else 0
    padding = len(zero.buckets) * 64 * world * 4
    assert 0 <= zero.traffic["reduced"] - elements * dtype.itemsize <= padding  # once, however many micro-batches
    torch.testing.assert_close(
        norm, torch.stack([g.square().sum() for g in total.values()]).sum().sqrt(), rtol=1e-2, atol=0
    )
    scale = max(grad.abs().max().item() for grad in total.values())
    expected = {name: before[name] - 0.5 * grad for name, grad in total.items()}
    check_masters(zero, expected, rtol=0, atol=0.5 * tolerance * scale)
    zero.zero_grad()
    for name, param in model.named_parameters():
        assert param.grad is None, name


def without_gradients(rank: int, world: int, weights: str) -> None:
    """A parameter without a gradient in a step counts as one with zeros: that of the step before is forgotten."""
    model, zero = build(rank, weights, partial(torch.optim.SGD, lr=0.5, weight_decay=0.125))
    for i, use in enumerate(("first second", "first", "second", "second")):
        before = zero.state_dict()["masters"]
        grads = gradients(model, zero, batch(rank, i), use)
        model(batch(rank, i), use).square().mean().backward()
        zero.step()
        expected = {name: before[name] - 0.5 * (grads[name] / world + 0.125 * before[name]) for name in before}
        check_masters(zero, expected, rtol=1e-6, atol=1e-6)
    before = zero.state_dict()["masters"]
    zero.step()  # no gradient at all
    check_masters(zero, {name: 0.9375 * master for name, master in before.items()}, rtol=1e-6, atol=1e-7)
    if rank == 0:  # one rank alone has gradients
        model(batch(rank, 9), "first").square().mean().backward()
    zero.step()
    moved = zero.state_dict()["masters"]
    assert not torch.allclose(moved["first.bias"], 0.9375**2 * before["first.bias"], rtol=1e-5)
    torch.testing.assert_close(moved["second.bias"], 0.9375**2 * before["second.bias"], rtol=1e-6, atol=1e-7)


def clipped(rank: int, world: int, weights: str) -> None:
    """Gradients above the norm are scaled down to it, those below are left as they are."""
    for max_norm, lr in ((1e-3, 500.0), (1e3, 1.0)):
        model, zero = build(rank, weights, partial(torch.optim.SGD, lr=lr), max_norm=max_norm)
        before = zero.state_dict()["masters"]
        grads = gradients(model, zero, batch(rank, 0), "first second")
        model(batch(rank, 0), "first second").square().mean().backward()
        norm = torch.stack([(grad / world).square().sum() for grad in grads.values()]).sum().sqrt()
        assert 1e-3 < norm < 1e3
        torch.testing.assert_close(zero.step(), norm, rtol=1e-5, atol=0)
        factor = lr * min(1.0, max_norm / norm.item()) / world
        check_masters(zero, {n: before[n] - factor * g for n, g in grads.items()}, rtol=0, atol=2e-6)


def options_of_groups(rank: int) -> None:
    """Every parameter is stepped with the options that were chosen for it, whatever rank has it."""
    chosen = {"first.weight": 0.25, "second.bias": 0.5}
    model, zero = build(
        rank, "nvfp4", partial(torch.optim.SGD, lr=1.0), lambda name, p: {"weight_decay": chosen.get(name, 0.0)}
    )
    before = zero.state_dict()["masters"]
    zero.step()
    check_masters(
        zero, {name: (1 - chosen.get(name, 0.0)) * master for name, master in before.items()}, rtol=1e-6, atol=0
    )
    zero.synchronize()
    for name, param in model.named_parameters():
        if isinstance(param, PrimaryWeight):
            whole = hb.quantize(((1 - chosen.get(name, 0.0)) * before[name]).bfloat16(), param.spec)
            assert torch.equal(param.qdata, whole.qdata), name


def values_of_the_first_rank(rank: int) -> None:
    """Models that were initialized apart begin with the values of rank 0, in masters and in weights."""
    models = []
    for seed in (0, rank):
        torch.manual_seed(seed)
        models.append(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)))
        torch.nn.init.normal_(models[-1][1].weight)
    first, own = models
    hb.quantize_(own, checks.LEAN, rules={"2": None}, keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    zero = ZeroOptimizer(own, config=ZeroConfig(timeout=checks.TIMEOUT))
    check_masters(zero, {name: param.detach() for name, param in first.named_parameters()}, rtol=0, atol=0)
    zero.synchronize()
    expected = hb.quantize(first[0].weight.detach(), own[0].weight.spec)
    assert torch.equal(own[0].weight.qdata, expected.qdata) and torch.equal(own[2].weight, first[2].weight)


def what_only_some_ranks_have(rank: int) -> None:
    """Options that the optimizer itself gives a later group, and schedules, are compared between the ranks."""

    def sgd(groups):
        for number, group in enumerate(groups):
            group["lr"] = 0.5 if number == 0 else 0.25 * (1 + rank)
        return torch.optim.SGD(groups)

    with pytest.raises(ValueError, match=r"optimizer: .*'lr', 0.25.* on rank 0, .*'lr', 0.5.* on rank 1"):
        build(rank, "plain", sgd, checks.decay_matrices)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    state = hb.RunState(0, hb.Schedule([(5 + rank, "bf16")]))
    hb.quantize_(model, "nvfp4", keep=small_models.NOTHING_KEPT, state=state)
    with pytest.raises(ValueError, match="the parameters differ"):
        ZeroOptimizer(model, config=ZeroConfig(timeout=checks.TIMEOUT))
