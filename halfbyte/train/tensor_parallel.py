"""A decoder whose blocks ranks share: attention by heads, the MLP or every expert by features.

All else (embedding, norms, router, head) every rank computes from weights that all have, so that activations between
layers are equal on all ranks, bit for bit. Parameters are DTensors of one mesh, as optimizers and FSDP2 want them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from halfbyte.distributed import GroupedColwise, GroupedRowwise
from halfbyte.distributed.feature_styles import share_parameters_
from halfbyte.train.moe import MoE

ATTENTION = ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", 3)
MLP = ("mlp", ("gate_proj", "up_proj"), "down_proj", 1)
"""Of a block: a module, what reads its input, what writes its output, how many arguments its forward has."""


def share_(model: Any, mesh: DeviceMesh) -> None:
    """Let the ranks of a mesh share a decoder, in place.

    Args:
        model: of `halfbyte.train.model`, converted, with equal weights on all ranks.
        mesh: of one dimension; it divides the key/value heads.
    """
    is_tied = model.lm_head.weight is model.embed_tokens.weight
    for block in model.layers:
        # All have made all weights: none sends them.
        parallelize_module(block, mesh, _plan(isinstance(block.mlp, MoE)), src_data_rank=None)
        if isinstance(block.mlp, MoE):
            _copy(block.mlp.gate, mesh)
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            _repeat(norm, mesh)
    for module in (model.embed_tokens, model.norm, model.lm_head):
        _repeat(module, mesh)
    if is_tied:
        model.lm_head.weight = model.embed_tokens.weight


def _plan(has_experts: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    if has_experts:
        plan = {"mlp.gate_up_proj": GroupedColwise(sections=2), "mlp.down_proj": GroupedRowwise()}
    for name, first, last, arguments in (ATTENTION,) if has_experts else (ATTENTION, MLP):
        whole = (Replicate(), *[None] * (arguments - 1))
        # The gradient of x is summed over the layers that read it, then once over the ranks.
        plan[name] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        plan |= {f"{name}.{projection}": ColwiseParallel() for projection in first}
        plan[f"{name}.{last}"] = RowwiseParallel()
    return plan


def _copy(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's parameters DTensors that all ranks have."""
    share_parameters_(module, lambda _, data: distribute_tensor(data, mesh, [Replicate()], src_data_rank=None))


def _repeat(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let every rank compute all of a module: its parameters are DTensors that all have, and it takes plain tensors."""
    _copy(module, mesh)

    def enter(_: nn.Module, inputs: tuple) -> tuple:
        first, *others = inputs
        return DTensor.from_local(first, mesh, (Replicate(),), run_check=False), *others

    def leave(_: nn.Module, inputs: tuple, output: Any) -> Tensor:
        return output.to_local()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
