"""What ranks check about a ZeroOptimizer whose experts exist as codes alone; every function runs on every rank."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import ranks
import torch
from small_models import NOTHING_KEPT
from torch import nn

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer
from halfbyte.tensor import PrimaryWeight

ALL = ["first.weight", "up.weight", "down.weight"]


class Mixture(nn.Module):
    """A linear layer and experts, of which one has no token."""

    def __init__(self, experts: int, rows: int) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.up = hb.nn.GroupedLinear(experts, 40, rows, recipe="bf16").add_bias_()
        self.down = hb.nn.GroupedLinear(experts, rows, 32, recipe="bf16")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.linspace(1, len(x), self.up.experts).int()
        ends[0] = 0
        return self.down(self.up(self.first(x), ends).relu(), ends)


def build(
    weights: str, recipe: str, sizes: tuple[int, int], bucket: int
) -> tuple[nn.Module, hb.RunState, ZeroOptimizer]:
    """The model, converted, and its optimizer."""
    torch.manual_seed(3)
    model = Mixture(*sizes).bfloat16()
    state = hb.quantize_(model, recipe, keep=NOTHING_KEPT, state=hb.RunState(0)).state
    config = ZeroConfig(weights=weights, bucket_numel=bucket, max_norm=1.0, timeout=timedelta(seconds=20))
    return model, state, ZeroOptimizer(model, partial(torch.optim.AdamW, lr=1e-2), config=config)


def steps(rank: int, model: nn.Module, state: hb.RunState, zero: ZeroOptimizer, which: range) -> list[torch.Tensor]:
    """Losses, norms, outputs in high precision and masters."""
    seen = []
    for step in which:
        x = torch.randn(9, 24, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        state.advance()
        seen += [loss.detach(), zero.step()]
    return [*seen, *(t.clone() for _, t in sorted(zero.state_dict()["masters"].items()))]


def trained(rank: int, world: int, recipe: str, sizes: tuple[int, int], bucket: int) -> dict:
    """Whether weights that are codes alone train as bf16 weights do, through a checkpoint too; and what they are."""
    runs, forms = {}, {}
    for weights in ("nvfp4", "plain"):
        model, state, zero = build(weights, recipe, sizes, bucket)
        before = zero.traffic["gathered"]
        first = steps(rank, model, state, zero, range(3))
        gathered = zero.traffic["gathered"] - before
        saved, place = zero.state_dict(), state.state_dict()
        model, state, zero = build(weights, recipe, sizes, bucket)
        zero.load_state_dict(saved)
        state.load_state_dict(place)
        runs[weights] = first + steps(rank, model, state, zero, range(3, 5))
        primary = [name for name, p in model.named_parameters() if isinstance(p, PrimaryWeight)]
        forms[weights] = primary, gathered
        if weights == "nvfp4":
            zero.synchronize()
            values = [_quantized(model.get_parameter(name), name, zero) for name in primary]
    pairs = list(zip(runs["nvfp4"], runs["plain"], strict=True))
    return {"equal": all(torch.equal(a, b) for a, b in pairs) and bool(pairs), "forms": forms, "codes": values}


def _quantized(weight: PrimaryWeight, name: str, zero: ZeroOptimizer) -> bool:
    """Whether codes, scales and amaxes are those of the whole masters' quantization."""
    whole = zero.state_dict()["masters"][name].bfloat16()
    if whole.dim() == 3:
        want, _ = hb.grouped_quantize_row_col(whole, None, weight.spec, None)
    else:
        want = hb.quantize(whole, weight.spec)
    pairs = zip(weight.blocks, want.blocks, strict=True)
    return all(torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in pairs)


def train_alike(world: int) -> None:
    """Experts and rows of tiles whose shards are cut anywhere; one bucket, and several."""
    for recipe, sizes, bucket in (("nvfp4", (3, 48), 1 << 20), ("four_over_six", (5, 16), 2000)):
        for rank in ranks.run(world, trained, recipe, sizes, bucket):
            assert rank["equal"] and rank["codes"] == [True] * 3
            assert rank["forms"]["nvfp4"][0] == ALL and rank["forms"]["plain"][0] == []
            coded, plain = (rank["forms"][weights][1] for weights in ("nvfp4", "plain"))
            assert world == 1 or coded < 0.4 * plain, "codes and scales travel, and biases in bf16"
