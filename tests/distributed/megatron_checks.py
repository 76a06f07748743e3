"""A distributed optimizer that does what Megatron-Core's does, in its order, through our functions."""

from __future__ import annotations

import torch
import torch.distributed as dist

import halfbyte as hb
from halfbyte.integrations import megatron
from halfbyte.tensor import PrimaryWeight


class ParamAndGradBuffer:
    """One buffer of packed codes and one of full gradients; parameters start at multiples of 64 elements."""

    def __init__(self, params: list[PrimaryWeight], group) -> None:
        self.group, self.world, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.index, end = {}, 0
        for param in reversed(params):  # in the order in which backward reaches them
            start = -(-end // 64) * 64
            end = start + param.numel()
            self.index[param] = (start, end)
        self.numel = -(-end // (128 * self.world)) * 128 * self.world
        self.param_data = torch.zeros(self.numel // 2, dtype=torch.uint8)
        self.grad_data = torch.zeros(self.numel)
        for param, (start, end) in self.index.items():
            assert megatron.is_nvfp4tensor(param)
            packed = megatron.get_nvfp4_rowwise_packed_shape(param.shape)
            megatron.modify_nvfp4_rowwise_storage(param, self.param_data[start // 2 : end // 2].view(packed))
            param.main_grad = self.grad_data[start:end].view(param.shape)

    def shard(self, buffer: torch.Tensor) -> torch.Tensor:
        size = buffer.numel() // self.world
        return buffer[self.rank * size : (self.rank + 1) * size]


class DistributedOptimizer:
    """fp32 main parameters: of each parameter the part that lies in this rank's share of the buffer, or none."""

    def __init__(self, buffer: ParamAndGradBuffer, values: dict) -> None:
        self.buffer, self.main, self.offsets = buffer, {}, {}
        share = buffer.numel // buffer.world
        low = buffer.rank * share
        for param, (start, end) in buffer.index.items():
            first, last = max(start, low), min(end, low + share)
            if first < last:
                self.main[param] = values[param].flatten()[first - start : last - start].clone()
                self.main[param].requires_grad_()
                self.offsets[param] = first - start, first - low
        self.optimizer = torch.optim.AdamW([*self.main.values(), torch.zeros(0)], lr=0.05)

    def step(self) -> None:
        buffer = self.buffer
        buffer.grad_data /= buffer.world
        dist.reduce_scatter_tensor(buffer.shard(buffer.grad_data), buffer.grad_data, group=buffer.group)
        own = buffer.shard(buffer.grad_data)
        for param, main in self.main.items():
            at = self.offsets[param][1]
            main.grad = own[at : at + main.numel()]
        self.optimizer.step()
        self.copy_main_params_to_model_params()
        dist.all_gather_into_tensor(buffer.param_data, buffer.shard(buffer.param_data), group=buffer.group)
        megatron.post_all_gather_processing(list(buffer.index))
        buffer.grad_data.zero_()

    def copy_main_params_to_model_params(self) -> None:
        params = list(self.buffer.index)
        mains = [self.main[param].detach() if param in self.main else None for param in params]
        offsets = [self.offsets[param][0] if param in self.main else None for param in params]
        megatron.quantize_nvfp4_param_shard(params, mains, offsets, self.buffer.group)


def train_as_megatron_does(rank: int, world: int) -> None:
    """Codes, scales and both orientations are those of quantizing the whole main parameters, in every step."""
    torch.manual_seed(0)
    state = hb.RunState(0, rank=rank)
    sizes = ((48, 96), (96, 80), (80, 32))
    layers = [hb.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, state=state) for k, n in sizes]
    values, params = {}, []
    for layer in layers:
        weight = PrimaryWeight.empty(tuple(layer.weight.shape))
        weight.allocate_turned()
        param = weight.as_parameter()
        values[param] = layer.weight.detach().float()
        layer.weight = param
        params.append(param)
    buffer = ParamAndGradBuffer(params, dist.group.WORLD)
    optimizer = DistributedOptimizer(buffer, values)
    whole = torch.optim.AdamW([value.requires_grad_() for value in values.values()], lr=0.05)
    model = torch.nn.Sequential(*layers)
    for step in range(4):
        x = torch.randn(32, 48, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        if step:
            model(x).float().square().mean().backward()  # into main_grad
            state.advance()
        for param, value in values.items():
            assert param.grad is None
            value.grad = param.main_grad.clone() / world
            dist.all_reduce(value.grad)
        whole.step()
        optimizer.step()
        for param, value in values.items():
            expected = hb.quantize(value.detach().bfloat16(), param.spec)
            assert all(torch.equal(a, b) for a, b in zip(param.blocks, expected.blocks, strict=True)), step
            turned = expected.transpose()
            assert torch.equal(param.turned.qdata, turned.qdata)
            assert torch.equal(param.turned.block_scale, turned.block_scale.view(torch.uint8))
            assert param.qdata.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
