"""Statistics change no bit: losses, weights and random places are those of a run without them, eager or compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import halfbyte as hb

STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:step 1. quantization noise")


class Block(nn.Module):
    """Siblings that share one quantization, a fused norm and MLP, and a plain layer."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.mlp = hb.nn.LayerNormMLP(32, 48, recipe="bf16")
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        h = 2 * x
        q, k = hb.nn.forward_shared(h, (self.q, self.k))
        x = h.mul_(0.5) + q.mul_(0.5) * k  # in place: what is kept of a sampled step may not be in its way
        return self.out(x + self.mlp(x))


class Stack(nn.Module):
    def __init__(self, recompute: str):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList([Block()]), recompute

    def forward(self, x):
        for block in self.blocks:
            again = self.recompute
            x = checkpoint(block, x, use_reentrant=again == "reentrant") if again else block(x)
        return x


def train(recipe, *, every: int = 0, recompute: str = "", backend: str = "", dtype=torch.float32):
    """Return weights, losses, the position at the end, what was sampled, and how many graphs were compiled."""
    torch.manual_seed(0)
    model = Stack(recompute)
    report = hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0))
    hb.set_recipe_(model, recipe, state=report.state)
    counter = CompileCounterWithBackend(backend)
    if backend:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(fullgraph=True, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found, losses = [], []
    statistics = hb.collect_stats(model, every=every) if every else None
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for _ in range(2):
            x = torch.randn(1, 20, 32, generator=generator).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            report.state.advance()
        optimizer.step()
        optimizer.zero_grad()
        if statistics is not None:
            found.append(statistics.advance())
    return [p.detach() for p in model.parameters()], losses, report.state.position, found, counter.frame_count


def check(recipe, **how):
    """Compare a run with statistics to one without, and return what was sampled and the number of graphs of both."""
    weights, losses, position, _, graphs = train(recipe, **how)
    others, other_losses, other_position, found, more = train(recipe, every=3, **how)
    assert losses == other_losses and position == other_position
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert [statistics is not None for statistics in found] == [True, False, True, False]
    return found, graphs, more


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2", "rl"])
def test_eager(recipe):
    found, _, _ = check(recipe)
    assert len(found[0].layers) == 6 and not found[0].unobserved
    assert all(set(row.products) == {"y", "dx", "dw"} for row in found[0].layers)


def test_autocast():
    check("nvfp4", dtype=torch.bfloat16)


@pytest.mark.parametrize("recompute", ["reentrant", "saved tensors"])
def test_checkpointing_counts_everything_once(recompute):
    found, _, _ = check("nvfp4", recompute=recompute)
    plain = train("nvfp4", every=3)[3]
    assert found[0].records() == plain[0].records() and found[2].records() == plain[2].records()


def test_compiled_blocks_have_one_graph_more_and_the_same_statistics():
    found, graphs, more = check("nvfp4", backend="aot_eager")
    assert (graphs, more) == (1, 2)
    plain = train("nvfp4", every=3)[3]
    assert found[0].records() == plain[0].records()


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_makes_of_a_sampled_step_what_it_makes_of_others(dtype):
    check("nvfp4", backend="inductor", dtype=dtype)


def test_a_copy_watches_nothing():
    model = nn.Sequential(hb.nn.Linear(32, 32, state=hb.RunState(0)))
    hb.collect_stats(model)
    assert model[0].ledger is not None and copy.deepcopy(model)[0].ledger is None
    assert copy.deepcopy(model)[0].instead is None
