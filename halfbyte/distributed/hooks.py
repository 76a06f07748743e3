"""What a ZeroOptimizer leaves in a model: hooks that take gradients and wait for weights, and how they end with it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfbyte.distributed.buckets import Bucket
from halfbyte.tensor.primary import PrimaryWeight

if TYPE_CHECKING:
    from halfbyte.distributed.zero import ZeroOptimizer


def after_gradient(zero: weakref.ref[ZeroOptimizer], number: int, index: int, param: Tensor) -> None:
    """Hand a gradient to the optimizer."""
    # A hook that held the optimizer would hold it for ever: the garbage collector does not see into the autograd graph.
    optimizer = zero()
    if optimizer is not None:
        optimizer._on_gradient(number, index, param)


def before_forward(buckets: list[Bucket], module: nn.Module, arguments: Any) -> None:
    """Wait for the parameters of these buckets."""
    for bucket in buckets:
        bucket.finish_gathering()


def release(buckets: list[Bucket], handles: list[RemovableHandle], params: list[Tensor]) -> None:
    """Leave a model whose optimizer is gone complete, and without what would keep masters and gradients in memory."""
    try:
        for bucket in buckets:
            bucket.finish_gathering()
    except RuntimeError:  # a rank is gone: the hooks stay, and the next forward says so
        return
    for handle in handles:
        handle.remove()
    for param in params:
        if isinstance(param, PrimaryWeight):
            param.before_use = None
