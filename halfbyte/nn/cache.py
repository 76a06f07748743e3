"""hb.cache_weights: weights quantized once per optimizer step.

Without a cache every forward quantizes its weights again. With one, each weight has buffers that hold its operands for
fprop and dgrad; micro-batches, backward passes, recomputation and evaluation read them, and they are refilled in place
after every step of an optimizer that holds the weight, after `load_state_dict` and after a change of recipe. In place,
so that compiled code and CUDA graphs go on reading the same addresses. Nothing is keyed on a tensor's version counter:
fused optimizers do not advance it. A weight that lies elsewhere than the one that was quantized, or a sibling of such a
one, is quantized in every forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.weights import CachedWeight, Specs, cacheable, quantize_weight, takes_amax
from halfbyte.layout import Operand
from halfbyte.nn.linear import LinearLayer
from halfbyte.nn.sibling_amax import shared_amax
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.nn.whereabouts import Whereabouts, Written
from halfbyte.spec import Recipe
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.tensor.quant_tensor import check_value_dtype

Filled = dict[tuple, CachedWeight]
"""What one pass over the modules has quantized: tied weights once."""

Users = dict[int, list[tuple["ModuleCache", str]]]
"""Who reads operands, by their id: several modules and names where weights are tied."""


class Source(NamedTuple):
    """Where a weight is found: a parameter of the layer or of its parent, [..., N, K] or transposed."""

    owner: nn.Module
    name: str
    transposed: bool = False

    @property
    def weight(self) -> Tensor | None:
        """The parameter as it is now; None if it was parametrized, pruned, taken away or quantized for good."""
        weight = self.owner._parameters.get(self.name)
        return None if isinstance(weight, QuantTensor) else weight


class Kept(NamedTuple):
    """A weight that has been quantized.

    operands: the buffers that forwards read.
    weight: where the weight lay that they were made of.
    siblings: the same of the others that share its amax.
    """

    operands: CachedWeight
    weight: Whereabouts
    siblings: tuple[tuple[Source, Whereabouts], ...]


class ModuleCache:
    """The cached weights of one module.

    Args:
        module: whose weights they are.
        sources: parameter name -> where it is found.
        dtype: that its forward computes in.
        owner: the cache of the whole model.
    """

    def __init__(
        self, module: FollowsRecipe, sources: dict[str, Source], dtype: torch.dtype, owner: WeightCache
    ) -> None:
        self.kept: dict[str, Kept] = {}
        self.sources, self.dtype, self.owner = sources, dtype, owner
        self._module = module
        self._specs: Specs = cacheable(module.recipe)
        self._decoded = self._is_decoded(module.recipe)

    @property
    def operands(self) -> list[CachedWeight]:
        """The operands of the module's weights."""
        return [kept.operands for kept in self.kept.values()]

    def follow(self, recipe: Recipe) -> None:
        """Hold what `recipe` needs of the weight; a recipe without any format leaves things as they are."""
        new = cacheable(recipe), self._is_decoded(recipe)
        if recipe.specs and new != (self._specs, self._decoded):
            self._specs, self._decoded = new
            self.refill()

    def refill(self) -> None:
        """Quantize this module's weights again, and those of siblings that share an amax with it."""
        self.owner.refill(self.weights)

    def release(self) -> None:
        """End the cache of the whole model."""
        self.owner.release()

    @property
    def weights(self) -> list[Tensor]:
        """The module's weights and those of its siblings."""
        found = (source.weight for source in (*self.sources.values(), *self._siblings()))
        return [weight for weight in found if weight is not None]

    def fill(self, done: Filled, amaxes: dict[tuple, Tensor], users: Users) -> None:
        """Quantize the module's weights into their buffers.

        Args:
            done: operands that this pass has filled; tied weights are found there.
            amaxes: of groups of siblings, computed in this pass.
            users: of the buffers before this pass.
        """
        is_moving = len({weight.device for weight in self.weights}) > 1  # its last sibling to arrive refills all
        for name in self.sources:
            key, old = self.key(name), self.kept.pop(name, None)
            if key is None or is_moving:
                continue
            weight = self.own(name)
            assert weight is not None, "it has a key"
            if key not in done:
                into = old.operands if old is not None and _is_free(users, old.operands, key) else None
                done[key] = _into(into, self._quantize(weight, amaxes))
            others = [one for one in self._siblings() if one.owner is not self._module]
            siblings = tuple((one, Whereabouts(other)) for one in others if (other := one.weight) is not None)
            self.kept[name] = Kept(done[key], Whereabouts(weight), siblings)

    def key(self, name: str) -> tuple | None:
        """Return what the operands of a weight depend on, None if there is nothing to be kept of it."""
        source, siblings = self.sources[name], self._siblings()
        found = [one.weight for one in (source, *siblings)]
        if self._specs == (None, None) or any(weight is None for weight in found):
            return None
        return (source.transposed, self._specs, self._decoded, self.dtype, *map(id, found))

    def own(self, name: str) -> Tensor | None:
        """Return the module's weight, [..., N, K]; None if there is none to be cached."""
        source = self.sources[name]
        weight = source.weight
        return weight.mT if source.transposed and weight is not None else weight

    def operands_of(self, name: str, weight: Tensor) -> CachedWeight | None:
        """Return the operands of a weight; None if `weight`, or one that shares its amax, is not as it was quantized.

        Args:
            name: of the parameter.
            weight: [..., N, K], that the forward multiplies by.
        """
        kept = self.kept.get(name)
        if kept is None or torch.compiler.is_compiling():
            return None if kept is None else kept.operands
        if torch._C._are_functorch_transforms_active() or not kept.weight.are_of(weight):
            return None
        for sibling, whereabouts in kept.siblings:
            now = sibling.weight
            if now is None or not whereabouts.are_of(now):
                return None
        return kept.operands

    def _siblings(self) -> tuple[Source, ...]:
        """Return where the weights are, its own included, whose amax the module's operands take."""
        if not any(map(takes_amax, self._specs)):
            return ()
        return tuple(Source(member, "weight") for member in getattr(self._module, "amax_group", ()))

    def _is_decoded(self, recipe: Recipe) -> bool:
        reads_codes = recipe.backward == "dequantized" or recipe.channels is not None
        return self.owner.decoded and not reads_codes

    def _quantize(self, weight: Tensor, amaxes: dict[tuple, Tensor]) -> CachedWeight:
        amax = None
        if isinstance(self._module, LinearLayer) and self._siblings():
            key = id(self._module.amax_group[0]), self.dtype
            if key not in amaxes:
                amaxes[key] = shared_amax(self._module, self.dtype)
            amax = amaxes[key]
        return quantize_weight(weight, self._specs, self.dtype, amax, self._decoded)

    def __reduce__(self) -> tuple:
        """Leave copies of the module without a cache, those too that a parametrization makes of it."""
        return type(None), ()


