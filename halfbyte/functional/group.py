"""What ranks that share a tensor tell each other; functional collectives, which compiled code can trace too."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def all_max(t: Tensor, group: str) -> Tensor:
    """Return the greatest of all ranks' values, element by element.

    Args:
        t: of one shape on all ranks.
        group: the name of their process group.
    """
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(t.contiguous(), "max", group))


def gathered(t: Tensor, axis: int, borders: tuple[int, ...], group: str) -> Tensor:
    """Return the whole of a tensor of which every rank holds a part.

    Args:
        t: this rank's part.
        axis: along which it lies in parts.
        borders: rank r holds from borders[r] to borders[r + 1].
        group: the name of the process group.
    """
    sizes = [stop - start for start, stop in pairwise(borders)]
    most = max(sizes)
    lines = t.movedim(axis, 0)
    if lines.shape[0] < most:
        lines = torch.cat((lines, lines.new_zeros(most - lines.shape[0], *lines.shape[1:])))
    ops = torch.ops._c10d_functional
    every = ops.wait_tensor(ops.all_gather_into_tensor(lines.contiguous(), len(sizes), group))
    parts = [every[rank * most : rank * most + size] for rank, size in enumerate(sizes)]
    return torch.cat(parts).movedim(0, axis)


def waited(t: Tensor) -> Tensor:
    """Return a tensor that a collective is still filling (AsyncCollectiveTensor) once it is there."""
    return t.wait() if hasattr(type(t), "trigger_wait") else t  # type: ignore[attr-defined]
