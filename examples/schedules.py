"""Change the recipe while a model trains: NVFP4, then a high-precision forward, then high precision for the last steps.

The schedule is part of the RunState, so a checkpoint that holds its `state_dict` goes on in the middle of it.
"""

import torch
from torch import nn

import halfbyte as hb

EVERYTHING = hb.Keep(names=(), last_fraction=0)  # the model has two layers; none is to stay as it is


def build(steps: int) -> tuple[nn.Module, hb.RunState, torch.optim.Optimizer]:
    """Return a model in NVFP4, a RunState that says what follows, and an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    schedule = hb.Schedule([(0.6, "bf16/nvfp4"), (0.8, "bf16")], steps=steps)  # shares of the steps; forward/backward
    state = hb.RunState(1, schedule)
    hb.quantize_(model, "nvfp4", keep=EVERYTHING, state=state)
    return model, state, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, state: hb.RunState, optimizer: torch.optim.Optimizer, index: int) -> float:
    """Train one step on data of its own and return the loss."""
    state.begin_step(model)  # gives the layers the recipe of this step
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(index))
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state.advance()
    return loss.item()


def main(steps: int = 20) -> list[tuple[hb.Recipe, float]]:
    """Train, stopping half way and going on from what was saved; return (recipe, loss) of every step."""
    model, state, optimizer = build(steps)
    history = []

    def run(first: int, last: int) -> None:
        for index in range(first, last):
            loss = step(model, state, optimizer, index)
            history.append((model[0].recipe, loss))
            print(
                f"step {index:>2}  loss {loss:.4f}  forward {model[0].recipe.fprop}  backward {model[0].recipe.dgrad}"
            )

    run(0, steps // 2)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "halfbyte": state.state_dict()}
    model, state, optimizer = build(steps)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["halfbyte"])
    run(steps // 2, steps)
    return history


if __name__ == "__main__":
    main()
