"""What every layer with a recipe carries: the recipe, its RunState, the streams it draws from, its cached weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from halfbyte.amaxes import LayerAmaxes
from halfbyte.functional import STREAMS_PER_LINEAR
from halfbyte.functional.weights import CachedWeight, cacheable
from halfbyte.recipes import resolve
from halfbyte.rng import StreamPhilox
from halfbyte.spec import Recipe
from halfbyte.state import RunState
from halfbyte.tensor.primary import PrimaryWeight

if TYPE_CHECKING:
    from halfbyte.nn.cache import ModuleCache

CALLS_PER_STEP = 16
"""How often one module may run in a micro-batch with bits of its own."""

STREAMS_PER_MODULE = CALLS_PER_STEP * STREAMS_PER_LINEAR

STALE_FORWARDS = 64
"""Training forwards at one position after which the caller has surely forgotten `state.advance()`."""


def own_state(recipe: Recipe, state: RunState | None) -> RunState | None:
    """Return the RunState for layers built with these: a private one if it is None and the recipe needs one."""
    needs_one = recipe.needs_rng or recipe.amax is not None
    return RunState.private() if state is None and needs_one else state


_Base: Any = torch.nn.Module if TYPE_CHECKING else object


@contextmanager
def _unless_moved(parameters: dict[str, Any], fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Set a primary weight aside that `fn` returns as it is: torch would swap it for a copy without its hooks."""
    weight = parameters.get("weight")
    with torch.no_grad():
        stays = isinstance(weight, PrimaryWeight) and fn(weight) is weight
    if stays:
        parameters["weight"] = None
    try:
        yield
    finally:
        if stays:
            parameters["weight"] = weight


_OWN = (
    *("_recipe", "_shift", "_stale", "_stream", "amax_group", "amaxes", "as_part", "before_use", "called", "entry"),
    *(
        "group_amax",
        "instead",
        "kept",
        "ledger",
        "places",
        "recipe_before",
        "run_state",
        "shared_input",
        "times_aside",
        "values_to_read",
        "weight_cache",
        "weight_to_read",
    ),
)
"""What layers with a recipe have on top of the modules that they were converted from."""

_OF_A_CLASS = ("__dict__", "__weakref__", "__doc__", "__module__")


def check_run_number(call: int) -> None:
    """Raise TypeError or ValueError unless `call` is one of the runs of a module for which there are bits."""
    if type(call) is int and 0 <= call < CALLS_PER_STEP:
        return
    if isinstance(call, bool) or not isinstance(call, int):
        raise TypeError(f"call={call!r}: give an int, 0, 1, … for the first, second, … run of the module")
    if not 0 <= call < CALLS_PER_STEP:
        raise ValueError(f"call={call}: a module has bits for {CALLS_PER_STEP} runs a micro-batch, 0 <= call < 16")


def name_layers(model: torch.nn.Module) -> None:
    """Tell layers with a recipe their names in `model`, which messages say."""
    for name, module in model.named_modules():
        if isinstance(module, FollowsRecipe):
            module.called = name


