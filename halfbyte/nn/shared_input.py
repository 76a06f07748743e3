"""What layers that read one tensor share: the amaxes that its norm computed, and one quantization.

A norm hands over its output with the amaxes; a linear layer that is called with exactly that tensor takes them. The
first of several siblings computes the outputs of all, and each of the others finds its own when it is called with the
same tensor. Any other tensor, also one that was changed in place since, is treated as if nothing had been handed over:
the bits never depend on it. Compiled code does not see changes in place (docs/fused.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.linear import sign_place
from halfbyte.nn.linear import Linear, forward_shared, run_alone, shareable
from halfbyte.spec import GemmSpec, Recipe, Spec

_PLAIN_GEMM = GemmSpec()


def input_specs(recipe: Recipe, need_dw: bool) -> tuple[Spec | None, Spec | None]:
    """Return how a linear layer quantizes its input: for fprop and, if a weight gradient is needed, for wgrad."""
    fprop, wgrad = (gemm or _PLAIN_GEMM for gemm in (recipe.fprop, recipe.wgrad))
    return fprop.a, wgrad.b if need_dw and recipe.backward == "original" else None


def following(layers: tuple[nn.Module, ...], device: torch.device, call: int = 0) -> ops.Following:
    """Return how `layers` will quantize the input they share; nothing if they do not share one quantization.

    Args:
        layers: siblings that read one tensor.
        device: of that tensor.
        call: as for `Linear.forward`.
    """
    first = layers[0]
    if not isinstance(first, Linear) or not shareable(layers):
        return ops.Following()
    need_dw = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)
    row, col = input_specs(first.recipe, need_dw)
    sign = None
    if col is not None and col.needs_sign_rng:
        place = first.peek(call, device)
        sign = sign_place(None if place is None else place.on(device))
    return ops.Following(row, col, sign)


def _is_watched(x: Tensor) -> bool:
    """Whether changes of x in place can be told, or are none of ours: inference tensors count no versions."""
    return torch.compiler.is_compiling() or not x.is_inference()


def _version(x: Tensor) -> int:
    """Return a number that differs once x was changed in place; compiled code cannot ask for it."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _circumstances(x: Tensor, layers: tuple[nn.Module, ...], call: int) -> tuple:
    """Return all that outputs of `layers` depend on beside x; a compiled region begins and ends with its own."""
    if torch.compiler.is_compiling():
        return (call,)
    autocast = autocast_dtype(x.device)
    parts = [
        (layer.recipe, id(layer.weight), _version(layer.weight), getattr(layer.run_state, "advances", 0))
        for layer in layers
        if isinstance(layer, Linear)
    ]
    return call, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, *parts


class SharedInput:
    """The siblings `names` of a module `owner` that read one tensor, and what is known about it.

    Args:
        owner: holds the layers; they may be replaced at any time.
        names: of the layers, the first of which draws for all (docs/fused.md).
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        self.owner, self.names = owner, names
        self._normed: Callable[[], Tensor | None] | None = None
        self._amaxes: tuple[ops.Amaxes, ops.Following] | None = None
        self._input: Tensor | None = None
        self._versions = (0, 0)  # of what was handed over, and of _input
        self._outputs: tuple[Tensor | None, ...] = ()
        self._made: tuple = ()  # how and from which weights _outputs were computed

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self.owner, name) for name in self.names)

    def give(self, y: Tensor, amaxes: ops.Amaxes, how: ops.Following) -> None:
        """Hand over the amaxes of y for layers that will quantize it as `how` says."""
        if (amaxes.row is None and amaxes.col is None) or not _is_watched(y):
            return
        # Held weakly: nobody may come for it. A compiled region sees this object from beginning to end.
        self._normed = (lambda: y) if torch.compiler.is_compiling() else weakref.ref(y)
        self._amaxes, self._versions = (amaxes, how), (_version(y), self._versions[1])

    def take(self, x: Tensor, recipe: Recipe, call: int) -> ops.Amaxes | None:
        """Return the amaxes of x if it is what was handed over, once."""
        if self._normed is None or self._amaxes is None or call != 0 or self._normed() is not x:
            return None
        if _version(x) != self._versions[0]:
            return None
        (amaxes, how), self._normed, self._amaxes = self._amaxes, None, None
        row, col = input_specs(recipe, how.col is not None)
        return ops.Amaxes(amaxes.row if row == how.row else None, amaxes.col if col == how.col else None)

    def output(self, layer: Linear, x: Tensor, call: int) -> Tensor:
        """Return one layer's output; the first layer computes those of all of them."""
        layers = self.layers
        index = next((i for i, other in enumerate(layers) if other is layer), None)
        same = self._input is x and _version(x) == self._versions[1] and self._made == _circumstances(x, layers, call)
        y = self._outputs[index] if index and same else None
        if y is not None:
            self._outputs = tuple(None if i == index else other for i, other in enumerate(self._outputs))
            if all(other is None for other in self._outputs):
                self._input = None
            return y
        if index != 0 or len(layers) == 1 or not shareable(layers) or not _is_watched(x):
            return run_alone(x, layer, call)
        y, *others = forward_shared(x, layers, call)
        self._made = _circumstances(x, layers, call)
        self._input, self._outputs, self._versions = x, (None, *others), (self._versions[0], _version(x))
        return y

    def __getstate__(self) -> dict:
        return {"owner": self.owner, "names": self.names}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["owner"], state["names"])
