"""What layers that read one tensor share: the amaxes that its norm computed, and one quantization.

A norm hands over its output with the amaxes; a linear layer that is called with exactly that tensor takes them. The
first of several siblings computes the outputs of all, and each of the others finds its own when it is called with the
same tensor. Any other tensor, also one that was changed in place since, is treated as if nothing had been handed over:
the bits never depend on it. Compiled code does not see changes in place (docs/fused.md).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.places import sign_place
from halfbyte.nn.linear import Linear, LinearLayer, forward_shared, run_alone, shareable
from halfbyte.nn.whereabouts import Whereabouts
from halfbyte.spec import GemmSpec, Recipe, Spec

_PLAIN_GEMM = GemmSpec()


def input_specs(recipe: Recipe, need_dw: bool) -> tuple[Spec | None, Spec | None]:
    """Return how a linear layer quantizes its input: for fprop and, if a weight gradient is needed, for wgrad.

    Nothing where the mean is split off first, or channels are taken out: of what remains nobody knows the amaxes.
    """
    if recipe.splits_mean or recipe.channels is not None:
        return None, None
    fprop, wgrad = (gemm or _PLAIN_GEMM for gemm in (recipe.fprop, recipe.wgrad))
    return fprop.a, wgrad.b if need_dw and recipe.backward == "original" else None


def following(layers: tuple[nn.Module, ...], device: torch.device, call: int = 0) -> ops.Following:
    """Return how `layers` will quantize the input they share; nothing if they do not share one quantization.

    Args:
        layers: siblings that read one tensor.
        device: of that tensor.
        call: as for `Linear.forward`.
    """
    first = layers[0]
    if not isinstance(first, Linear) or not shareable(layers):
        return ops.Following()
    need_dw = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)
    row, col = input_specs(first.recipe, need_dw)
    sign = None
    if col is not None and col.needs_sign_rng:
        place = first.peek(call, device)
        sign = sign_place(None if place is None else place.signs_on(device))
    return ops.Following(row, col, sign)


def _is_watched(x: Tensor) -> bool:
    """Whether changes of x in place can be told, or are none of ours: inference tensors count no versions.

    Inside torch.func transforms weights may be wrappers, of which nobody can say where they lie.
    """
    if torch.compiler.is_compiling():
        return True
    return not x.is_inference() and not torch._C._are_functorch_transforms_active()


def _version(x: Tensor) -> int:
    """Return a number that differs once x was changed in place; compiled code cannot ask for it."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _circumstances(x: Tensor, layers: tuple[nn.Module, ...], call: int) -> tuple:
    """Return all that outputs of `layers` depend on beside x, as far as it can change before they are asked for."""
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    same = call, torch.is_grad_enabled(), autocast_dtype(x.device), *(layer.recipe for layer in linears)
    if torch.compiler.is_compiling():  # which knows no versions, and no inference mode but as one without gradients
        return same
    found = [*same, torch.is_inference_mode_enabled()]
    for layer in linears:
        found.append(getattr(layer.run_state, "advances", 0))
        for parameter in (layer.weight, layer.bias):
            found += () if parameter is None else (id(parameter), _version(parameter), parameter.requires_grad)
    return tuple(found)


def _parameters(layers: tuple[nn.Module, ...]) -> list[Tensor]:
    """Return the weights of layers, and their biases as far as they have some."""
    found = [parameter for layer in layers if isinstance(layer, Linear) for parameter in (layer.weight, layer.bias)]
    return [parameter for parameter in found if parameter is not None]


def _places(layers: tuple[nn.Module, ...]) -> tuple[Whereabouts, ...]:
    """Return where weights and biases lie: new data change neither a Parameter's identity nor its version."""
    if torch.compiler.is_compiling():
        return ()
    return tuple([Whereabouts(parameter) for parameter in _parameters(layers)])


class _Given(NamedTuple):
    """Amaxes of a tensor, handed over by its norm; `of` is None where they are attached to that tensor."""

    of: Callable[[], Tensor | None] | None
    version: int
    amaxes: ops.Amaxes
    how: ops.Following


