"""Tensors that quantized layers refuse by name: sharded ones (DTensor), and weights that others have quantized.

Torch would say that an operator got mixed tensors, or the layer would quantize what is quantized already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte.tensor.quant_tensor import QuantTensor

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Tensors of no class of their own."""

SHARDED = (
    "hb.nn.Linear multiplies tensors of torch.distributed.tensor where x and the weight both are such, as "
    "ColwiseParallel and RowwiseParallel of parallelize_module make them; leave other layers out of its plan, or keep "
    "them in high precision (rules={glob: None} of hb.quantize_), in which they run sharded. FSDP2: apply fully_shard "
    "to the module that calls the layer, such as its block, whose forward gathers whole weights"
)


class Titled(Protocol):
    """A layer that knows how to be called."""

    @property
    def title(self) -> str: ...


def is_foreign(tensor: object) -> bool:
    """Whether this is a tensor made of others that is none of ours."""
    if tensor is None:  # compiled code cannot be asked about its class
        return False
    kind = type(tensor)  # which it can, unlike the tensor
    if kind in PLAIN or not hasattr(kind, "__tensor_flatten__") or issubclass(kind, QuantTensor):
        return False
    return not hasattr(kind, "trigger_wait")  # AsyncCollectiveTensor: a plain tensor that is on its way


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor, without the seconds that importing its class takes."""
    return is_foreign(tensor) and hasattr(type(tensor), "device_mesh")


def are_sharded(*tensors: object) -> bool:
    """Whether all of these are DTensors, but for those that are None."""
    return all(tensor is None or is_sharded(tensor) for tensor in tensors)


def refuse_foreign(tensors: Sequence[tuple[str, Any]], layer: Titled | str = "") -> None:
    """Raise ValueError for the first tensor that no quantized GEMM takes.

    Args:
        tensors: each with its name, which the message says, or None.
        layer: which layer they are of; its title is asked for in case of need, compiled code would depend on it.
    """
    for name, tensor in tensors:
        if not is_foreign(tensor):
            continue
        if torch.compiler.is_compiling():  # in which an error is a riddle
            from halfbyte.functional.eager import eagerly

            eagerly(refuse, (name, tensor, layer), {})
        refuse(name, tensor, layer)


def refuse(name: str, tensor: Any, layer: Titled | str) -> None:
    """Raise the ValueError for a foreign tensor."""
    title = layer if isinstance(layer, str) else layer.title
    what = f"{title}: {name}" if title else name
    if is_sharded(tensor):
        raise ValueError(f"{what} is a DTensor, {tuple(tensor.placements)}: {SHARDED}")
    raise ValueError(
        f"{what} is a {type(tensor).__name__}, a tensor subclass with data of its own, such as torchao.quantize_ puts "
        "in place of weights: a layer follows one library's recipe. Call hb.unquantize_(model) before the other's "
        "quantize_, or leave these layers out of it (filter_fn)"
    )
