"""hb.nn.TransposedLinear: transformers' Conv1D, a linear layer with a weight [in, out], under a recipe.

The transposed view of the weight is what `hb.nn.Linear` would hold, so quantized bytes, random ones too, are the same.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nn.linear import REPLACED_FORWARD, Linear, LinearLayer, describe_recipe, run_alone
from halfbyte.spec import Recipe
from halfbyte.state import RunState


def conv1d_class() -> type[nn.Module] | None:
    """Return transformers' Conv1D; None where nobody imported it, so that no model can hold one."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a Conv1D of transformers, or of a class derived from it that is none of ours."""
    cls = conv1d_class()
    return cls is not None and isinstance(module, cls) and not isinstance(module, TransposedLinear)


class TransposedLinear(LinearLayer, nn.Module):
    """A linear layer with a weight [in_features, out_features]; made by `from_conv1d`, and still a Conv1D."""

    transposed = True
    weight: nn.Parameter
    bias: nn.Parameter

    converted_from: type[nn.Module]
    """The class of the module that it was made from."""

    @classmethod
    def from_conv1d(cls, module: nn.Module, recipe: Recipe | str, state: RunState | None = None) -> TransposedLinear:
        """Return a quantized twin of `module` that shares its Parameters, hooks and mode.

        Args:
            module: a Conv1D of transformers.
            recipe, state: as for hb.nn.Linear.

        Raises:
            TypeError: it is no Conv1D.
            ValueError: its forward was replaced on the instance, and would go on running instead of this class's.
        """
        if type(module) is not conv1d_class():
            raise TypeError(f"module={type(module).__name__}: give a transformers.pytorch_utils.Conv1D")
        if "forward" in vars(module):
            raise ValueError(f"module={module}: its forward was {REPLACED_FORWARD}")
        new = _blank(type(module))
        new.__dict__.update(module.__dict__)
        new._compiled_call_impl = None  # of module.compile(): it calls `module`
        new.adopt(recipe, state)
        return new

    def to_conv1d(self) -> nn.Module:
        """Return a Conv1D with this module's Parameters."""
        with torch.device("meta"):
            new: Any = self.converted_from(self.out_features, self.in_features)
        new.weight, new.bias = self.weight, self.bias
        return new.train(self.training)

    def to_linear(self, weight: nn.Parameter) -> Linear:
        """Return an hb.nn.Linear with this module's recipe, random stream, bias, hooks and mode.

        Args:
            weight: what it holds, [out_features, in_features].
        """
        new = Linear.__new__(Linear)
        new.__dict__.update(self.__dict__)
        new._parameters = {**self._parameters, "weight": weight}
        new._compiled_call_impl = None  # of compile(): it calls this module
        new.in_features, new.out_features = self.in_features, self.out_features
        if new.run_state is not None:
            new.run_state.watch(new)
        return new

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[1]

    def forward(self, x: Tensor, call: int = 0) -> Tensor:
        """Return x @ weight + bias, [..., out_features].

        Args:
            x: [..., in_features].
            call: as for `hb.nn.Linear.forward`.
        """
        return run_alone(x, self, call)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, weight=[in, out], recipe={describe_recipe(self.recipe)}"

    __repr__ = nn.Module.__repr__  # Conv1D has one of its own

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _blank, (self.converted_from,), self.__getstate__()  # its class is made at run time


@functools.cache
def _class_of(original: type[nn.Module]) -> type[TransposedLinear]:
    """Return the class of converted modules: also an `original`, which other packages ask for."""
    return type("TransposedLinear", (TransposedLinear, original), {"__doc__": "", "converted_from": original})


def _blank(original: type[nn.Module]) -> TransposedLinear:
    cls = _class_of(original)
    return cls.__new__(cls)
