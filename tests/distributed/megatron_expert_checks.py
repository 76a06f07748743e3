"""What ranks check about experts in NVFP4 alone, called as Megatron-Core's distributed optimizer calls them."""

from __future__ import annotations

from typing import Any

import oracle
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import halfbyte as hb
from halfbyte.integrations import megatron
from halfbyte.tensor import PrimaryWeight

TILES = hb.NVFP4(block=(16, 16))
SHAPES = {"matrix": (33, 48), "experts": (3, 20, 32), "few": (5, 1, 16)}
"""Sizes that neither tiles nor 2, 3 or 4 ranks divide."""


def parameter(shape: tuple[int, ...], spec: hb.NVFP4 = TILES) -> PrimaryWeight:
    """A weight of zeros, its codes in a buffer of its own."""
    weight = PrimaryWeight.empty(shape, spec).as_parameter()
    grouped = megatron.is_grouped_nvfp4tensor(weight)
    assert grouped == (len(shape) == 3) and megatron.is_nvfp4tensor(weight) != grouped
    move = megatron.modify_grouped_nvfp4_rowwise_storage if grouped else megatron.modify_nvfp4_rowwise_storage
    packed = megatron.get_nvfp4_rowwise_packed_shape(weight.shape)
    buffer = torch.zeros(packed.numel(), dtype=torch.uint8)
    move(weight, buffer.view(packed))
    assert weight.rowwise_data.data_ptr() == buffer.data_ptr()
    return weight


def entries(weight: PrimaryWeight, main: Tensor | None, start: int) -> list[tuple[PrimaryWeight, Any, Any]]:
    """A weight as Megatron-Core hands it to the cast: of experts each with its part of the shard."""
    if not megatron.is_grouped_nvfp4tensor(weight):
        return [(weight, main, None if main is None else start)]
    stop, out, first = start + (0 if main is None else main.numel()), [], 0
    for member in megatron.get_grouped_quantized_members(weight, create_if_missing=True):
        low, high = max(first, start), min(first + member.numel(), stop)
        own = (main[low - start : high - start], low - first) if main is not None and low < high else (None, None)
        out.append((member, *own))
        first += member.numel()
    return out


