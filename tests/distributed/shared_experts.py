"""A module of experts that ranks share, by experts or by features, its tokens and steps, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ranks
import torch
import torch.nn.functional as F
from expert_parallel_checks import Case, by_expert, same, tokens_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfbyte as hb

SIZES = ((5, 0, 17, 2), (0, 0, 30, 1), (9, 3, 0, 0), (1, 1, 1, 1))
UNEVEN = ((17, 0, 3), (1, 0, 34))
"""Sizes of the groups of every rank."""
K, HIDDEN = 48, 32


class Experts(nn.Module):
    """SwiGLU experts, as docs/moe.md has them."""

    def __init__(
        self, dim: int = K, hidden: int = HIDDEN, experts: int = 4, recipe: str = "nvfp4", biased: bool = False
    ):
        super().__init__()
        torch.manual_seed(3)
        state = hb.RunState(7, rank=0)
        self.gate_up_proj = hb.nn.GroupedLinear(experts, dim, 2 * hidden, recipe=recipe, state=state)
        self.down_proj = hb.nn.GroupedLinear(experts, hidden, dim, recipe=recipe, state=state)
        if biased:
            self.gate_up_proj.add_bias_()
            self.down_proj.add_bias_()
        self.to(ranks.device())

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x, offsets).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up, offsets)


def given(rank: int, world: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, dy and offsets of a rank."""
    tokens = tokens_of(Case("nvfp4", SIZES[:world], (K, K), dtype=dtype), rank)
    return tokens.x.requires_grad_(), tokens.dy, tokens.offsets


def given_to_all(world: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, dy and offsets of all ranks' tokens, sorted by expert, and whose each token is."""
    case, every = Case("nvfp4", SIZES[:world]), [given(rank, world) for rank in range(world)]
    x, dy = (by_expert(case, [one[i].detach() for one in every]) for i in range(2))
    ends = sum(one[2].diff(prepend=one[2].new_zeros(1)) for one in every).cumsum(0, dtype=torch.int32)
    owners = by_expert(case, [one[2].new_full((len(one[0]),), rank) for rank, one in enumerate(every)])
    return x, dy, ends, owners


def step(module: nn.Module, x: Tensor, dy: Tensor, offsets: Tensor, recompute: bool = False) -> list[Tensor]:
    """Return y and the gradients of x and of both weights, whole."""
    x = x.detach().requires_grad_()
    for p in module.parameters():
        p.grad = None
    y = checkpoint(module, x, offsets, use_reentrant=False) if recompute else module(x, offsets)
    y.backward(dy.to(y.dtype))
    grads = [p.grad for p in module.parameters()]
    return [y.detach(), x.grad, *[g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]]


@contextmanager
def within(context: str, module: nn.Module) -> Iterator[None]:
    """Run a step as its context is called; one that says nothing of how runs it as it is."""
    if context == "autocast":
        with torch.autocast(ranks.device().type, torch.bfloat16):
            yield
    elif context == "high precision":
        with hb.high_precision(module):
            yield
    else:
        yield


def unlike(runs: Mapping[str, list[Tensor]], want: list[Tensor]) -> list[str]:
    """Return which results of which runs are not those wanted, bit for bit; a run may have the first of them alone."""
    pairs = {way: zip(made, want[: len(made)], strict=True) for way, made in runs.items()}
    return [f"{way}: {i}" for way, both in pairs.items() for i, (a, b) in enumerate(both) if not same(a, b)]


def off(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def limit(context: str) -> float:
    """Return by how much the order of sums moves what experts compute; codes at a tie may be among it."""
    return {"autocast": 3e-2, "bf16": 1e-5, "high precision": 1e-5}.get(context, 1e-2)


class Answers(dict[str, str]):
    """What misuses are answered with, by name."""

    def ask(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
            self[name] = "nothing"
        except (ValueError, TypeError, RuntimeError) as error:
            self[name] = f"{type(error).__name__}: {error}"


def check_refusals(refusals: Callable[[int, int], Mapping[str, str]], refused: Mapping[str, str]) -> None:
    """Check that two ranks answer every misuse as `refused` says, and all in the same words."""
    found, again = ranks.run(2, refusals)
    for name, message in refused.items():
        assert re.search(message, found[name]), (name, found[name])
    assert found.keys() == refused.keys()
    alike = [{name: re.sub(r"\d+", "", text) for name, text in of_rank.items()} for of_rank in (found, again)]
    assert alike[0] == alike[1], "on all ranks, so that none waits for another"
