"""hb.nn.LayerNormLinear, hb.nn.MLP and hb.nn.LayerNormMLP: a norm or an activation and the quantization behind it.

Each holds its parts as ordinary submodules: a norm and hb.nn.Linear layers, each with a recipe of its own. So recipes,
rules, shared and cached weights apply layer by layer, and the bits, random ones too, are those of the parts run one
after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from halfbyte import ops
from halfbyte.functional.activation import activate, find_activation, linear_activation
from halfbyte.nn.linear import Linear, forward_shared, gather, has_hooks, run_shared, shareable, stand_in
from halfbyte.nn.norm import LayerNorm, Norm, RMSNorm, add_then_norm, from_norm, make_norm, to_norm
from halfbyte.nn.shared_input import following
from halfbyte.nn.streams import own_state
from halfbyte.recipes import resolve
from halfbyte.spec import Recipe
from halfbyte.state import RunState


class _OfLayers(nn.Module):
    """A module whose layers each follow a recipe of their own: it refuses one that nothing would follow."""

    @property
    def recipe(self) -> Recipe:
        raise AttributeError(f"{type(self).__name__} has no recipe; its layers have, each its own")

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        raise ValueError(
            f"recipe={recipe!r}: hb.nn.{type(self).__name__} has none of its own; use hb.set_recipe_(module, recipe), "
            "or assign it to one of the layers inside"
        )


class LayerNormLinear(_OfLayers):
    """A norm and the linear layers that read its output, which is quantized once.

    Keys: `norm.weight`, `norm.bias`, then `linear.weight`, `linear.bias`, or those under the names given.

    Args:
        in_features: K.
        out_features: N; or {name: N} of several layers, such as q_proj, k_proj and v_proj.
        norm: "rms", "layer" or a norm of width K, such as hb.nn.RMSNorm(K, eps=1e-6).
        bias: of the linear layers.
        recipe, state: as for hb.nn.Linear. Parameters have torch's default device and dtype; move them with `.to`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        norm: str | Norm = "rms",
        bias: bool = True,
        recipe: Recipe | str = "nvfp4",
        state: RunState | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(out_features, int | Mapping) or isinstance(out_features, bool):
            raise TypeError(f"out_features={out_features!r}: give an int, or a dict of int by name of layer")
        self.norm = make_norm(norm, in_features)
        widths = {"linear": out_features} if isinstance(out_features, int) else dict(out_features)
        _check_names(widths)
        state = own_state(resolve(recipe), state)
        self.names = tuple(widths)
        for name, width in widths.items():
            self.add_module(name, Linear(in_features, width, bias, recipe=recipe, state=state))

    @classmethod
    def from_modules(cls, norm: nn.Module, linears: nn.Linear | Mapping[str, nn.Linear]) -> LayerNormLinear:
        """Return a module that shares the Parameters of a norm and holds the linear layers as they are.

        Args:
            norm: what `from_norm` takes.
            linears: one layer, torch's or ours, or several by name.
        """
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        layers = {"linear": linears} if isinstance(linears, nn.Linear) else dict(linears)
        _check_names(layers)
        new.norm, new.names = make_norm(from_norm(norm), next(iter(layers.values())).in_features), tuple(layers)
        if len({layer.in_features for layer in layers.values()}) > 1:
            sizes = ", ".join(f"{name} {layer.in_features}" for name, layer in layers.items())
            raise ValueError(
                f"linears: in_features {sizes}: they read one tensor, the norm's; give layers of its width"
            )
        for name, layer in layers.items():
            new.add_module(name, layer)
        return new.train(norm.training)

    def to_modules(self) -> tuple[nn.Module, dict[str, nn.Linear]]:
        """Return torch's norm and linear layers, by name, with this module's Parameters."""
        return to_norm(self.norm), {name: to_linear(getattr(self, name)) for name in self.names}

    def forward(
        self, x: Tensor, call: int = 0, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor | tuple[Tensor, ...], ...]:
        """Return the output [..., N], or one per layer if there are several.

        Args:
            x: [..., K].
            call: as for `hb.nn.Linear.forward`.
            residual: as x. With one, the norm reads x + residual, and what is returned is (outputs, that sum).
        """
        layers = tuple(getattr(self, name) for name in self.names)
        y, total, amaxes = _normed((x, residual), self.norm, layers, call)
        outputs = _run(y, layers, call, amaxes)
        output = outputs[0] if self.names == ("linear",) else outputs
        return output if total is None else (output, total)


