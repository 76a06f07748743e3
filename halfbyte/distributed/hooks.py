"""What a ZeroOptimizer leaves in a model: hooks that take gradients and wait for weights, and how they end with it."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfbyte.distributed.buckets import Bucket
from halfbyte.nn.linear import LinearLayer
from halfbyte.tensor.primary import PrimaryWeight

if TYPE_CHECKING:
    from halfbyte.distributed.zero import ZeroOptimizer


def after_gradient(zero: weakref.ref[ZeroOptimizer], number: int, index: int, param: Tensor) -> None:
    """Hand a gradient to the optimizer."""
    # A hook that held the optimizer would hold it for ever: the garbage collector does not see into the autograd graph.
    optimizer = zero()
    if optimizer is not None:
        optimizer._on_gradient(number, index, param)


class TakenGradients:
    """Warns once of a `.grad` that is None because its optimizer took the gradient and has not stepped yet.

    Autograd and torch's optimizers do not read it in Python; who does, as `torch.nn.utils.clip_grad_norm_` or
    `model.zero_grad()`, takes the parameter for one without a gradient and silently does nothing.
    """

    def __init__(self) -> None:
        self.are_waiting = False
        self._was_told = False

    def tell(self) -> None:
        if self.are_waiting and not self._was_told:
            self._was_told = True
            warnings.warn(
                "a parameter's .grad was read before step() and is None: ZeroOptimizer takes gradients as they come; "
                "so torch.nn.utils.clip_grad_norm_ clips nothing and returns 0, and model.zero_grad() forgets none; "
                "give config=ZeroConfig(max_norm=...), whose step() clips and returns the norm, and call the "
                "optimizer's zero_grad()",
                stacklevel=4,
            )


def before_forward(buckets: list[Bucket], module: nn.Module, arguments: Any) -> None:
    """Wait for the parameters of these buckets."""
    wait_for(buckets)


def wait_for(buckets: list[Bucket]) -> None:
    """Let all parameters of some buckets be complete."""
    for bucket in buckets:
        bucket.finish_gathering()


def before_state_dict(buckets: list[Bucket], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Wait for the parameters of these buckets: codes of this step with scales of the last would be saved."""
    wait_for(buckets)


class LayerWaits:
    """A linear layer waits for these buckets whoever calls it, until `remove`."""

    def __init__(self, layer: LinearLayer, buckets: list[Bucket]) -> None:
        layer.before_use = partial(wait_for, buckets)
        self._layer = weakref.ref(layer)

    def remove(self) -> None:
        layer = self._layer()
        if layer is not None:
            layer.before_use = None


def release(buckets: list[Bucket], handles: list[RemovableHandle | LayerWaits], params: list[Tensor]) -> None:
    """Leave a model whose optimizer is gone complete, and without what would keep masters and gradients in memory."""
    try:
        wait_for(buckets)
    except RuntimeError:  # a rank is gone: the hooks stay, and the next forward says so
        return
    for handle in handles:
        handle.remove()
    for param in params:
        if isinstance(param, PrimaryWeight):
            param.before_use = param.on_no_grad = None
