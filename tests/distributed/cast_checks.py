"""What ranks check about the cast of primary weights; every function runs on every rank."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.distributed import cast_master_weights_to_nvfp4
from halfbyte.pieces import code_bytes
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.primary import PrimaryWeight

TILE = hb.NVFP4(block=(16, 16))
FOUR_OVER_SIX = hb.NVFP4(block=(16, 16), e4m3_max=256.0, scaling=hb.FourOverSix())
CLIPPING = hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix(error="mse", candidates=(0.875, 1.0, 1.25, 1.5)))


def dirty_weight(shape: tuple[int, int], spec: hb.NVFP4, seed: int, **options) -> PrimaryWeight:
    """Return a weight whose codes are random bits, zeros in the padding."""
    weight = PrimaryWeight.empty(shape, spec, **options)
    generator = torch.Generator("cpu").manual_seed(seed)
    codes = torch.randint(1, 16, (shape[0], 2 * weight.qdata.shape[1]), generator=generator, device="cpu")
    codes[:, shape[1] :] = 0
    weight.qdata.copy_(hb.layout.pack(codes.to(torch.uint8)))
    return weight


def check_bytes(weight: QuantTensor, before: Tensor, master: Tensor, start: int, stop: int) -> None:
    """The weight has all scales, and the codes of its shard; the other bytes are those from before."""
    cols = weight.shape[1]
    expected = hb.quantize(master.to(weight.dtype), weight.spec, scale_layout=weight.scale_layout)
    assert torch.equal(weight.blocks.block_scale, expected.blocks.block_scale), "scales"
    assert torch.equal(weight.blocks.amax, expected.blocks.amax), "amax"
    first, last = code_bytes(cols, cols, start, stop)
    codes, full = weight.qdata.view(-1), expected.qdata.view(-1)
    assert torch.equal(codes[first:last], full[first:last]), f"codes of {start}..{stop}"
    assert torch.equal(codes[:first], before[:first]) and torch.equal(codes[last:], before[last:]), "other bytes"


def share(master: Tensor, borders: list[int], rank: int) -> tuple[Tensor, int]:
    """Return rank's shard of a flat master between sorted borders, and where it starts."""
    edges = [0, *borders, master.numel()]
    return master.view(-1)[edges[rank] : edges[rank + 1]].clone(), edges[rank]


def cast_and_check(rank: int, masters: list[Tensor], specs: list, borders: list[list[int]], **options) -> None:
    weights = [
        dirty_weight(tuple(m.shape), s, i, **options) for i, (m, s) in enumerate(zip(masters, specs, strict=True))
    ]
    before = [w.qdata.clone().view(-1) for w in weights]
    shards = [share(m, b, rank) for m, b in zip(masters, borders, strict=True)]
    given = [(None, None) if not s.numel() and i % 2 else (s, at) for i, (s, at) in enumerate(shards)]
    cast_master_weights_to_nvfp4(weights, [s for s, _ in given], [at for _, at in given], None)
    for weight, old, master, (shard, at) in zip(weights, before, masters, shards, strict=True):
        check_bytes(weight, old, master, at, at + shard.numel())


def every_start(rank: int, world: int, spec: hb.NVFP4, shapes: list, dtype: torch.dtype) -> None:
    """Two neighbouring shards meet at every offset from 0 to 300."""
    for shape in shapes:
        torch.manual_seed(sum(shape))
        numel = shape[0] * shape[1]
        # Many offsets in one call: the weights of a list do not influence each other.
        offsets = [offset for offset in range(301) if offset <= numel]
        masters = [torch.randn(shape, dtype=dtype) * 0.1 for _ in offsets]
        borders = [[offset] * (world - 1) for offset in offsets]
        cast_and_check(rank, masters, [spec] * len(offsets), borders)


def random_splits(rank: int, world: int, rounds: int) -> None:
    """Random weights of mixed specs, random borders: empty shards, shards of one element, borders within a tile."""
    rng = random.Random(world)
    for round_ in range(rounds):
        torch.manual_seed(round_)
        masters, specs, borders = [], [], []
        for _ in range(rng.randint(1, 5)):
            shape = rng.choice([(1, 1), (5, 3), (16, 16), (33, 40), (17, 100), (64, 48), (3, 257), (48, 130)])
            masters.append(torch.randn(shape, dtype=rng.choice([torch.float32, torch.bfloat16])))
            specs.append(rng.choice([TILE, FOUR_OVER_SIX, CLIPPING, hb.NVFP4(block=(16, 16), fp4_max=5.5)]))
            numel = shape[0] * shape[1]
            near = rng.randint(0, numel)
            pick = rng.choice(
                [lambda n=numel: rng.randint(0, n), lambda n=numel, m=near: min(n, m + rng.randint(0, 3))]
            )
            borders.append(sorted(pick() for _ in range(world - 1)))
        layout = rng.choice(["linear", "swizzled_32_4_4"])
        cast_and_check(
            rank, masters, specs, borders, scale_layout=layout, dtype=rng.choice([torch.bfloat16, torch.float32])
        )
