"""What every rank does in test_stats_ranks.py."""

from __future__ import annotations

import torch
from torch import nn

import halfbyte as hb


def converted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    report = hb.quantize_(model, hb.recipes.four_over_six(base=hb.recipes.nvfp4(stochastic_rounding=False)))
    return model, report


def data(rank):
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(rank))
    x[:, 3] *= 10 ** (rank + 1)
    return x


def of_a_rank(rank, world, wrap):
    model, _ = converted()
    hb.distributed.place_ranks_(model)
    if wrap:
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2], model):
            fully_shard(layer)
    statistics = hb.collect_stats(model, every=1)
    model(data(rank)).square().mean().backward()
    return statistics.advance().records()


def of_other_layers(rank, world):
    model, _ = converted()
    statistics = hb.collect_stats(model, names=("0",) if rank else ("2",))
    model(data(rank)).square().mean().backward()
    try:
        statistics.advance()
    except ValueError as error:
        return str(error)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (hb.nn.GroupedLinear(3, *shape, recipe="bf16") for shape in ((32, 24), (24, 32)))

    def forward(self, x, offsets):
        return self.down(torch.relu(self.up(x, offsets)), offsets)


def experts():
    torch.manual_seed(0)
    model = Experts()
    hb.quantize_(model, hb.recipes.four_over_six(base=hb.recipes.nvfp4(stochastic_rounding=False)))
    return model


def tokens(rank):
    """Return tokens and the ends of their groups, other ones on each rank."""
    return data(rank), torch.tensor([[4, 4, 20], [0, 11, 17]][rank], dtype=torch.int32)


def experts_of_a_rank(rank, world, wrap):
    model = experts()
    hb.distributed.place_ranks_(model)
    if wrap:
        from torch.distributed.fsdp import fully_shard

        for layer in (model.up, model.down, model):
            fully_shard(layer)
    statistics = hb.collect_stats(model, every=1)
    model(*tokens(rank)).square().mean().backward()
    found = statistics.advance()
    return found.records(), of_each(found)


def of_each(step):
    """Return {"layer[expert] operand": largest magnitude and noise}."""
    return {
        f"{one.name} {side}": (operand.amax, operand.noise)
        for layer in step.layers
        for one in layer.experts.values()
        for side, operand in one.operands.items()
    }
