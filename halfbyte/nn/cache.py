"""hb.cache_weights: weights quantized once per optimizer step.

Without a cache every forward quantizes its weights again. With one, each weight has buffers that hold its operands for
fprop and dgrad; micro-batches, backward passes, recomputation and evaluation read them, and they are refilled in place
after every step of an optimizer that holds the weight, after `load_state_dict` and after a change of recipe. In place,
so that compiled code and CUDA graphs go on reading the same addresses. Nothing is keyed on a tensor's version counter:
fused optimizers do not advance it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from halfbyte.functional.weights import CachedWeight, Specs, cacheable, quantize_weight
from halfbyte.nn.linear import Linear, shared_amax
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.spec import Recipe
from halfbyte.tensor import QuantTensor

Filled = dict[tuple, CachedWeight]
"""What one pass over the modules has quantized: tied weights once."""


class ModuleCache:
    """The cached weights of one module.

    Args:
        module: whose weights they are.
        dtype: that its forward computes in.
        cache: of the whole model.

    Attributes:
        operands: parameter name -> its operands, the buffers that forwards read.
    """

    def __init__(self, module: FollowsRecipe, dtype: torch.dtype, cache: WeightCache) -> None:
        self.operands: dict[str, CachedWeight] = {}
        self.dtype = dtype
        self._module, self._cache = module, cache
        self._specs: Specs = cacheable(module.recipe)

    def follow(self, recipe: Recipe) -> None:
        """Hold what `recipe` needs of the weight; a recipe without any format leaves things as they are."""
        if recipe.specs and cacheable(recipe) != self._specs:
            self._specs = cacheable(recipe)
            self.refill()

    def refill(self) -> None:
        """Quantize this module's weights again, and those of siblings that share an amax with it."""
        self._cache.refill(self.weights)

    @property
    def weights(self) -> list[Tensor]:
        """The module's weights and those of its siblings."""
        group = getattr(self._module, "amax_group", ())
        return [*_weights(self._module).values(), *(member.weight for member in group)]

    def fill(self, done: Filled, amaxes: dict[int, Tensor]) -> None:
        """Quantize the module's weights into their buffers.

        Args:
            done: operands that this pass has filled; tied weights are found there.
            amaxes: of groups of siblings, computed in this pass.
        """
        if self._specs == (None, None):
            self.operands.clear()
            return
        for name, weight in _weights(self._module).items():
            group = getattr(self._module, "amax_group", ())
            key = (id(weight), self._specs, self.dtype, tuple(map(id, group)))
            if key not in done:
                done[key] = _into(self.operands.get(name), self._quantize(weight, amaxes))
            self.operands[name] = done[key]

    def _quantize(self, weight: Tensor, amaxes: dict[int, Tensor]) -> CachedWeight:
        amax = None
        if isinstance(self._module, Linear) and self._module.amax_group:
            key = id(self._module.amax_group[0])
            if key not in amaxes:
                amaxes[key] = shared_amax(self._module, self.dtype)
            amax = amaxes[key]
        decoded = self._cache.decoded and self._module.recipe.backward == "original"
        return quantize_weight(weight, self._specs, self.dtype, amax, decoded)


