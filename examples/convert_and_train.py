"""Convert a model of yours and train it: the same bytes of text, once in high precision and once in NVFP4.

python examples/convert_and_train.py     on a CPU or a GPU, some seconds
"""

import argparse
import inspect

import torch
from torch import nn
from torch.nn import functional as F

import halfbyte as hb

CONTEXT = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(F.silu(self.up_proj(self.norm(x))))


class ByteModel(nn.Module):
    """Predicts a byte of text from the 16 before it."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width // CONTEXT)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def batches(text: torch.Tensor, steps: int, size: int):
    """Yield (ids [size, CONTEXT], next byte [size]), the same for every recipe."""
    generator = torch.Generator().manual_seed(0)
    windows = text.unfold(0, CONTEXT + 1, 1)
    for _ in range(steps):
        window = windows[torch.randint(len(windows), (size,), generator=generator)]
        yield window[:, :-1], window[:, -1]


def train(recipe: str, steps: int, size: int = 256) -> float:
    """Train under a recipe and return the mean loss of the last tenth of the steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = ByteModel().to(device)
    state = None
    if recipe != "float32":
        report = hb.quantize_(model, recipe, state=hb.RunState(seed=1))  # in place; before the optimizer or after
        print(report)  # every linear layer, its recipe, and why
        state = report.state
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    losses = []
    for ids, target in batches(text, steps, size):
        loss = F.cross_entropy(model(ids.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if state is not None:
            state.advance()  # other random bits for the next step
        losses.append(loss.item())
    return sum(losses[-(steps // 10 or 1) :]) / (steps // 10 or 1)


def main(steps: int = 300) -> dict[str, float]:
    """Train in high precision and in NVFP4; return the losses."""
    losses = {recipe: train(recipe, steps) for recipe in ("float32", "nvfp4")}
    for recipe, loss in losses.items():
        print(f"{recipe:>8}: loss {loss:.4f}")
    return losses


if __name__ == "__main__":
    main()