class WeightCache:
    """The cached weights of a model, alive until `release`; a context manager that releases at its end.

    Made by `hb.cache_weights`.
    """

    def __init__(
        self, found: Iterable[tuple[FollowsRecipe, dict[str, Source]]], dtype: torch.dtype | None, decoded: bool
    ) -> None:
        self.decoded = decoded
        self._caches: list[ModuleCache] = []
        self._hooks: list[Any] = []
        for module, sources in found:
            cache = ModuleCache(module, sources, dtype or _forward_dtype(sources), self)
            module.weight_cache = cache
            self._caches.append(cache)
        try:
            self.refill()
        except BaseException:  # out of memory, for one: the caller has no handle to release
            self.release()
            raise

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Refill after every step of `optimizer` the weights that it holds."""
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def refill(self, changed: Iterable[Tensor] | None = None) -> None:
        """Quantize weights again, in place: needed after they changed by other means than an optimizer or a load.

        Args:
            changed: the weights that changed, or buffers that they are views of; None for all.
        """
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            eagerly(self._refill, (changed,), {})
        else:
            self._refill(changed)

    def _refill(self, changed: Iterable[Tensor] | None) -> None:
        written = None if changed is None else Written(changed)
        done: Filled = {}
        amaxes: dict[tuple, Tensor] = {}
        users = self._users()
        with torch.inference_mode(False), torch.no_grad():
            for cache in self._caches:
                if written is None or any(map(written.reaches, cache.weights)):
                    cache.fill(done, amaxes, users)

    def _users(self) -> Users:
        users: Users = {}
        for cache in self._caches:
            for name, kept in cache.kept.items():
                users.setdefault(id(kept.operands), []).append((cache, name))
        return users

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        tensors = {id(t): t for t in self.tensors()}
        return sum(t.untyped_storage().nbytes() for t in tensors.values())

    def tensors(self) -> list[Tensor]:
        """Return the buffers of all modules, for those who count memory."""
        return [t for cache in self._caches for one in cache.operands for t in one.tensors]

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

    def __reduce__(self) -> tuple:
        """Hold nothing of a copied model."""
        return type(self), ((), None, self.decoded)

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
        decoded: where GEMMs are emulated, hold the values they multiply: 4 bytes a weight (8 on a CPU), and no
            decoding in forward and backward. For small models under CUDA graphs, whose steps are made of launches.

    Returns:
        A handle with `release()`, usable in a `with` statement. Call its `refill()` after changing weights by other
        means than an optimizer's step, `load_state_dict` or `model.to`.

    Raises:
        TypeError: an optimizer is none, or forwards would compute in another dtype than bf16, fp16 or fp32.
        ValueError: no layer of the model follows a recipe, it is cached already, its weights are sharded or exist in
            NVFP4 only, or optimizers are given that do not hold all that are trained, such as one that steps masters,
            or one is LBFGS.
    """
    from torch.distributed.tensor import DTensor  # importing it takes longer than all of halfbyte

    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={type(optimizer).__name__}: give torch.optim.Optimizer objects")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "optimizer=LBFGS: one step of it runs the model at several weights, which no cache follows; leave the "
                "cache out"
            )
    found = _sources(model)
    if not found:
        raise ValueError(_nothing_found(model))
    for module, sources in found:
        if module.weight_cache is not None:
            raise ValueError("model: its weights are cached already; release that cache first")
        if any(isinstance(source.weight, DTensor) for source in sources.values()):
            raise ValueError("model: its weights are sharded (DTensor); only whole weights can be cached")
        if getattr(module, "as_part", None) is not None:
            raise ValueError("model: ranks share its layers, and hold parts of weights; only whole ones can be cached")
        computes_in = dtype or _forward_dtype(sources)
        check_value_dtype("dtype", computes_in, "name the dtype that forwards compute in, such as torch.bfloat16")
    _check_held(found, optimizers)
    cache = WeightCache(found, dtype, decoded)
    for optimizer in optimizers:
        cache.watch(optimizer)
    return cache


