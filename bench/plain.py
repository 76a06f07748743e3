"""The plain-torch version of an operation: the reference's own function through torch.compile, as one whole tensor.

torch.compile may drop roundings and approximate divisions, so its bytes need not be right; it is a yardstick for time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfbyte.verify.timing import Call

WHOLE = 1 << 62


@contextmanager
def _in_one_chunk() -> Iterator[None]:
    """Let the reference treat a tensor as one chunk; its loop over chunks is for CPU caches and would be unrolled."""
    module: Any = importlib.import_module("halfbyte.reference.nvfp4")
    chunk = module.CHUNK_ELEMENTS
    module.CHUNK_ELEMENTS = WHOLE
    try:
        yield
    finally:
        module.CHUNK_ELEMENTS = chunk


def compiled(function: Callable[[Tensor], Any], inputs: Sequence[Tensor]) -> list[Call]:
    """Return calls of the compiled function, one per input; eager on a CPU, where compiling takes longer than it saves.

    Args:
        function: of one tensor.
        inputs: of one shape.
    """
    if inputs[0].device.type != "cuda":
        return [lambda x=x: function(x) for x in inputs]
    torch._dynamo.reset()
    fast = torch.compile(function, dynamic=False)
    with _in_one_chunk():
        fast(inputs[0])

    def call(x: Tensor) -> Any:
        with _in_one_chunk():  # the compiled code is guarded on it
            return fast(x)

    return [lambda x=x: call(x) for x in inputs]
