"""The amax of siblings' weights of which ranks hold parts: found once for layers that read one x, whoever calls them.

Under torch's own styles q, k and v are called one by one. Each would find the amax of all three, and the ranks would
meet three times for one number. So the first says what it found, and each of the others takes it once, as long as it
reads the same memory and no weight was written to since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.functional.foreign import PLAIN
from halfbyte.nn.whereabouts import Whereabouts

if TYPE_CHECKING:
    from halfbyte.nn.linear import LinearLayer


class GroupAmax:
    """What one layer found for its siblings.

    Args:
        layer: that found it.
        x: a DTensor, what it read.
        dtype: to which weights are rounded, None for their own.
        amax: fp32 [].
    """

    def __init__(self, layer: LinearLayer, x: Any, dtype: torch.dtype | None, amax: Tensor) -> None:
        tensors = _held(layer, x)
        self._amax, self._dtype, self._served = amax, dtype, {id(layer)}
        self._marks, self._places = _marks(tensors), [Whereabouts(held) for held in tensors[1::2]]

    @staticmethod
    def is_told(layer: LinearLayer, x: Any) -> bool:
        """Whether changes of x and of the weights in place can be told."""
        tensors = _held(layer, x)
        return PLAIN.issuperset(map(type, tensors[1::2])) and not any(t.is_inference() for t in tensors)

    def take(self, layer: LinearLayer, x: Any, dtype: torch.dtype | None) -> Tensor | None:
        """Return it for a sibling that did not have it before and would find the same, else None."""
        tensors = _held(layer, x)
        if id(layer) in self._served or dtype != self._dtype or _marks(tensors) != self._marks:
            return None
        if not all(place.are_of(held) for place, held in zip(self._places, tensors[1::2], strict=True)):
            return None
        self._served.add(id(layer))
        return self._amax

    def __reduce__(self) -> tuple:
        return type(None), ()  # copies of the layer that it is attached to


def _held(layer: LinearLayer, x: Any) -> list[Tensor]:
    """Return x and the weights of a layer's group, each with the part that is here behind it."""
    wholes: list[Any] = [x, *[member.look() for member in layer.amax_group]]
    return [t for whole in wholes for t in (whole, whole._local_tensor)]


def _marks(tensors: list[Tensor]) -> tuple:
    """Return what changes with the parts of tensors and with weights; wrappers of x are made for every layer."""
    return tuple([t._version for t in tensors[1:]])