class FollowsRecipe(_Base):
    """Mixed into a torch module with a weight: a recipe that can change at any step, and a place to draw from."""

    weight: Tensor
    training: bool

    converted_from: type[torch.nn.Module]
    """The class of module that `to_module` returns."""

    weight_names: tuple[str, ...] = ("weight",)
    """The parameters that the layer multiplies by, as `hb.cache_weights` looks them up."""

    transposed: bool = False
    """Whether they are held as [..., K, N], not [..., N, K]."""

    recipe_before: Recipe | None = None
    """What `RunState.begin_step` replaced by its schedule's recipe."""

    kept: bool = False
    """Whether `hb.quantize_` left the layer in high precision; `hb.set_recipe_` then does so too."""

    called: str = ""
    """Its name in the model that `hb.quantize_` was given."""

    times_aside: int = 0
    """How many `hb.high_precision` contexts the layer is in."""

    instead: Callable[..., Any] | None = None
    """Called in the place of the layer's GEMMs, by modules above that watch a step or try another arithmetic; of layers
    that share one input with (x, layers, call, amaxes of x), of experts with (their work, (x, weight, offsets), layer,
    place)."""

    values_to_read: Tensor | None = None
    """What compiled code multiplies by in high precision, where codes were gathered and nothing is differentiated."""

    ledger: Tensor | None = None
    """What those that watch a step add up, on the weight's device."""

    amaxes: LayerAmaxes | None = None
    """Those of earlier steps, where the recipe says so."""

    places: Any = ()
    """Where `hb.quantize_` put the layer, a list of `ConvertedAt`, until somebody takes it out on purpose."""

    amaxes_of: int | None = None
    """How many experts have amaxes each; None for a layer of one weight."""

    def adopt(self, recipe: Recipe | str, state: RunState | None) -> None:
        recipe = resolve(recipe)
        if state is not None and not isinstance(state, RunState):
            raise TypeError(f"state={state!r}: give a RunState, such as hb.RunState(seed=0)")
        state = own_state(recipe, state)
        self.places = []
        self.weight_cache: ModuleCache | None = None
        self.recipe_before, self.kept = None, False
        self.recipe = recipe
        self._draw_from(state, late=state is not None and state.is_private)

    def _draw_from(self, state: RunState | None, *, late: bool) -> None:
        self.run_state = state
        self._note_draws()
        self.stream = 0 if state is None else state.reserve_streams(STREAMS_PER_MODULE, late=late)
        self._stale = (0, 0)  # RunState.advances when last seen, training forwards since
        self._keep_amaxes()
        if state is not None:
            state.watch(self)

    def _note_draws(self) -> None:
        state = getattr(self, "run_state", None)
        if state is not None and self._recipe.needs_rng:
            state.note_draws()

    def stop_delaying(self) -> None:
        """Let the RunState wait for this layer's amaxes no longer."""
        if self.amaxes is not None:
            self.amaxes.is_followed = False

    def _keep_amaxes(self) -> None:
        state, how = self.run_state, self._recipe.amax
        self.stop_delaying()
        self.amaxes = None if state is None or how is None else state.amaxes_of(self.stream, how, self.amaxes_of)

    def join(self, state: RunState) -> None:
        """Draw from `state`, with fresh streams, unless somebody chose this layer's RunState; a copy's nobody chose."""
        own = self.run_state
        if own is None or (own is not state and (own.is_private or own.is_copy_of(state))):
            self._draw_from(state, late=True)

    def to_module(self) -> torch.nn.Module:
        """Return the module that this was converted from, with this one's Parameters, parametrizations, hooks and mode.

        A class of layers of its own says what it goes back to by `converted_from`, or by overriding this.
        """
        cls: Any = self.converted_from
        if is_parametrized(self):  # torch makes a class for each such module, with the tensors as properties
            cls = type(type(self).__name__, (cls,), {k: v for k, v in vars(type(self)).items() if k not in _OF_A_CLASS})
        new = cls.__new__(cls)
        new.__dict__.update({name: value for name, value in self.__dict__.items() if name not in _OWN})
        new.__dict__.pop("_compiled_call_impl", None)  # of compile(): it calls this module
        if self.places:
            self.places.clear()
        return new

    @property
    def title(self) -> str:
        """How messages call the layer."""
        kind = next(f"hb.nn.{cls.__name__}" for cls in type(self).__mro__ if cls.__module__.startswith("halfbyte."))
        sizes = f"{getattr(self, 'in_features', '?')} -> {getattr(self, 'out_features', '?')}"
        return f"{self.called} ({kind}, {sizes})" if self.called else f"{kind}({sizes})"

    @property
    def stream(self) -> int:
        """The first of the module's streams."""
        return self._stream

    @stream.setter
    def stream(self, stream: int) -> None:
        self._stream = stream
        with torch.inference_mode(False):  # autograd refuses inference tensors
            self._shift = torch.tensor([0, stream], dtype=torch.int64, device="cpu")

    @property
    def recipe(self) -> Recipe:
        """How the layer quantizes; assigned as a Recipe or a preset's name. A cached weight follows when it changes."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        self._recipe = resolve(recipe)
        self._note_draws()
        if hasattr(self, "run_state"):
            self._keep_amaxes()
        if self.weight_cache is not None:
            self.weight_cache.follow(self._recipe)

    def cached_weight(self, weight: Tensor | None = None, name: str = "weight") -> CachedWeight | None:
        """Return a weight as `hb.cache_weights` quantized it for the present recipe, None if it did not.

        None also for another weight than was quantized, or if one that shares its amax is another: new data, another
        part of a buffer, a parametrization since, torch.func.functional_call. Compiled code cannot tell.

        Args:
            weight: that the forward multiplies by, by default the layer's own.
            name: of the parameter.
        """
        if self.weight_cache is None:
            return None
        if weight is None:
            weight = self.weight_cache.own(name)
        cached = None if weight is None else self.weight_cache.operands_of(name, weight)
        return cached if cached is not None and cached.specs == cacheable(self.recipe) else None

    def place(self, call: int = 0, device: torch.device | None = None) -> StreamPhilox | None:
        """Return where this layer draws in the current micro-batch, None if its recipe draws nothing.

        Args:
            call: 0, 1, … for the first, second, … run of this module within one micro-batch.
            device: where the weight is, if this module does not hold it; the RunState follows it.

        Raises:
            ValueError: there is no RunState to draw from, or `call` is out of range.
            TypeError: it is no int.
        """
        check_run_number(call)
        if not self._recipe.needs_rng:
            return None
        if self.run_state is None:
            raise ValueError(
                "run_state=None: the recipe draws random bits; "
                "use hb.set_recipe_(model, recipe, state=hb.RunState(seed))"
            )
        if not torch.compiler.is_compiling():
            self._watch_position(self.run_state)
        return self.peek(call, self.weight.device if device is None else device)

    def peek(self, call: int, device: torch.device) -> StreamPhilox | None:
        """Return the same place for a layer before this one, which prepares its input; None without a RunState."""
        state = self.run_state
        if state is None:
            return None
        if state.base.device != device and device.type != "meta":  # shapes alone: there it has no value
            state.to(device)
        if not torch.compiler.is_compiling():
            return state.philox(self._stream + call * STREAMS_PER_LINEAR)
        is_traced = device.type == "meta"
        # The same place, but its number in a tensor: layers that differ in nothing else share one compiled graph.
        if self._shift.device != device and not is_traced:
            self._shift = self._shift.to(device)
        shift = self._shift.to(device) if is_traced else self._shift
        return state.philox_shifted(call * STREAMS_PER_LINEAR, shift)

    def _watch_position(self, state: RunState) -> None:
        if not (self.training and torch.is_grad_enabled()):
            return
        seen, count = self._stale
        count = count + 1 if seen == state.advances else 1
        self.__dict__["_stale"] = (state.advances, count)  # as Module.__setattr__ would, which costs a launch
        if count == 1:
            state.ask_for_rank()
        if count == STALE_FORWARDS:
            state.say_forgotten(f"{STALE_FORWARDS} training forwards drew the same random bits")

    def __getstate__(self) -> dict[str, Any]:
        fresh = {
            "_stale": (0, 0),
            "weight_cache": None,
            "times_aside": 0,
            "values_to_read": None,
            "weight_to_read": None,
            "instead": None,
            "ledger": None,
            "places": [],
        }  # no optimizer refills the cache of a copy
        return {**self.__dict__, **fresh}

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        notes = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *notes)
        self._refill_caches()

    def _apply(self, fn, recurse=True) -> Any:
        with _unless_moved(self._parameters, fn):
            result = super()._apply(fn, recurse)
        if isinstance(getattr(self, "weight", None), Tensor) and not self.weight.is_meta:
            with torch.inference_mode(False):
                self._shift = self._shift.to(self.weight.device)
        self._refill_caches()
        return result

    def _refill_caches(self) -> None:
        """Quantize again what is cached of this weight, and of siblings that share its amax, in every cache."""
        caches = [member.weight_cache for member in (self, *getattr(self, "amax_group", ()))]
        changed: dict[Any, list[Tensor]] = {}  # a layer whose operands take no amax names no weight but its own
        for cache in caches:
            if cache is not None:
                changed.setdefault(cache.owner, []).extend(cache.weights)
        for owner, weights in changed.items():
            owner.refill(weights)
