"""What torchtitan's spmd_types backend has to know of linear layers that follow a recipe, and they of it.

Under it tensors are plain, a shard is the layer's `weight`, and what lies where stands in types beside them. A layer
reads the placement of its weight from its ShardingConfig; a checker of types (debug.spmd_typechecking) is told what
comes in and goes out, and looks at nothing that happens in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import spmd_types as spmd
from torch import Tensor, nn
from torchtitan.distributed.parallel_dims import MeshAxisName

from halfbyte.distributed.plain_parts import PlainParts
from halfbyte.position import ModelHooks

TP = MeshAxisName.TP
REMEDY = "use spmd_backend='partial_dtensor', or keep the layer in high precision (rules={glob: None})"


def learn_types(layer: Any, parallel_dims: Any) -> None:
    """Tell a linear layer which part of its weight is here, and the checker of types what its forward is.

    Args:
        layer: a RecipeLinear that has yet to be parallelized.
        parallel_dims: torchtitan's, of the backend spmd_types.

    Raises:
        ValueError: ranks share the layer in a way in which its operands would not be those of one process.
    """
    sharding = layer._sharding_config
    if sharding is None:
        return
    enters: Any = spmd.Infer
    if parallel_dims.tp > 1:
        layer.as_part = _parts(layer, sharding, parallel_dims)
        enters = ({TP: spmd.V if layer.as_part.dim else spmd.R},)
    leaves = sharding.out_src_shardings or sharding.out_dst_shardings
    if leaves is None:
        layer.forward = partial(multiplied, layer.forward)
    else:
        boundary = spmd.no_typecheck(in_types=enters, out_types=(leaves.axis_types, leaves.partition_spec))
        layer.forward = boundary(layer.forward)


def _parts(layer: Any, sharding: Any, parallel_dims: Any) -> PlainParts:
    weight = sharding.state_shardings["weight"].per_axis_spmd_types().get(TP)
    shared = f"{layer.origin or layer.title}: tensor_parallel_degree={parallel_dims.tp} with spmd_backend='spmd_types'"
    if not isinstance(weight, spmd.Shard) or weight.dim not in (0, 1):
        raise ValueError(
            f"{shared}: every rank has all of its weight ({weight}), and would quantize its own part of the gradient "
            f"with an amax of its own; {REMEDY}"
        )
    if weight.dim == 1 and layer.bias is not None:
        raise ValueError(f"{shared}: its output is summed over ranks, each of which would add the whole bias; {REMEDY}")
    return PlainParts(parallel_dims.get_dense_tp_mesh(), layer.out_features, layer.in_features, weight.dim)


def multiplied(product: Callable[..., Tensor], input: Tensor, *others: Tensor) -> Tensor:
    """Return product(input, *others), unseen by the checker of types, which is told that it lies as input does."""
    if not spmd.is_type_checking():
        return product(input, *others)
    with spmd.no_typecheck():
        y = product(input, *others)
    spmd.assert_type_like(y, input)
    return y


class UntypedHooks(ModelHooks):
    """Hooks that a checker of types does not look at."""

    def _before(self, module: nn.Module, arguments: Any) -> None:
        with spmd.no_typecheck():
            super()._before(module, arguments)

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        with spmd.no_typecheck():
            super()._after(module, arguments, output)
