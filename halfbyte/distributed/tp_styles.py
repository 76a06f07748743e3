"""Styles for torch's parallelize_module whose activations travel between ranks as NVFP4 codes.

Tensor parallel layers with sequence parallel move four things: x to the layers whose rows are in parts, the gradient of
the output to those whose columns are, and sums the other way. Under torch's styles all four travel in the dtype of the
model. Under these x and that gradient travel as the operands that GEMMs read, each quantized where its tokens are:
codes, scales and, where the recipe gives every row one, amaxes. The bytes of every operand are those of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from halfbyte.distributed.feature_styles import refuse_main_grad
from halfbyte.distributed.same import agree_on_parameters
from halfbyte.distributed.tied import refuse_tied
from halfbyte.functional.sharded import run_parts
from halfbyte.nn.linear import Linear, LinearLayer, describe_recipe, gather
from halfbyte.nn.shared_input import SharedInput

STYLES = "NVFP4Colwise, NVFP4Rowwise"
"""In whose name ranks meet."""


@dataclass(frozen=True)
class _Entry:
    """How layers take x in and hand their outputs out.

    x_dim, y_dim: the dimensions of x and of the output that lie in parts; y_dim None: the last.
    """

    mesh: DeviceMesh
    x_dim: int
    y_dim: int | None
    use_local_output: bool

    def outputs(self, x: Any, layers: Sequence[LinearLayer], call: int) -> tuple[Tensor, ...]:
        """Return the outputs of layers that read x: a DTensor, or what this rank holds of it."""
        place = Shard(x.dim() - 1 if self.x_dim == -1 else self.x_dim)
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, (place,), run_check=False)
        elif x.placements != (place,):
            x = x.redistribute(placements=(place,))
        read, recipe = gather(x, layers, call, in_pass=True), layers[0].recipe
        if recipe.specs:
            outputs: Any = run_parts(x, read, recipe, None, self.y_dim)
        else:
            whole = x if self.y_dim is not None else x.redistribute(placements=(Replicate(),))
            made: list[Any] = [
                nn.functional.linear(whole, w, b) for w, b in zip(read.weights, read.biases, strict=True)
            ]
            if self.y_dim is not None:
                made = [y.redistribute(placements=(Shard(self.y_dim),)) for y in made]
            outputs = tuple(made)
        return tuple([y.to_local() if self.use_local_output else y for y in outputs])


class NVFP4Colwise(ParallelStyle):
    """Rows of weights in parts, for x whose tokens are: x travels as codes, once for all layers that are named.

    In the place of ColwiseParallel for one layer; or of PrepareModuleInput for the module that holds several and reads
    x in them alone, which then need no entry of their own in the plan.

    As under torch's styles a weight that something outside the module has too, such as an embedding tied to a head, is
    one no more: that one goes on with the whole weight, and neither learns what the other does. A style is not handed
    the model, and cannot see it. What it sees is refused.

    Args:
        names: of layers of the module that read one x, such as "q_proj", "k_proj", "v_proj"; none: the module is the
            layer.
        sequence_dim: the dimension of x that lies in parts.
        use_local_output: return what this rank holds, not a DTensor.

    Raises:
        ValueError: a name stands there twice; when applied, a weight is another layer's too, is shared already or has a
            main_grad, or ranks have other shapes or recipes.
    """

    def __init__(self, *names: str, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__()
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"names={names}: {twice!r} stands there twice; name every layer once")
        self.names, self.sequence_dim, self.use_local_output = names, sequence_dim, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers: list[Any] = [getattr(module, name, None) for name in self.names] or [module]
        for (a, one), (b, other) in combinations(zip(self.names, layers, strict=False), 2):
            if one is other and one is not None:
                raise ValueError(f"{a} and {b} are one layer; name it once")
        entry = _Entry(device_mesh, self.sequence_dim, None, self.use_local_output)
        named = dict(zip(self.names or ("",), layers, strict=True))
        _check_layers(module, named, device_mesh)
        for layer in layers:
            place_(layer, device_mesh, (Shard(0), Shard(0)), self.src_data_rank)
            layer.entry = entry
        if len(layers) > 1:
            shared = SharedInput(module, self.names)
            for layer in layers:
                layer.shared_input = shared
        return module


class NVFP4Rowwise(ParallelStyle):
    """Columns of a weight in parts, for an output whose tokens are: the gradient of it travels as codes.

    In the place of RowwiseParallel(output_layouts=Shard(sequence_dim)). Of tied weights holds what NVFP4Colwise says.

    Args:
        sequence_dim: the dimension of the output that lies in parts.
        use_local_output: return what this rank holds, not a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__()
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        _check_layers(module, {"": layer}, device_mesh)
        place_(layer, device_mesh, (Shard(1), Replicate()), self.src_data_rank)
        layer.entry = _Entry(device_mesh, -1, self.sequence_dim, self.use_local_output)
        return module


def place_(layer: Any, mesh: DeviceMesh, places: tuple, source: int | None) -> None:
    """Distribute the parameters of a layer over the ranks, in place.

    Args:
        layer: an hb.nn.Linear.
        mesh: of one dimension.
        places: of weight and bias.
        source: the rank whose values count, None for each rank's own.
    """
    for key, place in zip(("weight", "bias"), places, strict=True):
        param = getattr(layer, key)
        if param is not None:
            data = distribute_tensor(param.detach(), mesh, [place], src_data_rank=source)
            setattr(layer, key, nn.Parameter(data, requires_grad=param.requires_grad))


def _check_layers(module: nn.Module, layers: dict[str, Any], mesh: DeviceMesh) -> None:
    """Raise TypeError or ValueError if something about layers of a module does not go with DTensors."""
    for name, layer in layers.items():
        _check_layer(layer, name, mesh)
    refuse_tied(module, layers.values())
    facts = [
        (layer.title, f"{tuple(layer.weight.shape)}, {describe_recipe(layer.recipe)}") for layer in layers.values()
    ]
    agree_on_parameters(STYLES, mesh.mesh.flatten().tolist(), None, facts)


def _check_layer(layer: Any, name: str, mesh: DeviceMesh) -> None:
    if type(layer) is not Linear:
        what = f"{name}={type(layer).__name__}" if name else f"module={type(layer).__name__}"
        raise TypeError(f"{what}: the style is for hb.nn.Linear; call hb.quantize_ first, or use torch's own style")
    if mesh.ndim != 1:
        raise ValueError(f"mesh={mesh}: give a mesh of one dimension, such as mesh['tp']")
    if layer.shared_input is not None:
        raise ValueError(f"{layer.title} shares its input in a fused module: parallelize before hb.nn.fuse_, not after")
    if layer.weight_cache is not None:
        raise ValueError(f"{layer.title} has a cached weight: call release() on the cache first")
    if isinstance(layer.weight, DTensor):
        raise ValueError(f"{layer.title}: its weight is shared already; give each layer one style")
    refuse_main_grad(layer, layer.weight)
