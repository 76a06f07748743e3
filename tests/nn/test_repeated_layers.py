"""Layers whose passes are repeated as a whole: the bits of passes run anew, through whatever changes between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from repeating import anew, kernels, same
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.kernels import prepared

pytestmark = pytest.mark.usefixtures("kernels")
__all__ = ["kernels"]


def data(i: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)


class Kind(NamedTuple):
    """A layer, and how it is called."""

    make: Callable[[hb.RunState, str], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)


OFFSETS = torch.tensor([0, 9, 16], dtype=torch.int32)
KINDS = {
    "Linear": Kind(lambda state, recipe: hb.nn.Linear(32, 32, recipe=recipe, state=state)),
    "siblings": Kind(
        lambda state, recipe: nn.ModuleList(
            hb.nn.Linear(32, n, bias=n == 16, recipe=recipe, state=state) for n in (32, 16)
        ),
        lambda layers, x: torch.cat(hb.nn.forward_shared(x, list(layers)), -1),
    ),
    "LayerNormLinear": Kind(lambda state, recipe: hb.nn.LayerNormLinear(32, 32, recipe=recipe, state=state)),
    "LayerNormLinear with a residual": Kind(
        lambda state, recipe: hb.nn.LayerNormLinear(32, 32, recipe=recipe, state=state),
        lambda layer, x: torch.cat(layer(x, residual=x * 2), -1),
    ),
    "LayerNormMLP": Kind(lambda state, recipe: hb.nn.LayerNormMLP(32, 48, recipe=recipe, state=state)),
    "GroupedLinear": Kind(
        lambda state, recipe: hb.nn.GroupedLinear(3, 32, 32, recipe=recipe, state=state),
        lambda layer, x: layer(x.flatten(0, -2), OFFSETS).view(*x.shape[:-1], -1),
    ),
}


class Run:
    """A layer that takes steps and notes everything that they return."""

    def __init__(self, kind: Kind, recipe: str) -> None:
        torch.manual_seed(0)
        self.kind, self.state, self.seen = kind, hb.RunState(3), []
        self.layer = kind.make(self.state, recipe).to(torch.bfloat16)

    def step(self, x: Tensor, *, needs: bool = True, gradient: Callable[[Tensor], Tensor] | None = None) -> None:
        x = x.detach().requires_grad_(needs)
        y = self.kind.call(self.layer, x)
        dy = data(77 + len(self.seen), *y.shape, dtype=y.dtype)
        if y.requires_grad:
            y.backward(dy if gradient is None else gradient(dy))
        parameters = list(self.layer.parameters())
        self.seen.append(
            [y, x.grad, *(p.grad for p in parameters), *(getattr(p, "main_grad", None) for p in parameters)]
        )
        self.seen[-1] = [None if t is None else t.detach().clone() for t in self.seen[-1]]
        for p in parameters:
            p.grad = None
        self.state.advance()


def x_of(i: int) -> Tensor:
    return data(i, 2, 8, 32)


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def plain(run: Run) -> None:
    run.step(x_of(1))


def weights_changed(run: Run) -> None:
    for p in run.layer.parameters():
        p.data = p.data.roll(1, 0) * 1.5
    run.step(x_of(2))


def weights_frozen(run: Run) -> None:
    for p in run.layer.parameters():
        p.requires_grad_(False)
    run.step(x_of(3))
    for p in run.layer.parameters():
        p.requires_grad_(True)


def input_without_gradient(run: Run) -> None:
    run.step(x_of(4), needs=False)


def without_gradients(run: Run) -> None:
    with torch.no_grad():
        run.step(x_of(5))


def inference(run: Run) -> None:
    with torch.inference_mode():
        run.seen.append([run.kind.call(run.layer, x_of(6)).clone()])


def other_memory(run: Run) -> None:
    run.step(shifted(x_of(7)))
    run.step(x_of(8).mT.contiguous().mT)
    run.step(x_of(9), gradient=lambda dy: dy.mT.contiguous().mT)
    run.step(x_of(9), gradient=shifted)
    run.step(x_of(9), gradient=lambda dy: dy[..., :1].expand(dy.shape))


def autocast(run: Run) -> None:
    run.layer.to(torch.float32)
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            run.step(x_of(10).float())
    run.layer.to(torch.bfloat16)


def main_grads(run: Run) -> None:
    for p in run.layer.parameters():
        if p.dim() > 1:
            p.main_grad = torch.ones(p.shape)
    run.step(x_of(11)), run.step(x_of(12))
    for p in run.layer.parameters():
        if p.dim() > 1:
            del p.main_grad


def empty(run: Run) -> None:
    if not isinstance(run.layer, hb.nn.GroupedLinear):
        run.step(x_of(13)[:, :0])


def retained(run: Run) -> None:
    x = x_of(14).requires_grad_()
    y = run.kind.call(run.layer, x)
    for _ in range(2):
        run.seen.append(
            list(torch.autograd.grad(y, [x, *run.layer.parameters()], data(1, *y.shape), retain_graph=True))
        )


CHANGES = (
    plain, weights_changed, weights_frozen, input_without_gradient, without_gradients, inference, other_memory,
    autocast, main_grads, empty, retained,
)  # fmt: skip


FEW = (plain, weights_changed, weights_frozen, main_grads, retained)


SAMPLE = "LayerNormLinear"  # minutes in the interpreter: one kind for each change, the others in `make test-full`


@pytest.mark.parametrize(
    "kind", [kind if kind == SAMPLE else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_steps_between_which_everything_changes(kind):
    """Each change twice, so that its second step is repeated, and both orders of its neighbours are met."""
    runs, changes = [], CHANGES if kind == "Linear" else FEW
    for run_anew in (False, True):
        run = Run(KINDS[kind], "nvfp4")
        for change in (*changes, *changes[::-1]):
            if run_anew:
                with anew():
                    change(run)
            else:
                change(run)
        runs.append(run.seen)
    same(*runs)
    refused = [record for record in prepared._RECORDS.values() if isinstance(record, str)]
    assert prepared._RECORDS and not refused, refused


RECIPES = ("four_over_six", "nvfp4_mxfp8_bwd", "nvfp4_forward", "mxfp8", "nvfp4")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_recipe_that_changes(kind):
    runs = []
    for run_anew in (False, True):
        run = Run(KINDS[kind], "nvfp4")
        for recipe in (*RECIPES, *(RECIPES if kind == "Linear" else RECIPES[:2])):
            hb.set_recipe_(run.layer, recipe)
            if run_anew:
                with anew():
                    run.step(x_of(len(run.seen)))
            else:
                run.step(x_of(len(run.seen)))
        runs.append(run.seen)
    same(*runs)
