"""A dense decoder whose blocks ranks share: attention by heads, the MLP by features, with torch's own styles.

All else (embedding, norms, head) every rank computes from weights that all have, so that activations between layers are
equal on all ranks, bit for bit. Parameters are DTensors of one mesh, as optimizers and FSDP2 want them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

HALVES = (
    ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", 3),
    ("mlp", ("gate_proj", "up_proj"), "down_proj", 1),
)
"""Of a block: a module, what reads its input, what writes its output, how many arguments its forward has."""


def share_(model: Any, mesh: DeviceMesh) -> None:
    """Let the ranks of a mesh share a decoder, in place.

    Args:
        model: of `halfbyte.train.model`, dense, converted, with equal weights on all ranks.
        mesh: of one dimension; it divides the key/value heads.
    """
    is_tied = model.lm_head.weight is model.embed_tokens.weight
    for block in model.layers:
        parallelize_module(block, mesh, _plan(), src_data_rank=None)  # all have made all weights: none sends them
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            _repeat(norm, mesh)
    for module in (model.embed_tokens, model.norm, model.lm_head):
        _repeat(module, mesh)
    if is_tied:
        model.lm_head.weight = model.embed_tokens.weight


def _plan() -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for name, first, last, arguments in HALVES:
        whole = (Replicate(), *[None] * (arguments - 1))
        # The gradient of x is summed over the layers that read it, then once over the ranks.
        plan[name] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        plan |= {f"{name}.{projection}": ColwiseParallel() for projection in first}
        plan[f"{name}.{last}"] = RowwiseParallel()
    return plan


def _repeat(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let every rank compute all of a module: its parameters are DTensors that all have, and it takes plain tensors."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        data = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        setattr(module, name, nn.Parameter(data, requires_grad=parameter.requires_grad))

    def enter(_: nn.Module, inputs: tuple) -> tuple:
        first, *others = inputs
        return DTensor.from_local(first, mesh, (Replicate(),), run_check=False), *others

    def leave(_: nn.Module, inputs: tuple, output: Any) -> Tensor:
        return output.to_local()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
