"""Does the Keep that `hb.inspect` proposes repair a model with a defect, and does a random one of the same cost?

    python -m bench.keep --write

A byte model has one loud channel in the input of its first layer: constant, multiplied by weights that are 0 and stay
so. In high precision it changes nothing; in NVFP4 the 15 values beside it, among them the two bytes before the one that
is predicted, become 0. All linear layers but the head follow `nvfp4`, each with the same share of the multiplications.
For every seed the model is inspected before it trains, and trained in high precision, in NVFP4, with the proposal in
high precision, and with layers drawn at random among the others, of at least the proposal's cost.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfbyte as hb
from bench.loss_tables import MINUS
from bench.markdown import rows
from bench.records import Record
from halfbyte.train import measure

RESULT = Path(__file__).with_name("results") / "keep.json"
CONTEXT, WIDTH, DEPTH, BATCH = 16, 128, 12, 256
CHANNEL, LOUD = 120, 100.0
"""The loud channel lies among those of the two latest bytes; its neighbours are of size 1."""
BUDGET = 0.1


class Layer(nn.Module):
    """A residual layer with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(self.norm(x)))


class ByteModel(nn.Module):
    """Predicts a byte of text from the 16 before it, whose embeddings have a loud channel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH // CONTEXT)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        with torch.no_grad():
            self.first.weight[:, CHANNEL] = 0
        rest = torch.ones(WIDTH)
        rest[CHANNEL] = 0
        self.first.weight.register_hook(lambda gradient: gradient * rest)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(1)
        loud = torch.full_like(x[:, :1], LOUD)
        x = self.first(torch.cat((x[:, :CHANNEL], loud, x[:, CHANNEL + 1 :]), 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def texts() -> tuple[Tensor, Tensor]:
    """Return windows of text, to train on and held out: the source of a module of Python."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    windows = text.unfold(0, CONTEXT + 1, 1)
    split = len(windows) * 9 // 10
    return windows[:split], windows[split + CONTEXT :]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy of the last byte of windows."""
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def batch(windows: Tensor, generator: torch.Generator) -> Tensor:
    """Return some windows."""
    return windows[torch.randint(len(windows), (BATCH,), generator=generator)]


def trained(seed: int, steps: int, kept: Sequence[str] | None) -> float:
    """Train in NVFP4 with some layers in high precision, None for all of them, and return the held-out loss."""
    torch.manual_seed(seed)
    model, state = ByteModel(), hb.RunState(seed)
    if kept is not None:
        hb.quantize_(model, "nvfp4", rules=dict.fromkeys(kept), keep=hb.Keep(last_fraction=0), state=state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    windows, held_out = texts()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss_of(model, batch(windows, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()
    with torch.no_grad():
        return loss_of(model, held_out).item()


def proposal(seed: int) -> hb.stats.Proposal:
    """Return what inspecting the model before its training proposes."""
    torch.manual_seed(seed)
    data = batch(texts()[0], torch.Generator().manual_seed(seed + 1))
    found = hb.inspect(ByteModel(), lambda model: loss_of(model, data), recipes=["nvfp4"], budget=BUDGET)
    assert found.proposal is not None, "a batch was given"
    return found.proposal


def drawn(seed: int, share: float, others: Sequence[str]) -> list[str]:
    """Return layers drawn at random that cost at least this share; all layers cost the same."""
    count = math.ceil(share * (DEPTH + 1) - 1e-9)
    return sorted(random.Random(seed).sample(others, count))


def of_seed(seed: int, steps: int, draws: int) -> dict[str, Any]:
    """Return the losses of one seed, and the share of the gap that each Keep recovers."""
    keep = proposal(seed)
    others = [f"layers.{i}.linear" for i in range(DEPTH) if f"layers.{i}.linear" not in keep.targets]
    high, all_nvfp4 = trained(seed, steps, None), trained(seed, steps, [])
    ways = {"proposed": list(keep.targets)}
    ways |= {f"random {i + 1}": drawn(100 * seed + i, keep.share, others) for i in range(draws)}
    found = {"seed": seed, "share": keep.share, "bf16": high, "nvfp4": all_nvfp4, "gap": all_nvfp4 / high - 1}
    losses = {name: trained(seed, steps, kept) for name, kept in ways.items()}
    kept = {
        name: {"layers": ways[name], "loss": loss, "recovered": (all_nvfp4 - loss) / (all_nvfp4 - high)}
        for name, loss in losses.items()
    }
    return found | {"kept": kept}


def main(arguments: Sequence[str]) -> int:
    """Train all ways, print the table and, with --write, keep the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.keep", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--draws", type=int, default=3, help="random Keeps a seed")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    options = parser.parse_args(arguments)
    found = {
        "run": {"steps": options.steps, "batch": BATCH, "budget": BUDGET, "channel": CHANNEL, "loud": LOUD},
        "environment": measure.package_versions(),
        "seeds": [of_seed(seed, options.steps, options.draws) for seed in range(options.seeds)],
    }
    print(table(found))
    if options.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def table(found: Mapping[str, Any]) -> str:
    """Return the result as the docs print it."""
    lines = []
    for one in found["seeds"]:
        kept = dict(one["kept"])
        proposed, others = kept.pop("proposed"), [100 * way["recovered"] for way in kept.values()]
        lines.append(
            [
                str(one["seed"]),
                f"{one['bf16']:.4f}",
                f"{one['nvfp4']:.4f}, {100 * one['gap']:+.1f} %",
                f"{', '.join(f'`{name}`' for name in proposed['layers'])}, {100 * one['share']:.1f} %",
                f"{proposed['loss']:.4f}, {100 * proposed['recovered']:.0f} %",
                ", ".join(f"{round(share)} %" for share in others).replace("-", MINUS),
            ]
        )
    head = ["seed", "bf16", "nvfp4, gap", "proposal, share of FLOPs", "loss with it, of the gap recovered"]
    return rows([*head, "recovered by random layers"], lines)


def render(records: Sequence[Record]) -> str:
    """Return the table of the kept result, for bench.tables."""
    return table(json.loads(RESULT.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
