"""Where the values of a weight lie: how cached operands are known to be those of the weight at hand.

A tensor's address says nothing once its memory was given back: the next allocation, a storage's bookkeeping included,
often gets the same one. So the storage is held weakly. That keeps none of its bytes, but no other storage can take its
place in memory as long as it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_PLAIN = (nn.Parameter, Tensor)


class Whereabouts:
    """The storage of a tensor and the part of it that the tensor views.

    Args:
        t: the tensor; neither it nor its memory is kept alive.
    """

    __slots__ = ("_storage", "_view")

    def __init__(self, t: Tensor) -> None:
        self._storage = StorageWeakRef(t.untyped_storage())
        self._view = _view(t)

    def are_of(self, t: Tensor) -> bool:
        """Whether t reads the very memory, and reads it in the same way; what was written there since is not seen."""
        return t.untyped_storage()._cdata == self._storage.cdata and _view(t) == self._view

    def __reduce__(self) -> tuple:
        """Refuse to be copied: the weak reference would be given back twice."""
        raise TypeError("where a tensor lies holds of no copy of it")


def _view(t: Tensor) -> tuple:
    # Tensors without memory of their own, such as fake ones, warn when they are asked for its address.
    start = t.data_ptr() if type(t) in _PLAIN else t.storage_offset()
    return start, t.shape, t.stride(), t.dtype, t.is_neg()


class Written:
    """Tensors that were written to, to be asked which others share memory with them.

    Args:
        tensors: those that were written to.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._ids: set[int] = set()
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._alive = list(tensors)
        for t in self._alive:
            self._ids.add(id(t))
            if _is_plain(t):
                self._ranges.setdefault(t.untyped_storage()._cdata, []).append(_range(t))

    def reaches(self, t: Tensor) -> bool:
        """Whether t is one of the tensors or overlaps one, as parameters do that are views of one flat buffer."""
        if id(t) in self._ids:
            return True
        if not self._ranges or not _is_plain(t):
            return False
        start, end = _range(t)
        others = self._ranges.get(t.untyped_storage()._cdata, [])
        return any(start < other_end and other_start < end for other_start, other_end in others)


def _is_plain(t: Tensor) -> bool:
    return type(t) in _PLAIN and t.layout == torch.strided


def _range(t: Tensor) -> tuple[int, int]:
    """Return the first byte of t within its storage and the one behind its last."""
    start, itemsize = int(t.storage_offset()), t.itemsize
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(t.shape, t.stride(), strict=True))
    return start * itemsize, (start + last + 1) * itemsize if t.numel() else start * itemsize
