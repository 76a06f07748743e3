"""What selective activation checkpointing should keep."""

from __future__ import annotations

import torch
from torch.utils import checkpoint

from halfbyte.ops.define import PASSES

KEPT = (
    "quantize",
    "quantize_row_col",
    "quantize_residual",
    "grouped_quantize_row_col",
    "amax",
    "amax_of_all",
    "amax_with_product",
    "token_mean",
    "gemm_nt",
    "gemm_nt_batch_invariant",
    "grouped_gemm_nt",
    "grouped_gemm_nt_batch_invariant",
)


def selective_checkpoint_ops() -> list[torch._ops.OpOverload]:
    """Return the ops whose outputs are worth keeping under selective activation checkpointing.

    Quantized operands are small and GEMMs dear, so a recomputed forward should repeat neither: it repeats norms,
    activations and residual sums. Pass the list, and any of your own such as an attention op, to torch:

        ops = [*hb.selective_checkpoint_ops(), torch.ops.aten._scaled_dot_product_flash_attention.default]
        context_fn = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, ops)
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

    Returns:
        A new list.
    """
    return [*(getattr(torch.ops.halfbyte, name).default for name in KEPT), *(op.default for op in PASSES)]


def outputs_are_kept() -> bool:
    """Whether selective checkpointing keeps every output of an op that runs now, also those that only one GEMM reads.

    They should be codes then, not decoded values. Compiled code keeps what the backward needs and nothing else.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return False
    modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return any(isinstance(mode, checkpoint._CachingTorchDispatchMode) for mode in modes)
