"""hb.nn.Linear: torch.nn.Linear whose GEMMs follow a recipe that can change at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.types import Device

from halfbyte import ops, recipes
from halfbyte.functional.foreign import PLAIN, are_sharded, is_sharded, refuse_foreign
from halfbyte.functional.linear import Layers, outputs_of
from halfbyte.functional.primary import in_graph
from halfbyte.nn.earlier import Found, amaxes_of_shared_x, amaxes_of_x, gradient_amaxes, note_found
from halfbyte.nn.sibling_amax import are_whole_groups, weight_amaxes
from halfbyte.nn.streams import FollowsRecipe, check_run_number
from halfbyte.spec import Recipe
from halfbyte.state import RunState
from halfbyte.tensor.primary import PrimaryWeight

if TYPE_CHECKING:
    from halfbyte.nn.group_amax import GroupAmax
    from halfbyte.nn.shared_input import SharedInput


REPLACED_FORWARD = "replaced on the instance, as accelerate does; convert first"


class Entry(Protocol):
    """What runs layers that ranks share."""

    def outputs(self, x: Tensor, layers: Sequence[LinearLayer], call: int) -> tuple[Tensor, ...]: ...


class LinearLayer(FollowsRecipe):
    """What linear layers share, however they hold their weight."""

    in_features: int
    out_features: int
    bias: Any

    shared_input: SharedInput | None = None
    """What a norm hands over and siblings share, where `hb.nn.fuse_` put it."""

    before_use: Callable[[], None] | None = None
    """Called before the parameters are read, by modules above if compiled: a gather of them may still run."""

    entry: Entry | None = None
    """How x comes in and the output goes out where ranks share the layer, as a style of `hb.distributed` has it."""

    weight_to_read: Callable[[LinearLayer, Any], Any] | None = None
    """Returns what a forward multiplies by, given the parameter; raises where that is not as somebody promised: codes
    that were gathered."""

    as_part: Callable[[str, Any], Any] | None = None
    """Returns the parameter of a name, given it, as the DTensor of which it is this rank's part, where another library
    keeps plain parts."""

    def look(self) -> Any:
        """Return the weight past autograd, for what is not multiplied: its kind, its place, its amax."""
        return self.weight if self.as_part is None else self.as_part("weight", self.weight.detach())

    def adopt(self, recipe: Recipe | str, state: RunState | None) -> None:
        super().adopt(recipe, state)
        self.amax_group: tuple[LinearLayer, ...] = ()
        self.group_amax: GroupAmax | None = None


class Linear(LinearLayer, nn.Linear):
    """A linear layer that quantizes its operands; weight and bias are those of torch.nn.Linear.

    Args:
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear.
        recipe: a Recipe or a preset's name; changed by `hb.set_recipe_` or assignment.
        state: the RunState that random operands draw from, shared by all layers of a model. None makes a private one,
            seeded from torch's default generator, if the recipe draws.
    """

    converted_from = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str = "nvfp4",
        state: RunState | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.adopt(recipe, state)

    @classmethod
    def from_linear(cls, module: nn.Linear, recipe: Recipe | str, state: RunState | None = None) -> Linear:
        """Return a quantized twin of `module` that shares its Parameters, hooks and mode.

        In torch's TransformerEncoderLayer call `hb.set_recipe_` on the model then: what that runs in eval reads weights
        and calls no layer.

        Args:
            module: a torch.nn.Linear.
            recipe, state: as for the constructor.

        Raises:
            TypeError: it is none.
            ValueError: its forward was replaced on the instance, and would go on running instead of this class's.
        """
        if not isinstance(module, nn.Linear):
            raise TypeError(f"module={type(module).__name__}: give a torch.nn.Linear")
        if "forward" in vars(module):
            raise ValueError(f"module={module}: its forward was {REPLACED_FORWARD}")
        new = cls.__new__(cls)
        new.__dict__.update(module.__dict__)
        new._compiled_call_impl = None  # of module.compile(): it calls `module`
        new.adopt(recipe, state)
        return new

    def forward(self, input: Tensor, call: int = 0) -> Tensor:
        """Return the layer's output [..., out_features].

        Args:
            input: [..., in_features]; named as in torch.nn.Linear.
            call: 0, 1, … for the first, second, … run of this module within one micro-batch, so that each draws bits of
                its own.
        """
        if self.shared_input is not None:
            return self.shared_input.output(self, input, call)
        return run_alone(input, self, call)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={describe_recipe(self.recipe)}"


def forward_shared(x: Tensor, modules: Sequence[nn.Module], call: int = 0) -> tuple[Tensor, ...]:
    """Run several linear layers on one input, quantizing it once where they share a recipe.

    Args:
        x: [..., in_features].
        modules: hb.nn.Linear layers of one recipe without hooks share, and those of which ranks hold parts under
            torch's own styles, whose hooks lay x and outputs out; any others are called one by one. Outputs of layers
            that share are one graph: go back from all of them at once, or keep it.
        call: as for `Linear.forward`.

    Returns:
        one output per module, in order.

    Raises:
        ValueError: modules are none, or `call` is out of range.
        TypeError: `call` is no int.
    """
    if not modules:
        raise ValueError(f"modules={modules!r}: give at least one layer")
    check_run_number(call)
    if shareable(modules):
        layers: Any = modules
        return run_shared(x, layers, call, _handed_over(x, layers[0], call))
    if not all(type(module) is Linear and is_sharded(module.weight) for module in modules):
        return tuple(_called(module, x, call) for module in modules)
    if torch.compiler.is_compiling():  # whose layers would run eagerly one by one
        from halfbyte.functional.eager import eagerly

        return eagerly(_of_parts, (x, modules, call), {})
    return _of_parts(x, modules, call)


def _called(module: Any, x: Tensor, call: int) -> Any:
    return module(x, call=call) if call and isinstance(module, LinearLayer) else module(x)


def _of_parts(x: Any, modules: Sequence[Any], call: int) -> tuple[Tensor, ...]:
    """Return what forward_shared does of layers of whose weights ranks hold parts."""
    if not _are_alike(modules) or any(_has_other_hooks(layer) for layer in modules):
        return tuple(_called(layer, x, call) for layer in modules)
    given: list[Any] = [x] * len(modules)
    for i, layer in enumerate(modules):
        for before in layer._forward_pre_hooks.values():
            laid_out = before(layer, (given[i],))
            given[i] = given[i] if laid_out is None else laid_out
    first = given[0]
    weights = [layer.weight for layer in modules]
    if any(one is not first for one in given) or not are_sharded(first) or _are_apart(first, *weights):
        outputs = [layer.forward(one, call) for layer, one in zip(modules, given, strict=True)]
    else:
        outputs = list(run_shared(first, modules, call, None))
    for i, layer in enumerate(modules):
        for after in layer._forward_hooks.values():
            laid_out = after(layer, (given[i],), outputs[i])
            outputs[i] = outputs[i] if laid_out is None else laid_out
    return tuple(outputs)


def _are_alike(layers: Sequence[Any]) -> bool:
    """Whether layers, each there once, follow one recipe, and ranks hold the same part of their weights."""
    first = layers[0]
    if len(set(map(id, layers))) < len(layers) or not first.recipe.specs:
        return False
    for layer in layers:
        if layer.entry is not None or layer.shared_input is not None:
            return False
        if layer.weight.placements != first.weight.placements or layer.recipe != first.recipe:
            return False
    return True


def _are_apart(*tensors: Any) -> bool:
    """Whether DTensors lie on several meshes."""
    return any(tensor.device_mesh != tensors[0].device_mesh for tensor in tensors)


_STYLES = "torch.distributed.tensor.parallel.style"


def _has_other_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than torch's tensor-parallel styles have it do, to lay out x and the output.

    These put functions of theirs into hooks of `distribute_module`; what other hooks do may need the call itself.
    """
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    backward = module._backward_hooks or module._backward_pre_hooks
    if backward or module._forward_hooks_with_kwargs or module._forward_pre_hooks_with_kwargs:
        return True
    if nn.modules.module._has_any_global_hook() or module._compiled_call_impl is not None:
        return True
    return "forward" in vars(module) or not all(map(_is_of_style, hooks))


