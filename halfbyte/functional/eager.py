"""The way out of compiled code. Only what is being compiled imports this: it imports torch._dynamo, which is slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

REASON = (
    "halfbyte: layers with primary weights run eagerly (but where FSDP2 gathers codes that both passes read), as do "
    "those that ranks share, errors, and weights that are quantized anew; compile without fullgraph=True"
)


@torch.compiler.disable(reason=REASON)
def eagerly(function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return what `function` returns, uncompiled."""
    return function(*arguments, **named)
