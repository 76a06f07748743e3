"""The parameters of a model lie in the buffers of its ZeroOptimizer; what would part them is an error.

`model.to` and `load_state_dict` after the optimizer was built would otherwise leave a model whose steps reach nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from halfbyte.distributed.weights import transposed_tiles
from halfbyte.functional.foreign import is_sharded
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.tensor.quant_tensor import VALUE_DTYPES

UNPICKLABLE = (
    "a ZeroOptimizer cannot be copied or pickled, nor a model be pickled while one trains it: save "
    "optimizer.state_dict(), or the model after `del optimizer`"
)


_REPLACED = (
    "{} was replaced or moved, so that this optimizer's steps no longer reach it: call model.to, .float(), .half() and "
    "the like before building ZeroOptimizer"
)


class Held(NamedTuple):
    """A parameter, the module and the name that it has there, and where its values or codes lie."""

    name: str
    module: nn.Module
    own_name: str
    param: Tensor
    address: int


class Holding:
    """What an optimizer holds of a model.

    Args:
        owner: the optimizer; once it is gone, so is its hold.
        model: whose parameters they are.
        params: by name.
    """

    def __init__(self, owner: object, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self._owner = weakref.ref(owner)
        self._held = []
        for name, param in params.items():
            path, _, own_name = name.rpartition(".")
            module = model.get_submodule(path)
            self._held.append(Held(name, module, own_name, param, _address(param)))
        self._frozen = {name: param for name, param in model.named_parameters() if name not in params}
        self._trained = dict(params)
        self._model = weakref.ref(model)
        self._seen = {id(param): param for param in model.parameters()}  # kept, so that no later one has their ids
        self._ids = _parameter_ids(model)
        modules = {held.module for held in self._held}
        self.handles = [module.register_load_state_dict_pre_hook(self.refuse_to_load) for module in modules]

    def __deepcopy__(self, memo: dict[int, object]) -> Holding:
        """Return this one: it holds nothing of a copied model, which may load and move."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled with a model, whose hooks lead here."""
        raise TypeError(UNPICKLABLE)

    def check(self) -> None:
        """Raise RuntimeError if a parameter was replaced, moved or added; warn if one has thawed or was frozen."""
        self._look_for_new()
        for name in [name for name, param in self._frozen.items() if param.requires_grad]:
            del self._frozen[name]
            warnings.warn(
                f"{name} required no gradient when ZeroOptimizer was built, which does not train it: build the "
                "optimizer after the last parameter is thawed",
                stacklevel=4,
            )
        for name in [name for name, param in self._trained.items() if not param.requires_grad]:
            del self._trained[name]
            warnings.warn(
                f"{name} was frozen after ZeroOptimizer was built, whose momentum and weight decay go on to move it: "
                "build the optimizer after freezing",
                stacklevel=4,
            )
        for name, module, own_name, param, address in self._held:
            now = module._parameters.get(own_name)
            if now is not param or _address(param) != address:
                raise RuntimeError(_REPLACED.format(name))

    def _look_for_new(self) -> None:
        """Raise RuntimeError if the model has a parameter to train that nobody would; remember frozen ones."""
        model = self._model()
        ids = self._ids if model is None else _parameter_ids(model)
        if model is None or ids == self._ids:
            return
        held = {each.name for each in self._held}
        new = {name: param for name, param in model.named_parameters() if id(param) not in self._seen}
        for name in held & new.keys():
            raise RuntimeError(_REPLACED.format(name))
        untrained = [name for name, param in new.items() if param.requires_grad]
        if untrained:
            more = f" (and {len(untrained) - 1} more)" if len(untrained) > 1 else ""
            raise RuntimeError(
                f"{untrained[0]}{more} was added after ZeroOptimizer was built, which does not train it: build the "
                "optimizer after the last parameter is added, or call requires_grad_(False) on what shall stay as it is"
            )
        self._frozen.update(new)
        self._seen.update({id(param): param for param in new.values()})
        self._ids = ids

    def refuse_to_load(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *notes: Any) -> None:
        """Raise RuntimeError where a state dict would overwrite parameters that the masters overwrite in turn."""
        if self._owner() is None:
            return
        for held in self._held:
            if module._parameters.get(held.own_name) is held.param and prefix + held.own_name in state_dict:
                raise RuntimeError(
                    f"{held.name} follows the masters of a ZeroOptimizer, which would overwrite it in the next step: "
                    "load the model before building ZeroOptimizer, or use its load_state_dict"
                )


def model_problem(model: nn.Module, params: Mapping[str, Tensor], replaced: Iterable[str] | None) -> str | None:
    """Return why a ZeroOptimizer cannot train these parameters of a model, of which it replaces some, or None.

    replaced: by primary weights; None if it stores none.
    """
    if not params:
        return "model has no parameter that requires a gradient"
    if any(getattr(module, "weight_cache", None) is not None for module in model.modules()):
        return "model: its weights are cached (hb.cache_weights) and would not follow; release that cache first"
    first, device = next((name, param.device) for name, param in params.items())
    if device.type == "meta":
        return f"model: {first} is on the meta device, without values; call model.to_empty and initialize it first"
    for name, param in params.items():
        if param.device != device:
            return f"model: {name} is on {param.device}, {first} on {device}; move all of it to one device"
        if is_sharded(param):
            return (
                f"model: {name} is sharded already, as fully_shard, parallelize_module and shard_embedding_ leave it; "
                "a ZeroOptimizer shards whole parameters itself: build it for the model without fully_shard and the "
                "others; or step what they made by any torch optimizer, under fully_shard after "
                "hb.distributed.fsdp_gather_nvfp4_(model)"
            )
        if isinstance(param, PrimaryWeight) and not param.without_masters:
            return f"model: {name} exists in NVFP4 only, of an earlier ZeroOptimizer for instance; build the model anew"
        if param.dtype not in VALUE_DTYPES:
            return f"model: {name} is {param.dtype}, the masters are float32; use bfloat16, float16 or float32"
    transposed = [] if replaced is None else transposed_tiles(model)
    if transposed:
        return (
            f"model: the weight of {transposed[0]} is [in, out], of transformers' Conv1D, and "
            "cannot exist in NVFP4 only; use ZeroConfig(weights='plain')"
        )
    for name in replaced or ():
        if params[name]._backward_hooks or getattr(params[name], "_post_accumulate_grad_hooks", None):
            return f"model: {name} has hooks, and becomes another parameter: register them after building ZeroOptimizer"
    return None


def _parameter_ids(model: nn.Module) -> list[int]:
    """Return the ids of a model's parameters, module by module; quickly, for every step asks."""
    ids: list[int] = []
    modules = {id(model): model}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        ids += map(id, module._parameters.values())
        for child in module._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return ids


def _address(param: Tensor) -> int:
    return param.qdata.data_ptr() if isinstance(param, PrimaryWeight) else param.data_ptr()