class MLP(_OfLayers):
    """down(activation(gate(x), up(x))), or down(activation(up(x))): the activation knows how both ends are quantized.

    Keys: `gate_proj.*` (gated activations only), `up_proj.*`, `down_proj.*`.

    Args:
        width: K, of input and output.
        hidden: of the activation.
        activation: a name that `hb.functional.activation` knows.
        bias: of the linear layers.
        recipe, state: as for hb.nn.Linear. Parameters have torch's default device and dtype; move them with `.to`.
    """

    fused_from: tuple[nn.Module, ...] = ()
    """What `hb.nn.fuse_` replaced by this module; in a tuple, so that it is no submodule."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        recipe: Recipe | str = "nvfp4",
        state: RunState | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.names = default_names(activation)
        state = own_state(resolve(recipe), state)
        for name in self.names[:-1]:
            self.add_module(name, Linear(width, hidden, bias, recipe=recipe, state=state))
        self.add_module(self.names[-1], Linear(hidden, width, bias, recipe=recipe, state=state))

    @classmethod
    def from_linears(cls, linears: Mapping[str, nn.Linear], activation: str) -> MLP:
        """Return a module that holds linear layers, torch's or ours, as they are and under the names given.

        Args:
            linears: gate (if the activation is gated), up and down, in this order, by name.
            activation: its name.
        """
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._hold(linears, activation)
        return new

    def _hold(self, linears: Mapping[str, nn.Linear], activation: str) -> None:
        expected = default_names(activation)
        if len(linears) != len(expected):
            raise ValueError(f"linears={list(linears)}: {activation!r} takes {len(expected)}, as {', '.join(expected)}")
        _check_names(linears)
        *first, down = ((layer.out_features, layer.in_features) for layer in linears.values())
        if len(set(first)) > 1 or first[0][0] != down[1]:
            sizes = ", ".join(f"{name} {layer.out_features}x{layer.in_features}" for name, layer in linears.items())
            raise ValueError(f"linears: {sizes} (out x in): gate and up must be alike, and down take what they give")
        self.activation, self.names = activation, tuple(linears)
        for name, layer in linears.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor, call: int = 0) -> Tensor:
        """Return the output [..., K].

        Args:
            x: [..., K].
            call: as for `hb.nn.Linear.forward`.
        """
        shared = getattr(self._first[0], "shared_input", None)
        amaxes = None
        if shared is not None and isinstance(self._first[0], Linear):
            amaxes = shared.take(x, self._first[0], call)
        return self._run(x, call, amaxes)

    @property
    def _first(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self, name) for name in self.names[:-1])

    def _run(self, x: Tensor, call: int, amaxes: ops.Amaxes | None) -> Tensor:
        first, down = self._first, (getattr(self, self.names[-1]),)
        how = following(down, x.device, call)
        # The activation's backward hands amaxes on and notes none: layers that want earlier ones run by themselves.
        is_one = shareable(first) and stand_in(first) is None
        if is_one and isinstance(first[0], Linear) and first[0].recipe.amax is None:
            layers = gather(x, first, call)
            h, h_amaxes = linear_activation(x, layers, self.activation, first[0].recipe, how, amaxes)
        else:
            h, h_amaxes = activate(self.activation, _run(x, first, call, amaxes), how)
        return _run(h, down, call, h_amaxes)[0]

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class LayerNormMLP(MLP):
    """A norm and an MLP: keys `norm.weight`, `norm.bias`, then those of hb.nn.MLP.

    Args:
        width, hidden, activation, bias, recipe, state: as for hb.nn.MLP.
        norm: "rms", "layer" or a norm of that width.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        norm: str | Norm = "rms",
        bias: bool = False,
        recipe: Recipe | str = "nvfp4",
        state: RunState | None = None,
    ) -> None:
        super().__init__(width, hidden, activation=activation, bias=bias, recipe=recipe, state=state)
        self.norm = make_norm(norm, width)

    @classmethod
    def from_modules(cls, norm: nn.Module, linears: Mapping[str, nn.Linear], activation: str) -> LayerNormMLP:
        """Return a module that shares the Parameters of a norm and holds the linear layers as they are.

        Args:
            norm: what `from_norm` takes.
            linears, activation: as for `MLP.from_linears`.
        """
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._hold(linears, activation)
        new.norm = make_norm(from_norm(norm), next(iter(linears.values())).in_features)
        return new.train(norm.training)

    def to_modules(self) -> tuple[nn.Module, dict[str, nn.Linear]]:
        """Return torch's norm and linear layers, by name, with this module's Parameters."""
        return to_norm(self.norm), {name: to_linear(getattr(self, name)) for name in self.names}

    def forward(self, x: Tensor, call: int = 0, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output [..., width].

        Args:
            x, call: as for hb.nn.MLP.
            residual: as x. With one, the norm reads x + residual, and what is returned is (output, that sum).
        """
        y, total, amaxes = _normed((x, residual), self.norm, self._first, call)
        output = self._run(y, call, amaxes)
        return output if total is None else (output, total)


def to_linear(module: nn.Linear) -> nn.Linear:
    """Return a torch.nn.Linear with the Parameters of `module`."""
    new = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    new.weight, new.bias = module.weight, module.bias
    return new.train(module.training)


def _normed(
    given: tuple[Tensor, Tensor | None], norm: nn.Module, layers: tuple[nn.Module, ...], call: int
) -> tuple[Tensor, Tensor | None, ops.Amaxes]:
    """Return the norm of x, or of x + residual, that sum, and the amaxes with which layers quantize the norm.

    None of the latter where the norm has to be called.
    """
    x, residual = given
    if isinstance(norm, RMSNorm | LayerNorm) and not has_hooks(norm):
        return norm.normalize(x, residual, following(layers, x.device, call))
    y, total = add_then_norm(norm, x, residual)
    return y, None if residual is None else total, ops.Amaxes()


def _run(x: Tensor, layers: Sequence[nn.Module], call: int, amaxes: ops.Amaxes | None) -> tuple[Tensor, ...]:
    """Run sibling layers of any kind on x, with its amaxes where they share one quantization."""
    if isinstance(layers[0], Linear) and shareable(layers):
        return run_shared(x, layers, call, amaxes)
    return forward_shared(x, layers, call)


def default_names(activation: str) -> tuple[str, ...]:
    """Return the names of an MLP's layers: the inputs of the activation, then the output."""
    gate = ("gate_proj",) if find_activation(activation).gated else ()
    return *gate, "up_proj", "down_proj"


def _check_names(layers: Mapping[str, object]) -> None:
    reserved = {"norm", "names", "activation", *dir(LayerNormLinear), *dir(LayerNormMLP), *dir(nn.Module())}
    taken = [name for name in layers if name in reserved or not name.isidentifier()]
    if taken or not layers:
        wrong = f", {taken[0]!r} among them," if taken else ""
        raise ValueError(f"names={list(layers)}{wrong}: give identifiers that modules do not have, such as q_proj")
