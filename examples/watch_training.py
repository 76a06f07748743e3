"""Statistics of a run: what quantization does to every layer, which layer has a defect, and what keeping it costs.

A small MLP with a planted outlier channel is trained in NVFP4 while hb.collect_stats watches every tenth step.

python examples/watch_training.py     on a CPU or a GPU, seconds
"""

import torch
from torch import Tensor, nn

import halfbyte as hb

WIDTH, HIDDEN, TOKENS = 64, 128, 64
OUTLIER = 5  # the hidden channel of block 1 that is large and that nobody needs


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what the block adds."""
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Sequential:
    """Return three blocks; the outlier costs the 15 other channels of its block of 16 most of their bits."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    with torch.no_grad():
        model[1].up.bias[OUTLIER] = 300.0
        model[1].down.weight[:, OUTLIER] = 0.0
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens, and the function of them that is learned."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(3 * x)


def train(model: nn.Module, state: hb.RunState, steps: int, *sinks: object) -> hb.stats.StatsCollector:
    """Train, and return what watched it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stats = hb.collect_stats(model, every=10, to=sinks).follow(optimizer)
    for step in range(steps):
        x, y = batch(step)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()
    return stats


def main(steps: int = 30, *sinks: object) -> dict[str, object]:
    """Return the lowest SNR and whose it is, the first finding, and what is proposed to keep."""
    model = build()
    state = hb.quantize_(model, "nvfp4", keep=hb.Keep(last_fraction=0), state=hb.RunState(1)).state
    last = train(model, state, steps, *sinks).last
    assert last is not None, "the first step is sampled"
    print(last)
    operands = {(row.name, name): one for row in last.layers for name, one in row.operands.items()}
    worst = min(operands, key=lambda key: operands[key].snr_db)

    x, y = batch(steps)
    seen = hb.inspect(build(), lambda twin: (twin(x) - y).square().mean(), recipes=["nvfp4"], budget=0.2)
    print("\n".join(seen.closing_lines()))
    assert seen.proposal is not None, "there is a batch"
    return {"step": last.step, "worst": worst, "finding": seen.findings[0], "keep": seen.proposal.targets}


if __name__ == "__main__":
    main()
