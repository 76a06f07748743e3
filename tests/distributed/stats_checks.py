"""What every rank does in test_stats_ranks.py."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
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


class Written(list):
    """A sink."""

    write = list.append


def of_a_stage(rank, world):
    """Return what each of two groups of two ranks measures, who writes it, and who warns of noise in it."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model, _ = converted()
    statistics = hb.collect_stats(model, every=1, to=[written := Written()], group=group)
    model(data(rank)).square().mean().backward()
    records = statistics.advance().records()
    assert written in ([], [statistics.last])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        noisy(group)
    return records, len(written), sum("of the weight gradients" in str(one.message) for one in caught)


def noisy(group):
    """Measure gradients that cancel over tokens, whose noise does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    hb.quantize_(model, "naive_fp4", keep=hb.Keep(names=(), last_fraction=0))
    statistics = hb.collect_stats(model, every=1, group=group)
    dy = torch.randn(64, 32)
    dy[1::2] = -dy[::2]
    model(torch.randn(32, 32).repeat_interleave(2, 0)).backward(dy + 1e-3)
    assert statistics.advance().is_noisy


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