def cast(weights: dict[str, PrimaryWeight], mains: dict[str, tuple[Tensor | None, int]]) -> None:
    """Quantize from shards, and gather codes as bytes: ranks that share one have both nibbles."""
    listed = [entry for name, weight in weights.items() for entry in entries(weight, *mains[name])]
    megatron.quantize_nvfp4_param_shard(*map(list, zip(*listed, strict=True)), dist.group.WORLD)
    for name, weight in weights.items():
        main, start = mains[name]
        stop = start + (0 if main is None else main.numel())
        own = weight.rowwise_data[start // 2 : -(-stop // 2)].clone() if stop > start else None
        every: list = [None] * dist.get_world_size()
        dist.all_gather_object(every, (start // 2, own))
        for begin, codes in every:
            if codes is not None:
                weight.rowwise_data[begin : begin + len(codes)] = codes
    megatron.post_all_gather_processing(list(weights.values()))


def wrong(weight: PrimaryWeight, values: Tensor) -> list[str]:
    """What of a weight is not the oracle's quantization, written element by element, of each matrix of the values."""
    matrices = values.bfloat16().float().view(-1, *values.shape[-2:])
    codes, scales = (t.view(len(matrices), values.shape[-2], -1) for t in weight.blocks[:2])
    found = []
    for i, matrix in enumerate(matrices):
        want = oracle.quantize(matrix.numpy(), weight.spec)
        low, high = codes[i] & 0xF, codes[i] >> 4
        if torch.stack((low, high), -1).flatten(1).tolist() != want.codes:
            found.append(f"codes of {i}")
        if scales[i].tolist() != want.scales:
            found.append(f"scales of {i}")
        if weight.blocks.amax.flatten()[i].item() != float(want.amax[0]):
            found.append(f"amax of {i}")
    return found


def shares(numel: int, rank: int, world: int) -> tuple[int, int]:
    """The elements of a rank, as Shard(0) of DTensor cuts a flat tensor: the last rank may have fewer, or none."""
    size = -(-numel // world)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def masters(rank: int, world: int) -> dict[str, tuple[DTensor, int]]:
    """Zeros for the fp32 main parameters: flat, of each this rank's shard."""
    mesh, out = dist.init_device_mesh("cpu", (world,)), {}
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        first, stop = shares(numel, rank, world)
        local = torch.zeros(stop - first)
        out[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((numel,)), stride=(1,)), first
    return out


def locals_of(mains: dict[str, tuple[DTensor, int]]) -> dict[str, tuple[Tensor | None, int]]:
    """This rank's shards; None where it has nothing."""
    return {name: (m.to_local() if m.to_local().numel() else None, first) for name, (m, first) in mains.items()}


def saved(rank: int, world: int, folder: str) -> list[str]:
    """Cast from odd shards, save main parameters by DCP and the codes beside them; what is not as it should be."""
    generator = torch.Generator().manual_seed(4)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    values["experts"][1] *= 37  # each expert has an amax of its own
    weights, mains = {name: parameter(shape) for name, shape in SHAPES.items()}, masters(rank, world)
    for name, (main, first) in mains.items():
        main.to_local().copy_(values[name].flatten()[first : first + main.to_local().numel()])
    cast(weights, locals_of(mains))
    found = [f"{name}: {text}" for name, weight in weights.items() for text in wrong(weight, values[name])]
    dcp.save({name: main for name, (main, _) in mains.items()}, checkpoint_id=folder)
    if rank == 0:
        torch.save(weights, f"{folder}/codes.pt")
    return found


def loaded(rank: int, world: int, folder: str) -> list[str]:
    """Load what other ranks saved; the codes of the loaded main parameters are those that were saved."""
    mains = masters(rank, world)
    dcp.load({name: main for name, (main, _) in mains.items()}, checkpoint_id=folder)
    weights = {name: parameter(shape) for name, shape in SHAPES.items()}
    cast(weights, locals_of(mains))
    codes = torch.load(f"{folder}/codes.pt", weights_only=False)
    found = []
    for name, weight in weights.items():
        again = parameter(SHAPES[name])
        with torch.no_grad():
            again.copy_(codes[name])
        for other in (codes[name], again):
            if not all(torch.equal(a, b) for a, b in zip(weight.blocks, other.blocks, strict=True)):
                found.append(name)
    return found


def trained(rank: int, world: int) -> list[str]:
    """Experts of a layer train for some steps: their bytes, outputs and gradients are those of bf16 weights."""
    shape, generator, found = (3, 24, 32), torch.Generator().manual_seed(2), []
    values = torch.randn(shape, generator=generator) / 4
    coded, plain = (
        hb.nn.GroupedLinear(3, 32, 24, recipe="nvfp4", dtype=torch.bfloat16, state=hb.RunState(0, rank=rank))
        for _ in range(2)
    )
    coded.weight = parameter(shape)
    first, stop = shares(values.numel(), rank, world)
    main, whole = values.flatten()[first:stop].clone(), values.clone()
    steppers = [torch.optim.AdamW([one.requires_grad_()], lr=0.05) for one in (main, whole)]
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    for step in range(3):
        cast({"w": coded.weight}, {"w": (main.detach(), first)})
        found += [f"step {step}: {text}" for text in wrong(coded.weight, whole.detach())]
        with torch.no_grad():
            plain.weight.copy_(whole)
        x, seen = torch.randn(9, 32, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16(), []
        for layer in (coded, plain):
            layer.weight.grad = None
            y = layer(x, ends)
            y.float().square().mean().backward()
            layer.run_state.advance()
            seen.append((y.detach(), layer.weight.grad))
        found += [] if all(map(torch.equal, *seen)) and seen[0][1].any() else [f"step {step}: y or its gradient"]
        gradient = seen[0][1].float()
        dist.all_reduce(gradient)
        whole.grad, main.grad = gradient, gradient.flatten()[first:stop].clone()
        for stepper in steppers:
            stepper.step()
    return found