def _is_of_style(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    held = dict(zip(code.co_freevars, hook.__closure__ or (), strict=True)) if code is not None else {}
    for name in ("input_fn", "output_fn"):
        if name in held:
            function = held[name].cell_contents
            return getattr(function, "func", function).__module__ == _STYLES
    return False


def run_alone(x: Tensor, layer: LinearLayer, call: int) -> Tensor:
    """Return the output of a layer that is being called: hooks are its caller's."""
    return run_shared(x, (layer,), call, _handed_over(x, layer, call))[0]


def _handed_over(x: Tensor, layer: LinearLayer, call: int) -> ops.Amaxes | None:
    return None if layer.shared_input is None else layer.shared_input.take(x, layer, call)


def run_shared(x: Tensor, layers: Sequence[LinearLayer], call: int, x_amaxes: ops.Amaxes | None) -> tuple[Tensor, ...]:
    """Return the outputs of layers that share a recipe; x_amaxes: those of x, where known."""
    entry = layers[0].entry
    if entry is not None and torch.compiler.is_compiling():
        from halfbyte.functional.eager import eagerly

        return eagerly(entry.outputs, (x, layers, call), {})
    if entry is not None:
        return entry.outputs(x, layers, call)
    found: Sequence[Found] = ()
    if layers[0].amaxes is not None:
        x_amaxes, found = amaxes_of_x(x, layers, call, x_amaxes)
    instead = stand_in(layers)
    if instead is not None:
        outputs = instead(x, layers, call, x_amaxes)
    else:
        outputs = outputs_of(x, gather(x, layers, call, in_pass=True), layers[0].recipe, None, x_amaxes)
    note_found(found)
    return outputs


def stand_in(layers: Sequence[Any]) -> Callable[..., Any] | None:
    """Return what runs in the place of the GEMMs of layers that share one input, None for nothing."""
    for layer in layers:
        if layer.instead is not None:
            return layer.instead
    return None


def gather(x: Tensor, layers: Sequence[LinearLayer], call: int, *, in_pass: bool = False) -> Layers:
    """Return what the functions of linear layers take of modules that read x.

    Args:
        x, layers, call: of the forward.
        in_pass: ranks that hold parts of all siblings of a group may meet for its amax in the pass that follows.
    """
    for layer in layers:
        if layer.before_use is not None and not torch.compiler.is_compiling():
            layer.before_use()
    weights = [  # once: a parametrization computes it
        weight_of(layer) if layer.as_part is None else layer.as_part("weight", layer.weight) for layer in layers
    ]
    biases, is_plain = [_bias_of(layer) for layer in layers], type(x) in PLAIN
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        if not (is_plain and type(weight) in PLAIN) and layer.recipe.specs and not are_sharded(x, weight, bias):
            refuse_foreign((("x", x), ("its weight", weight), ("its bias", bias)), layer)
    places = [layer.place(call, weight.device) for layer, weight in zip(layers, weights, strict=True)]
    grads = [getattr(weight, "main_grad", None) for weight in weights]
    if [layer for layer in layers if layer.transposed]:
        weights = [_as_rows(layer, weight) for layer, weight in zip(layers, weights, strict=True)]
        grads = [_as_rows(layer, grad) for layer, grad in zip(layers, grads, strict=True)]
    cached = [
        None if layer.weight_cache is None else layer.cached_weight(weight)
        for layer, weight in zip(layers, weights, strict=True)
    ]
    in_pass = in_pass and are_whole_groups(layers)
    return Layers(
        weights=weights,
        biases=biases,
        weight_amaxes=weight_amaxes(x, layers, cached, in_pass),
        main_grads=grads,
        cached_weights=cached,
        rng=[place for place in places if place is not None] or None,
        dy_amaxes=[None if layer.amaxes is None else gradient_amaxes(x, layer) for layer in layers],
        x_amaxes=None if layers[0].amaxes is None else amaxes_of_shared_x(x, layers),
        amaxes_of_parts=in_pass,
    )


def weight_of(layer: Any) -> Any:
    """Return what the forward of a layer reads as its weight."""
    weight = layer.weight
    if torch.compiler.is_compiling() and isinstance(weight, PrimaryWeight):  # not asking who promised: each has another
        if in_graph(weight, layer.recipe):
            return weight
        if layer.values_to_read is not None and not layer.recipe.specs:
            return layer.values_to_read
    if layer.weight_to_read is None:
        return weight
    if torch.compiler.is_compiling():  # in which an error is a riddle
        from halfbyte.functional.eager import eagerly

        return eagerly(layer.weight_to_read, (layer, weight), {})
    return layer.weight_to_read(layer, weight)


def _bias_of(layer: LinearLayer) -> Any:
    return layer.bias if layer.as_part is None or layer.bias is None else layer.as_part("bias", layer.bias)


def _as_rows(layer: LinearLayer, tensor: Any) -> Any:
    """Return the layer's weight, or what goes with it, as [out_features, in_features]; None for None."""
    return tensor.mT if layer.transposed and tensor is not None else tensor


def shareable(modules: Sequence[nn.Module]) -> bool:
    """Whether modules may run together: hb.nn.Linear layers of one recipe whose call is their forward."""
    first = modules[0]
    for module in modules:  # no generator: siblings are asked in every call
        if type(module) is not Linear or has_hooks(module) or (module is not first and module.recipe != first.recipe):
            return False
    return True


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module) or bool(nn.modules.module._has_any_global_hook())


def describe_recipe(recipe: Recipe) -> str:
    """Return the name that `recipes.get` turns into `recipe`, else its key."""
    presets = {name: preset() for name, preset in recipes.PRESETS.items()}
    for name, preset in presets.items():
        if preset == recipe:
            return name
    forward = [name for name, preset in presets.items() if preset.fprop == recipe.fprop]
    gemms = recipe.dgrad, recipe.wgrad
    backward = [name for name, preset in presets.items() if (preset.dgrad, preset.wgrad) == gemms]
    pairs = (f"{first}/{rest}" for first in forward for rest in backward)
    return next((pair for pair in pairs if recipes.get(pair) == recipe), recipe.key)