def _nothing_found(model: nn.Module) -> str:
    """Say why no weight of the model can be cached."""
    layers = [module for module in model.modules() if isinstance(module, FollowsRecipe)]
    if not layers:
        return f"model={type(model).__name__}: no layer follows a recipe; call hb.quantize_ first"
    if any(isinstance(getattr(layer, "weight", None), PrimaryWeight) for layer in layers):
        return (
            "model: its weights are primary weights, which exist in NVFP4 only: forwards read their bytes as they are; "
            "leave the cache out"
        )
    return "model: its layers hold no weights as Parameters of their own; leave the cache out"


def _check_held(
    found: list[tuple[FollowsRecipe, dict[str, Source]]], optimizers: tuple[torch.optim.Optimizer, ...]
) -> None:
    """Raise ValueError if weights are trained and no step of the optimizers given would refill one of them."""
    held = Written(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    weights = [(module, s.weight) for module, sources in found for s in sources.values()]
    trained = [(module, weight) for module, weight in weights if weight is not None and weight.requires_grad]
    left_out = [module.title for module, weight in trained if not held.reaches(weight)]
    if optimizers and trained and len(left_out) == len(trained):
        raise ValueError(
            "optimizers: they hold none of the trained weights that would be cached, so no step of theirs would refill "
            "them; pass the optimizer of the model's own Parameters, or hb.cache_weights(model) and refill() each step"
        )
    if optimizers and left_out:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise ValueError(
            f"optimizers: none of them holds the weight of {left_out[0]}{more}, which requires a gradient: forwards "
            "would read it as it is now. Pass the optimizer that steps it too, hb.cache_weights(model, muon, adamw); "
            "requires_grad_(False) it if none does; or pass none and call refill() after every step"
        )


def _sources(model: nn.Module) -> list[tuple[FollowsRecipe, dict[str, Source]]]:
    """Return the layers that follow recipes, each with where its weights are; layers without any are left out."""
    found: list[tuple[FollowsRecipe, dict[str, Source]]] = []
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for module in model.modules():
        if not isinstance(module, FollowsRecipe):
            continue
        held_as: Any = getattr(module, "held_as", None)
        names: tuple[str, ...] = module.weight_names
        if held_as is not None and id(module) in parents:
            sources = {"weight": Source(parents[id(module)], *held_as)}
        else:
            sources = {name: Source(module, name, module.transposed) for name in names}
        sources = {name: source for name, source in sources.items() if source.weight is not None}
        if sources:
            found.append((module, sources))
    return found


def _forward_dtype(sources: dict[str, Source]) -> torch.dtype:
    weight = next(iter(sources.values())).weight
    assert weight is not None, "sources without a weight are left out"
    return autocast_dtype(weight.device) or weight.dtype


def _is_free(users: Users, operands: CachedWeight, key: tuple) -> bool:
    """Whether buffers may be filled anew: all that read them, tied weights, want these operands."""
    readers = users.get(id(operands), [])
    return len(readers) < 2 or all(cache.key(name) == key for cache, name in readers)


def _into(old: CachedWeight | None, new: CachedWeight) -> CachedWeight:
    """Copy `new` into the buffers of `old` if they fit, else return it with buffers that nothing else refers to."""
    if old is not None and old.specs == new.specs and old.dtype == new.dtype:
        pairs = list(zip(old.tensors, new.tensors, strict=True))
        if all(a.shape == b.shape and a.device == b.device for a, b in pairs):
            for a, b in pairs:
                a.copy_(b)
            return old
    sides: list[Operand | None] = []
    for operand in new[:2]:
        assert not isinstance(operand, Tensor), "values are never cached"
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