class _Computed(NamedTuple):
    """Outputs of siblings that the first computed from `of`, None as above.

    made: under which circumstances.
    places: where weights and biases lay, for those who can ask.
    """

    of: Tensor | None
    version: int
    outputs: tuple[Tensor | None, ...]
    made: tuple
    places: tuple[Whereabouts, ...]

    def holds(self, x: Tensor, layers: tuple[nn.Module, ...], call: int) -> bool:
        """Whether `layers` would compute the same now."""
        if self.made != _circumstances(x, layers, call):
            return False
        return all(place.are_of(one) for place, one in zip(self.places, _parameters(layers), strict=False))


class _Known:
    """What is known about a tensor that `by` shares."""

    def __init__(self, by: SharedInput, *, is_attached: bool = False) -> None:
        self.by, self.is_attached = by, is_attached
        self.given: _Given | None = None
        self.computed: _Computed | None = None

    def __reduce__(self) -> tuple:
        return type(None), ()  # copies of the tensor that it is attached to


_ATTRIBUTE = "_halfbyte_known"


class SharedInput:
    """The siblings `names` of a module `owner` that read one tensor, and what is known about it.

    Args:
        owner: holds the layers; they may be replaced at any time.
        names: of the layers, the first of which draws for all (docs/fused.md).
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        self.owner, self.names = owner, names
        self._traced, self._threads = _Known(self), threading.local()

    @property
    def _own(self) -> _Known:
        """What the thread that asks knows: another that runs the module meanwhile has a tensor of its own."""
        if torch.compiler.is_compiling():
            return self._traced
        if not hasattr(self._threads, "known"):
            self._threads.known = _Known(self)
        return self._threads.known

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self.owner, name) for name in self.names)

    def give(self, y: Tensor, amaxes: ops.Amaxes, how: ops.Following) -> None:
        """Hand over y, and its amaxes for layers that will quantize it as `how` says."""
        if torch.compiler.is_compiling():
            # Attached to y, all of it begins and ends where y does: a checkpoint inside the region may change nothing
            # that is older, and outputs that nobody came for do not leave the region.
            known = _Known(self, is_attached=True)
            known.given = _Given(None, 0, amaxes, how)
            setattr(y, _ATTRIBUTE, known)
        elif (amaxes.row is not None or amaxes.col is not None) and _is_watched(y):
            self._own.given = _Given(weakref.ref(y), _version(y), amaxes, how)  # weakly: nobody may come for it

    def take(self, x: Tensor, layer: LinearLayer, call: int) -> ops.Amaxes | None:
        """Return the amaxes of x for `layer` if x is what was handed over, once."""
        known = self._known(x)
        given = known.given
        if given is None or call != 0 or (given.of is not None and given.of() is not x) or _version(x) != given.version:
            return None
        known.given = None
        amaxes, how = given.amaxes, given.how
        row, col = input_specs(layer.recipe, how.col is not None)
        has_signs = how.sign_draw is None or layer is self.layers[0]  # those that the amax was rotated with
        return ops.Amaxes(amaxes.row if row == how.row else None, amaxes.col if col == how.col and has_signs else None)

    def output(self, layer: Linear, x: Tensor, call: int) -> Tensor:
        """Return one layer's output; the first layer computes those of all of them."""
        layers = self.layers
        index = next((i for i, other in enumerate(layers) if other is layer), None)
        known = self._known(x)
        if known is not self._traced and self._traced.computed is not None and not torch.compiler.is_compiling():
            self._traced.computed = None  # of a compiled sibling: nobody eager asks for it, and it would stay alive
        computed = known.computed
        if (
            index
            and computed is not None
            and (computed.of is None or computed.of is x)
            and _version(x) == computed.version
        ):
            y = computed.outputs[index]
            left = tuple(None if i == index else other for i, other in enumerate(computed.outputs))
            is_last = all(other is None for other in left)
            known.computed = None if is_last else computed._replace(outputs=left)
            if y is not None and computed.holds(x, layers, call):
                return y
        if index != 0 or len(layers) == 1 or not shareable(layers) or not _is_watched(x):
            return run_alone(x, layer, call)
        y, *others = forward_shared(x, layers, call)
        of = None if known.is_attached else x
        known.computed = _Computed(of, _version(x), (None, *others), _circumstances(x, layers, call), _places(layers))
        return y

    def _known(self, x: Tensor) -> _Known:
        if torch.compiler.is_compiling():
            known = getattr(x, _ATTRIBUTE, None)
            if known is not None and known.by is self:
                return known
        return self._own

    def __getstate__(self) -> dict:
        return {"owner": self.owner, "names": self.names}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["owner"], state["names"])
