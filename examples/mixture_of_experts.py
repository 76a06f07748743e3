"""A mixture of experts in NVFP4: a router in fp32, experts as grouped linear layers, tokens sorted by expert.

Every expert has its own amax, scales and random bits, so its result does not depend on what the others received.
"""

import torch
from torch import nn
from torch.nn import functional as F

import halfbyte as hb


class Mixture(nn.Module):
    """Top-k of `experts` SwiGLU experts for each token."""

    def __init__(self, width: int = 64, hidden: int = 96, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)  # `hb.Keep()` leaves routers in high precision
        self.gate_up_proj = hb.nn.GroupedLinear(experts, width, 2 * hidden, recipe="bf16")
        self.down_proj = hb.nn.GroupedLinear(experts, hidden, width, recipe="bf16")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(self.top_k)
        order = chosen.flatten().argsort(stable=True)  # the (token, expert) pairs, sorted by expert
        token = order // self.top_k
        offsets = chosen.flatten().bincount(minlength=self.router.out_features).cumsum(0).int()

        gate, up = self.gate_up_proj(x[token], offsets).chunk(2, dim=-1)
        y = self.down_proj(F.silu(gate) * up, offsets) * weight.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, y)


def main(steps: int = 100, recipe: str = "nvfp4") -> list[float]:
    """Train a mixture to reverse vectors and return the losses."""
    torch.manual_seed(0)
    model = Mixture()
    report = hb.quantize_(model, recipe, state=hb.RunState(seed=1))
    print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for index in range(steps):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(index))
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.state.advance()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
