"""What the tests of amaxes of earlier steps share: recipes, the tokens and steps of a layer, what is made in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from delayed_follower import SEED

import halfbyte as hb
from halfbyte import ops, recipes

RECIPES = {
    "every2": recipes.delayed_amax(every=2, margin=1.3),
    "every3": recipes.delayed_amax(every=3, margin=1.5, base="four_over_six"),
    "fresh": recipes.delayed_amax(base=recipes.nvfp4(hadamard=hb.Hadamard(size=32, signs="fresh"))),
    "quartet2": recipes.delayed_amax(base="quartet2"),
    "mxfp8_bwd": recipes.delayed_amax(base="nvfp4_mxfp8_bwd"),
    "row": recipes.delayed_amax(base=recipes.row_scaled(scope="activations")),
}


def tokens(number: int, m: int, k: int, n: int, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and dy of a step, whose size goes up and down unless `scale` says it."""
    g = torch.Generator().manual_seed(number)
    size = (1.0, 4.0, 0.3, 9.0, 2.0, 0.1, 30.0)[number % 7] if scale is None else scale
    return torch.randn(m, k, generator=g) * size, torch.randn(m, n, generator=g) * size / 1000


def run_steps(layer, batch: Callable, count: int, begin: int = 0, run: Callable | None = None) -> list[torch.Tensor]:
    """Return outputs and gradients of steps of one micro-batch each.

    Args:
        layer: with the weight.
        batch: from the number of a step to x, what else the layer takes, and dy.
        count, begin: how many steps, and the number of the first.
        run: what is called, the layer by default.
    """
    found = []
    for step in range(begin, begin + count):
        layer.run_state.begin_step(layer)
        x, *more, dy = batch(step)
        x.requires_grad_()
        y = (run or layer)(x, *more)
        y.backward(dy)
        found += [y.detach(), x.grad, layer.weight.grad.clone()]
        layer.weight.grad = None
        layer.run_state.advance()
    return found


def steps_held_by(kind: str | None, model, layer, batch: Callable, run: Callable) -> tuple[list[torch.Tensor], dict]:
    """Return outputs and gradients of x of four steps in bf16, and the amaxes then.

    Args:
        kind: of what holds the weight, or looks at it; None leaves it as it is.
        model, layer: of one layer.
        batch, run: as for `run_steps`.
    """
    if kind == "primary":
        hb.distributed.primary_weights_(model)
    if kind == "cached":
        hb.cache_weights(model)
    if kind == "observed":
        hb.collect_stats(model)
    if kind == "main_grad":
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    state, found = layer.run_state, []
    for step in range(4):
        state.begin_step(model)
        x, *more, dy = batch(step)
        x = x.bfloat16().requires_grad_()
        y = run(x, *more)
        y.backward(dy.bfloat16())
        found += [y.detach(), x.grad]
        state.advance()
    return found, state.state_dict()["amaxes"]


def restored(saved: dict) -> hb.RunState:
    """Return a RunState that loaded what another saved, as of a model whose layers come now."""
    fresh = hb.RunState(SEED)
    fresh.load_state_dict(saved)
    fresh._streams = 0
    return fresh


def equal(one: list, other: list) -> bool:
    """Whether two runs gave the same tensors."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: list, other: list) -> bool:
    """Whether two runs gave the same but for the order of sums of products in bf16."""
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=2**-7, atol=2**-8 * float(b.abs().amax())) for a, b in pairs)


class Spy:
    """Every operand that the op `name` makes, in turn; "grouped_…" takes offsets in front of the sides."""

    def __init__(self, monkeypatch, name: str) -> None:
        self.made, quantize = [], getattr(ops, name)
        first = int(name.startswith("grouped_"))

        def seen(t, *arguments):
            offsets, sides, rest = arguments[:first], arguments[first : first + 2], arguments[first + 2 :]
            row, col = (side and side._replace(transient=False) for side in sides)  # codes, not values
            found = quantize(t, *offsets, row, col, *rest)
            self.made.append((t.detach().clone(), row, col, found))
            return found

        monkeypatch.setattr(ops, name, seen)

    def of(self, wanted: torch.Tensor) -> dict[str, tuple]:
        """Return what was made of a tensor: {side: (spec, blocks)}."""
        found = {}
        for t, row, col, blocks in self.made:
            if t.shape == wanted.shape and torch.equal(t, wanted):
                sides = zip(("row", "col"), (row, col), blocks, strict=True)
                found |= {name: (side.spec, made) for name, side, made in sides if side is not None}
        return found
