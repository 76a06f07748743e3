"""A block of the Llama family under torch's tensor and sequence parallel plan, each layer beside a whole one."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from tensor_parallel_checks import ALL, differing_operands, recorded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import halfbyte as hb


class Attention(nn.Module):
    """Grouped-query attention over the heads that are here."""

    def __init__(self, dim: int, heads: int, groups: int):
        super().__init__()
        self.size = dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, groups * self.size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 8, groups: int = 4, hidden: int = 144):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.self_attn, self.mlp = Attention(dim, heads, groups), Mlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def sequence_plan(colwise=ColwiseParallel, rowwise=RowwiseParallel) -> dict:
    """Return the plan of torch's tutorial: tokens in parts between the layers, features inside them."""
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": gathered,
        "mlp": gathered,
        **{f"self_attn.{name}_proj": colwise() for name in "qkv"},
        "self_attn.o_proj": rowwise(output_layouts=Shard(1), use_local_output=False),
        **{f"mlp.{name}_proj": colwise() for name in ("gate", "up")},
        "mlp.down_proj": rowwise(output_layouts=Shard(1), use_local_output=False),
    }


def converted(recipe: str, dtype: torch.dtype = torch.float32, blocks: int = 1, **sizes: int):
    """Return blocks in one model and its RunState, equal on all ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(**sizes) for _ in range(blocks))).to(dtype)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.view(-1)[:: p.numel() // 5] *= 20  # each sibling has another amax
    state = hb.RunState(7)
    hb.quantize_(model, ALL[recipe], keep=hb.Keep(names=(), last_fraction=0), state=state)
    return model, state


class Watch:
    """Notes of every linear layer its input, the gradient of its output (DTensors made whole), and which one runs."""

    def __init__(self, model: nn.Module):
        self.given: dict[str, list[Tensor]] = {}
        self.running = ""
        for name, module in model.named_modules():
            if isinstance(module, hb.nn.Linear):
                module.register_forward_pre_hook(self._before(name))
                module.register_forward_hook(self._after(name), prepend=True)

    def _before(self, name: str):
        def hook(module, args):
            self.running, self.given[name] = name, [args[0].full_tensor().detach().clone()]

        return hook

    def _after(self, name: str):
        def hook(module, args, y):
            y.register_hook(lambda dy: self._of_gradient(name, dy))

        return hook

    def _of_gradient(self, name: str, dy) -> None:
        self.running = name
        self.given[name].append(dy.full_tensor().detach().clone())


def layers_in(model: nn.Module, x: Tensor) -> tuple[dict, dict]:
    """Return inputs and gradients of every layer of a parallel model, and the operands that it multiplied here."""
    watch = Watch(model)
    with recorded(lambda: watch.running) as found:
        y = model(x)
        y.backward(torch.ones_like(y).mul_(0.01))
    return watch.given, {name: [one for one in found if one[2] == name] for name in watch.given}


def block_operands(rank: int, world: int, recipe: str, dtype: torch.dtype) -> list[str]:
    """Return what differs between the layers of a parallel block and whole ones with the same inputs, on rank 0."""
    warnings.simplefilter("ignore", UserWarning)
    mesh = init_device_mesh("cpu", (world,))
    model, _ = converted(recipe, dtype)
    alone = copy.deepcopy(model)
    parallelize_module(model[0], mesh, sequence_plan())
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    given, here = layers_in(model, distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_())
    every: list = [None] * world
    dist.all_gather_object(every, here)
    if rank:
        return []
    found = [] if len(given) == 7 else [f"{sorted(given)}"]
    for name, (layer_x, dy) in given.items():
        with recorded() as expected:
            y = alone.get_submodule(name)(layer_x.requires_grad_())
            y.backward(dy)
        found += [f"{name}: {line}" for line in differing_operands(expected, [one[name] for one in every])]
    return found
