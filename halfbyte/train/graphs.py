"""A training step as a CUDA graph: captured once, then replayed without a launch from Python.

Everything that changes between steps lies in device tensors at fixed addresses: tokens, learning rate, the RunState's
position (so every replay draws other random bits, those that an eager step would draw there), optimizer state and
cached weights. The first steps run eagerly: they compile kernels and allocate state, and they count as steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

WARM_UP = 3
"""Eager steps before the capture; torch's own advice for autograd under graphs."""


class Memory(NamedTuple):
    """Bytes of a GPU between two steps: in tensors, in tensors at the peak of a step, all that this process can get."""

    held: int
    peak: int
    available: int

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        """Return those of a device, the peak since torch's statistics were reset."""
        free, _ = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return cls(held, torch.cuda.max_memory_allocated(device), free + reserved)


def shortage(memory: Memory) -> str:
    """Say why a captured step does not fit, "" if it does.

    A graph keeps what its step took; validation, which runs beside it, takes no more than a step.
    """
    needed = 2 * memory.peak - memory.held
    if needed <= memory.available:
        return ""
    numbers = (f"{count / 2**30:.1f} GiB" for count in (needed, memory.available))
    return "a captured step and a validation beside it may take {}, and the GPU has {}".format(*numbers)


class GraphedStep:
    """Replays `compute` on new inputs; on a CPU it just runs it.

    Args:
        compute: from tensors to tensors; it reads nothing on the host, and its side effects are in place.
        device: where.
        must_fit: stay eager and say so once if the memory may not suffice for a graph and another step beside it.
    """

    def __init__(
        self, compute: Callable[..., tuple[Tensor, ...]], device: torch.device, *, must_fit: bool = False
    ) -> None:
        self._compute, self._device, self._must_fit = compute, device, must_fit
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        """Forget the graph: what it recorded, such as a recipe, has changed."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()
        self._eager_steps = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what `compute` returns, in tensors that the next call leaves alone."""
        if self._stream is None:
            return self._compute(*inputs)
        if self._eager_steps < WARM_UP:
            self._eager_steps += 1
            return self._aside(self._stream, inputs)
        if self._graph is None:
            reason = shortage(Memory.now(self._device)) if self._must_fit else ""
            if reason:
                print(f"graph: off, {reason}; --graph on overrides that", file=sys.stderr)
                self._stream = None
                return self._compute(*inputs)
            self._capture(inputs)
        for own, new in zip(self._inputs, inputs, strict=True):
            own.copy_(new)
        assert self._graph is not None, "captured above"
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)

    def eagerly(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what `compute` returns, without a graph: a step that does more than the others."""
        return self._compute(*inputs) if self._stream is None else self._aside(self._stream, inputs)

    def _aside(self, stream: torch.cuda.Stream, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run eagerly on the stream of the capture, as allocations of autograd have to be made there."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            outputs = self._compute(*inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        for tensor in (*inputs, *outputs):
            tensor.record_stream(stream)
        return outputs

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._outputs = self._compute(*self._inputs)