class WeightCache:
    """The cached weights of a model, alive until `release`; a context manager that releases at its end.

    Made by `hb.cache_weights`.
    """

    def __init__(self, modules: Iterable[FollowsRecipe], dtype: torch.dtype | None, decoded: bool) -> None:
        self.decoded = decoded
        self._caches: list[ModuleCache] = []
        self._hooks: list[Any] = []
        for module in modules:
            weight = next(iter(_weights(module).values()))
            cache = ModuleCache(module, dtype or _forward_dtype(weight), self)
            module.weight_cache = cache
            self._caches.append(cache)
        self.refill()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Refill after every step of `optimizer` the weights that it holds."""
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def refill(self, changed: Iterable[Tensor] | None = None) -> None:
        """Quantize weights again, in place: needed after they changed by other means than an optimizer or a load.

        Args:
            changed: the weights that changed; None for all.
        """
        chosen = None if changed is None else {id(t) for t in changed}
        done: Filled = {}
        amaxes: dict[int, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for cache in self._caches:
                if chosen is None or any(id(weight) in chosen for weight in cache.weights):
                    cache.fill(done, amaxes)

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        tensors = {id(t): t for cache in self._caches for one in cache.operands.values() for t in one.tensors}
        return sum(t.untyped_storage().nbytes() for t in tensors.values())

    def tensors(self) -> list[Tensor]:
        """Return the buffers of all modules, for those who count memory."""
        return [t for cache in self._caches for one in cache.operands.values() for t in one.tensors]

    def release(self) -> None:
        """Free the buffers and stop watching; forwards quantize their weights again."""
        for hook in self._hooks:
            hook.remove()
        for cache in self._caches:
            cache._module.weight_cache = None
        self._hooks.clear()
        self._caches.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        self.refill(p for group in optimizer.param_groups for p in group["params"])

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def cache_weights(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> WeightCache:
    """Quantize the weights of `model` once per optimizer step instead of in every forward; the bytes are the same.

    The cached operands take 1.125 bytes a weight with a 16x16 recipe (NVFP4 along both dimensions). They are no part of
    any state_dict, and copies of the model have none. Operands of a weight that draw random bits are not cached.

    Args:
        model: converted by `hb.quantize_`, or built of hb.nn layers.
        optimizers: those that change its weights; every step refills the weights it holds.
        dtype: that the forward computes in. None: autocast's if it is enabled now, else each weight's own.
        decoded: where GEMMs are emulated, hold the bf16 values they multiply: 4 bytes a weight, and no decoding in
            forward and backward. For small models under CUDA graphs, whose steps are made of launches.

    Returns:
        A handle with `release()`, usable in a `with` statement. Call its `refill()` after changing weights by other
        means than an optimizer's step, `load_state_dict` or `model.to`.

    Raises:
        TypeError: an optimizer is none.
        ValueError: no layer of the model follows a recipe, it is cached already, or its weights are sharded.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={type(optimizer).__name__}: give torch.optim.Optimizer objects")
    modules = [m for m in model.modules() if isinstance(m, FollowsRecipe) and _weights(m)]
    if not modules:
        raise ValueError(f"model={type(model).__name__}: no layer follows a recipe; call hb.quantize_ first")
    for module in modules:
        if module.weight_cache is not None:
            raise ValueError("model: its weights are cached already; release that cache first")
        if any(isinstance(weight, DTensor) for weight in _weights(module).values()):
            raise ValueError("model: its weights are sharded (DTensor); only whole weights can be cached")
    cache = WeightCache(modules, dtype, decoded)
    for optimizer in optimizers:
        cache.watch(optimizer)
    return cache


def _weights(module: FollowsRecipe) -> dict[str, Tensor]:
    """Return the weights that `module` itself holds, by name."""
    found = {name: getattr(module, name, None) for name in module.weight_names}
    return {
        name: weight
        for name, weight in found.items()
        if isinstance(weight, nn.Parameter) and not isinstance(weight, QuantTensor)  # which is quantized for good
    }


def _forward_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _into(old: CachedWeight | None, new: CachedWeight) -> CachedWeight:
    """Copy `new` into the buffers of `old` if they fit, else return it with buffers that nothing else refers to."""
    if old is not None and old.specs == new.specs and old.dtype == new.dtype:
        pairs = list(zip(old.tensors, new.tensors, strict=True))
        if all(a.shape == b.shape and a.device == b.device for a, b in pairs):
            for a, b in pairs:
                a.copy_(b)
            return old
    sides = []
    for operand in new[:2]:
        if operand is not None:
            # Siblings and orientations share an amax; compiled code wants every input once.
            blocks = operand.blocks._replace(amax=operand.blocks.amax.clone())
            operand = operand._replace(blocks=blocks)
        sides.append(operand)
    cached = CachedWeight(sides[0], sides[1], new.dtype)
    for tensor in cached.tensors:
        if tensor.is_cuda:  # mode="reduce-overhead" would copy them into its graph at every call
            torch._dynamo.mark_static_address(tensor)
    return cached
