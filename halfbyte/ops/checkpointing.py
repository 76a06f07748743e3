"""What selective activation checkpointing should keep."""

from __future__ import annotations

import torch
from torch.utils import checkpoint

from halfbyte.ops import grouped_library, library  # noqa: F401  they define torch.ops.halfbyte
from halfbyte.ops.repeat import PASSES

KEPT = (
    torch.ops.halfbyte.quantize.default,
    torch.ops.halfbyte.quantize_row_col.default,
    torch.ops.halfbyte.grouped_quantize_row_col.default,
    torch.ops.halfbyte.amax.default,
    torch.ops.halfbyte.gemm_nt.default,
    torch.ops.halfbyte.grouped_gemm_nt.default,
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
    return [*KEPT, *(op.default for op in PASSES)]


def outputs_are_kept() -> bool:
    """Whether selective checkpointing keeps every output of an op that runs now, also those that only one GEMM reads.

    They should be codes then, not decoded values. Compiled code keeps what the backward needs and nothing else.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return False
    modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return any(isinstance(mode, checkpoint._CachingTorchDispatchMode) for mode in modes)
