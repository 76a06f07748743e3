"""What ranks check about the cast of primary weights; every function runs on every rank."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.distributed import agree, cast_master_weights_to_nvfp4, partial_cast
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


def two_ranks(rank: int, world: int) -> None:
    for spec in (TILE, FOUR_OVER_SIX):
        broken_values(rank, spec)
        fsdp_shards(rank, spec)
    prepared_once(rank)
    memory_of_the_caller(rank)
    absent_shards(rank)
    shared_amax(rank)
    mismatches(rank)


def broken_values(rank: int, spec: hb.NVFP4) -> None:
    """NaN in one shard poisons exactly its tile on every rank, and its finite neighbours still count for the amax."""
    master = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    whole = master.clone()
    for row, col, value in ((3, 20, torch.nan), (39, 49, torch.inf), (17, 0, -torch.inf)):
        whole[row, col] = value
    whole[3, 21] = 77.0  # the greatest, in a poisoned tile
    border = 3 * 50 + 21  # between the two
    weight = PrimaryWeight.empty((40, 50), spec)
    shard, at = share(whole, [border], rank)
    cast_master_weights_to_nvfp4([weight], [shard], [at], None)
    expected = hb.quantize(whole.bfloat16(), spec)
    assert weight.blocks.amax == 77.0 and torch.equal(weight.blocks.block_scale, expected.blocks.block_scale)
    poisoned = {(int(i) // 16, int(j)) for i, j in (weight.blocks.block_scale == 0x7F).nonzero()}
    assert poisoned == {(0, 1), (2, 3), (1, 0)}
    first, last = code_bytes(50, 50, at, at + shard.numel())
    assert torch.equal(weight.qdata.view(-1)[first:last], expected.qdata.view(-1)[first:last])


def fsdp_shards(rank: int, spec: hb.NVFP4) -> None:
    """Codes go to the shard's own bytes; put one after another they are the weight's, shared bytes complete in both."""
    master = torch.randn(33, 37, generator=torch.Generator().manual_seed(1))
    expected = hb.quantize(master.bfloat16(), spec)
    for border in (0, 37 * 16 + 5, 37 * 16 + 6, 700, 33 * 37):
        weight = PrimaryWeight.empty((33, 37), spec)
        shard, at = share(master, [border], rank)
        first, last = code_bytes(37, 37, at, at + shard.numel())
        codes = torch.zeros(last - first, dtype=torch.uint8)
        cast_master_weights_to_nvfp4([weight], [shard], [at], None, fsdp_shard_model_weights=[codes])
        assert torch.equal(codes, expected.qdata.view(-1)[first:last]) and not weight.qdata.any()
        assert torch.equal(weight.blocks.block_scale, expected.blocks.block_scale)


def prepared_once(rank: int) -> None:
    """Later calls with the same tensors compare nothing; the values they find are the present ones."""
    masters = [torch.randn(17 * 40), torch.randn(64 * 16)]
    weights = [PrimaryWeight.empty((17, 40)), PrimaryWeight.empty((64, 16))]
    shards = [masters[0][:301] if rank == 0 else masters[0][301:], masters[1][:512] if rank == 0 else masters[1][512:]]
    starts = [0, 0] if rank == 0 else [301, 512]
    for round_ in range(3):
        for master in masters:
            master.copy_(torch.randn(master.shape, generator=torch.Generator().manual_seed(round_)))
        cast_master_weights_to_nvfp4(weights, shards, starts, None)
        for weight, master, shard, at in zip(weights, masters, shards, starts, strict=True):
            whole = master.view(weight.shape)
            expected = hb.quantize(whole.bfloat16(), TILE).qdata.view(-1)
            first, last = code_bytes(weight.shape[1], weight.shape[1], at, at + shard.numel())
            assert torch.equal(weight.qdata.view(-1)[first:last], expected[first:last])
        with pytest.MonkeyPatch.context() as patch:  # whatever would be exchanged now is an error
            patch.setattr(partial_cast, "exchange_notes", None)
            cast_master_weights_to_nvfp4(weights, shards, starts, None)
            moved = [shard.clone() for shard in shards] if rank == 0 else shards  # one rank alone has other memory
            before = [weight.qdata.clone() for weight in weights]
            cast_master_weights_to_nvfp4(weights, moved, starts, None)
            assert all(torch.equal(weight.qdata, codes) for weight, codes in zip(weights, before, strict=True))
    with pytest.raises(ValueError, match="call post_all_gather_processing"):
        cast_master_weights_to_nvfp4(weights, shards, starts, None, manual_post_all_gather_processing=False)


def memory_of_the_caller(rank: int) -> None:
    """Codes in memory that nobody zeroed have the padding of whole weights; scales and amaxes put in later are met."""
    master = torch.randn(33, 37, generator=torch.Generator().manual_seed(2))
    expected = hb.quantize(master.bfloat16(), TILE)
    shard, at = share(master, [700], rank)
    first, last = code_bytes(37, 37, at, at + shard.numel())
    codes = torch.full((last - first,), 0xFF, dtype=torch.uint8)
    weight = PrimaryWeight.empty((33, 37), qdata=torch.full((33, 24), 0xFF, dtype=torch.uint8))
    for given in (None, [codes]):
        cast_master_weights_to_nvfp4([weight], [shard], [at], None, given)
        written = weight.qdata.view(-1)[first:last] if given is None else codes
        assert torch.equal(written, expected.qdata.view(-1)[first:last])
    for name in ("amax", "block_scale"):
        setattr(weight, name, torch.zeros_like(getattr(weight, name)))
        cast_master_weights_to_nvfp4([weight], [shard], [at], None)
        assert all(torch.equal(a, b) for a, b in zip(weight.blocks[1:], expected.blocks[1:], strict=True)), name


def absent_shards(rank: int) -> None:
    """Weights that one rank has no part of, that no rank has a part of, that have no elements; empty lists."""
    masters = [torch.randn(16, 32), None, torch.randn(0, 32), torch.randn(5, 5)]
    weights = [dirty_weight(shape, TILE, 3) for shape in ((16, 32), (20, 20), (0, 32), (5, 5))]
    untouched = weights[1].qdata.clone()
    given = [m.flatten() if m is not None and i % 2 != rank else None for i, m in enumerate(masters)]
    cast_master_weights_to_nvfp4(weights, given, [None if g is None else 0 for g in given], None)
    for i in (0, 3):
        expected = hb.quantize(masters[i].bfloat16(), TILE)
        assert torch.equal(weights[i].blocks.block_scale, expected.blocks.block_scale)
        assert torch.equal(weights[i].qdata, expected.qdata) == (given[i] is not None)
    assert torch.equal(weights[1].qdata, untouched)
    cast_master_weights_to_nvfp4([], [], [], None)
    cast_master_weights_to_nvfp4(weights[:1], [None], [None], None)


def shared_amax(rank: int) -> None:
    """Weights whose amax is one tensor have one tensor scale."""
    amax = torch.zeros(())
    masters = [torch.randn(16, 48), 9 * torch.randn(33, 16)]
    for master, seed in zip(masters, (5, 6), strict=True):
        master.copy_(master.abs().max() * torch.rand(master.shape, generator=torch.Generator().manual_seed(seed)))
        torch.distributed.broadcast(master, 0)
    weights = [PrimaryWeight.empty(tuple(m.shape), TILE, amax=amax) for m in masters]
    shards = [share(m, [100], rank) for m in masters]
    cast_master_weights_to_nvfp4(weights, [s for s, _ in shards], [at for _, at in shards], None)
    greatest = torch.stack([m.bfloat16().float().max() for m in masters]).max()
    assert torch.equal(amax, greatest)
    for weight, master in zip(weights, masters, strict=True):
        expected = hb.quantize(master.bfloat16(), TILE, amax=greatest)
        assert torch.equal(weight.blocks.block_scale, expected.blocks.block_scale)


def mismatches(rank: int) -> None:
    """What differs between ranks, or is wrong on one, is an error on all of them."""

    def cast(shape, spec, start, length, count=1, **options) -> None:
        weights = [PrimaryWeight.empty(shape, spec) for _ in range(count)]
        cast_master_weights_to_nvfp4(weights, [torch.ones(length)] * count, [start] * count, None, **options)

    half = {0: (0, 128), 1: (128, 128)}[rank]
    wrong = {
        r"model_weights\[0\] is .* on rank 0 and .* on rank 1": [
            lambda: cast(((16, 16), (8, 32))[rank], TILE, *half),
            lambda: cast((16, 16), (TILE, FOUR_OVER_SIX)[rank], *half),
        ],
        "has 1 weights on rank 0 and 2 on rank 1": [lambda: cast((16, 16), TILE, *half, count=1 + rank)],
        r"two ranks hold the elements 0 to 127": [lambda: cast((16, 16), TILE, 0, 256 - 128 * rank)],
        r"no rank holds the elements 120 to 127": [lambda: cast((16, 16), TILE, half[0], 120 + 8 * rank)],
        r"no rank holds the elements 250 to 255": [lambda: cast((16, 16), TILE, half[0], 128 - 6 * rank)],
        r"rank 1: master_weights\[0\] is list": [
            lambda: cast_master_weights_to_nvfp4(
                [PrimaryWeight.empty((16, 16))], [(torch.zeros(256), [0.0] * 256)[rank]], [0], None
            )
        ],
        r"rank 1: model_weights\[0\] is NoneType": [
            lambda: cast_master_weights_to_nvfp4(
                [(PrimaryWeight.empty((16, 16)), None)[rank]], [torch.zeros(256)], [0], None
            )
        ],
        r"rank 1: start_offsets\[0\]=200": [lambda: cast((16, 16), TILE, 200 * rank, 128)],
        r"rank 1: start_offsets\[0\]=None": [lambda: cast((16, 16), TILE, (0, None)[rank], 128)],
        "manual_post_all_gather_processing=False: the group has 2 ranks": [
            lambda: cast((16, 16), TILE, *half, manual_post_all_gather_processing=False)
        ],
        r"rank 1: fsdp_shard_model_weights has 2 entries for 1": [
            lambda: cast((16, 16), TILE, *half, fsdp_shard_model_weights=(None, [None, None])[rank])
        ],
        r"rank 1: fsdp_shard_model_weights\[0\]: give contiguous uint8 \[64\]": [
            lambda: cast((16, 16), TILE, *half, fsdp_shard_model_weights=([None], [torch.zeros(3)])[rank])
        ],
    }
    for message, calls in wrong.items():
        for call in calls:
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "AGREE_TIMEOUT", timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"ranks \[1\] did not make the same call within 0.3 s"):
                cast((16, 16), TILE, *half)
    torch.distributed.barrier()
    cast((16, 16), TILE, *half)  # and afterwards the ranks meet again
    moved_on_one_rank(rank, half)


def moved_on_one_rank(rank: int, half: tuple[int, int]) -> None:
    """Where a rank's codes and scales lie is its own concern; what is cast is not what lay there before."""
    start, n = half
    values = torch.randn(256, generator=torch.Generator().manual_seed(0))
    weight, master = PrimaryWeight.empty((16, 16)), values[start : start + n].clone()
    cast_master_weights_to_nvfp4([weight], [master], [start], None)
    if rank == 1:
        weight.qdata = torch.zeros_like(weight.qdata)
        weight.block_scale = torch.zeros_like(weight.block_scale)
    master.mul_(3)
    cast_master_weights_to_nvfp4([weight], [master], [start], None)
    whole = hb.quantize((3 * values).view(16, 16).bfloat16(), TILE)
    assert torch.equal(weight.qdata.view(-1)[start // 2 :][: n // 2], whole.qdata.view(-1)[start // 2 :][: n // 2])
    assert torch.equal(weight.block_scale.view(torch.uint8), whole.block_scale.view(torch.uint8))
    spread = torch.zeros(2 * n)
    spread[:n] = master
    cast_master_weights_to_nvfp4([weight], [spread[:n]], [start], None)
    with pytest.raises(ValueError, match=r"master_weights\[0\] is torch.float32 with strides \(2,\)"):
        cast_master_weights_to_nvfp4([weight], [spread[::2]], [start], None)


def moving_borders(rank: int, world: int) -> None:
    """Of three ranks two move the border between them, which the third cannot see; it need not wait for anything."""
    for spec in (TILE, FOUR_OVER_SIX):
        masters = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in ((16, 16), (40, 33))]
        weights = [PrimaryWeight.empty(tuple(master.shape), spec) for master in masters]
        for borders in (
            [[100, 150], [300, 900]],
            [[100, 200], [300, 900]],  # for rank 0 all is as before
            [[100, 201], [300, 901]],  # within a byte
            [[100, 100], [300, 1320]],  # rank 1 has nothing, or rank 2
            [[100, 256], [300, 300]],
            [[60, 256], [299, 300]],  # now for rank 2
            [[60, 256], [7, 300]],
        ):
            before = [weight.qdata.clone().view(-1) for weight in weights]
            shards = [share(master, edges, rank) for master, edges in zip(masters, borders, strict=True)]
            cast_master_weights_to_nvfp4(weights, [s for s, _ in shards], [at for _, at in shards], None)
            for weight, old, master, (shard, at) in zip(weights, before, masters, shards, strict=True):
                check_bytes(weight, old, master, at, at + shard.numel())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(partial_cast, "exchange_notes", None)  # what has been compared is not compared again
                cast_master_weights_to_nvfp4(weights, [s for s, _ in shards], [at for _, at in shards], None)
        shards_that_change_places(rank, spec)
    mistakes_of_one_rank(rank)


def shards_that_change_places(rank: int, spec: hb.NVFP4) -> None:
    """Two ranks exchange shards of one size, so that only their starts are others."""
    master = torch.randn(17, 30, generator=torch.Generator().manual_seed(9))
    weight = PrimaryWeight.empty((17, 30), spec)
    for places in ((0, 1, 2), (0, 2, 1), (1, 0, 2)):
        shard, at = share(master, [170, 340], places[rank])
        before = weight.qdata.clone().view(-1)
        cast_master_weights_to_nvfp4([weight], [shard], [at], None)
        check_bytes(weight, before, master, at, at + 170)


def mistakes_of_one_rank(rank: int) -> None:
    """After calls that were right one rank comes with something else: all hear of it, no byte changes, and go on."""
    master = torch.randn(16, 16, generator=torch.Generator().manual_seed(8))
    weight = PrimaryWeight.empty((16, 16), FOUR_OVER_SIX)
    shard, at = share(master, [100, 150], rank)

    def cast(values: Tensor, start: int | None, **options) -> None:
        cast_master_weights_to_nvfp4([weight], [values], [start], None, **options)

    cast(shard, at)
    held = [block.clone() for block in weight.blocks[:3]]
    for values, start, message in (
        (torch.zeros(50, 2)[:, 0], at, r"rank 1: master_weights\[0\] is torch.float32 with strides"),
        (torch.zeros(60), at, "two ranks hold the elements 150 to 159"),
        (torch.zeros(40), at, "no rank holds the elements 140 to 149"),
        (torch.zeros(50), 230, r"rank 1: start_offsets\[0\]=230"),
        (torch.zeros(50), "x", r"rank 1: start_offsets\[0\]='x'"),
    ):
        with pytest.raises(ValueError, match=message):
            cast(*((values, start) if rank == 1 else (shard, at)))
    with pytest.raises(ValueError, match="rank 1: master_weights is NoneType"):
        cast_master_weights_to_nvfp4([weight], None if rank == 1 else [shard], [at], None)
    with pytest.raises(ValueError, match="rank 1: manual_post_all_gather_processing=False"):
        cast(shard, at, manual_post_all_gather_processing=rank != 1)
    assert all(torch.equal(a, b) for a, b in zip(weight.blocks[:3], held, strict=True))
    cast(shard, at)
    assert all(torch.equal(a, b) for a, b in zip(weight.blocks[:3], held, strict=True))
