"""hb.nn.LoRALinear: a frozen layer, whose weight is codes alone, with a low-rank adapter that is trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte import ops
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.earlier import refuse_delayed
from halfbyte.functional.linear import Layers, outputs_of
from halfbyte.functional.lora import (
    Adapter,
    add_adapter,
    common_amax,
    merged_codes,
    merged_values,
    merged_weight,
    straight_through,
)
from halfbyte.functional.weights import takes_amax
from halfbyte.nn.linear import Linear, run_alone
from halfbyte.tensor import PrimaryWeight, QuantTensor


def frozen_weight(layer: Linear) -> QuantTensor | None:
    """Return a layer's weight if it is codes that nothing trains, else None."""
    weight = layer._parameters.get("weight")
    return weight if isinstance(weight, QuantTensor) and not isinstance(weight, PrimaryWeight) else None


class LoRALinear(Linear):
    """A frozen hb.nn.Linear with a low-rank adapter (LoRA, arXiv 2106.09685); made by `from_linear` or `hb.lora_`.

    With w the values of the codes, scaling = alpha / rank, and both GEMMs of the base as the recipe says:

        merge_aware=False   y = nt(x, w) + scaling * (dropout(x) @ lora_A.T) @ lora_B.T
        merge_aware=True    y = nt(x, Q(w + scaling * lora_B @ lora_A))

    In the second Q rounds the sum to the dtype of w, as masters were, and quantizes it as they were, with its own amax;
    gradients go straight through Q.

    lora_A: [rank, in_features], uniform as torch initializes linear layers.
    lora_B: [out_features, rank], zeros: the layer begins as the frozen one.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    alpha: float
    merge_aware: bool
    dropout: float = 0.0  # of layers pickled before there was one

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise TypeError("LoRALinear(…): an adapter needs a frozen layer; use LoRALinear.from_linear(layer) or hb.lora_")

    @classmethod
    def from_linear(
        cls,
        module: nn.Linear,
        *,
        rank: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.0,
        merge_aware: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> LoRALinear:
        """Return a layer with the codes, bias, recipe, hooks and random stream of `module` and a new adapter.

        Args:
            module: an hb.nn.Linear that `hb.freeze_` froze.
            rank: of the adapter, R.
            alpha: the adapter is multiplied by alpha / rank.
            dropout: share of x that the adapter does not see in training, drawn by torch; not with merge_aware.
            merge_aware: whether every forward multiplies by the merged weight, quantized.
            dtype: of the adapter's parameters.

        Raises:
            TypeError: it is none, or alpha or dropout are no numbers.
            ValueError: its weight is not frozen, it has an adapter already, a fused module runs it, or rank, alpha or
                dropout are out of range.
        """
        if not isinstance(module, Linear):
            raise TypeError(f"module={type(module).__name__}: give an hb.nn.Linear, as hb.quantize_ makes them")
        _check(module)
        check_adapter(rank, alpha, dropout, merge_aware)
        new = cls.__new__(cls)
        new.__dict__.update(module.__dict__)
        new._parameters = dict(module._parameters)
        new._compiled_call_impl = None  # of module.compile(): it calls `module`
        new.alpha, new.dropout, new.merge_aware = float(alpha), float(dropout), merge_aware
        where = {"device": module.weight.device, "dtype": dtype}
        new.lora_A = nn.Parameter(torch.empty(rank, module.in_features, **where))
        new.lora_B = nn.Parameter(torch.zeros(module.out_features, rank, **where))
        nn.init.kaiming_uniform_(new.lora_A, a=math.sqrt(5))
        if new.run_state is not None:
            new.run_state.watch(new)
        return new

    def to_linear(self) -> Linear:
        """Return an hb.nn.Linear with this one's weight as it is now, bias, recipe, hooks and random stream."""
        new = Linear.__new__(Linear)
        own = ("alpha", "dropout", "merge_aware")
        new.__dict__.update({name: value for name, value in self.__dict__.items() if name not in own})
        new._parameters = {name: p for name, p in self._parameters.items() if not name.startswith("lora_")}
        new._compiled_call_impl = None
        return new

    @property
    def rank(self) -> int:
        """R."""
        return self.lora_A.shape[0]

    @property
    def scaling(self) -> float:
        """What the product of the adapter is multiplied by."""
        return self.alpha / self.rank

    @property
    def adapter(self) -> Adapter:
        """What is added to the weight."""
        return Adapter(self.lora_A, self.lora_B, self.scaling)

    def forward(self, input: Tensor, call: int = 0) -> Tensor:
        """Return the layer's output [..., out_features]; arguments as for hb.nn.Linear.

        Raises:
            ValueError: the weight is no longer frozen.
        """
        codes = self._codes()
        if not self.merge_aware:
            seen = functional.dropout(input, self.dropout, self.training) if self.dropout else input
            return add_adapter(run_alone(input, self, call), seen, self.adapter)
        refuse_delayed(self.recipe, "merge-aware adapters")
        place = self.place(call)
        dtype = autocast_dtype(input.device) or input.dtype
        values = self.merged_values()
        merged = merged_weight(codes, values, self._shared_amax(values), dtype)
        rng = None if place is None else [place]
        layers = Layers([codes], [self.bias], [None], [None], [merged], rng)
        y = outputs_of(input, layers, self.recipe, None, None)[0]
        return straight_through(y, input, self.adapter)

    def _shared_amax(self, values: Tensor) -> Tensor | None:
        """Return the greatest magnitude of the merged weights that share one amax with this one's `values`, fp32 [].

        None where no other layer's adapter does; the amax is then that of these values.
        """
        group = [layer for layer in self.amax_group if isinstance(layer, LoRALinear)]
        if len(group) < 2 or not takes_amax(self._codes().spec):
            return None
        amaxes = [ops.amax(values if one is self else one.merged_values()) for one in group]
        return common_amax(amaxes, self.weight.dtype)

    def merged_codes(self) -> QuantTensor:
        """Return the merged weight: the bytes that a forward with merge_aware=True multiplies by."""
        values = self.merged_values()
        return merged_codes(self._codes(), values, self._shared_amax(values))

    def merged_values(self) -> Tensor:
        """Return what the codes stand for plus the adapter, fp32 [out_features, in_features]."""
        return merged_values(self._codes(), self.adapter)

    def _codes(self) -> QuantTensor:
        weight = self.weight
        if not isinstance(weight, QuantTensor):
            raise ValueError(
                f"{self.title}: its weight is a {type(weight).__name__} and was codes when the adapter was made; load "
                "codes into it (a state dict of the frozen model, without assign=True)"
            )
        return weight

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout:g}" if self.dropout else ""
        own = f"rank={self.rank}, alpha={self.alpha:g}{dropout}, merge_aware={self.merge_aware}"
        return f"{super().extra_repr()}, {own}"


def _check(module: Linear) -> None:
    if isinstance(module, LoRALinear):
        raise ValueError(f"module={module.title}: it has an adapter already; merge that first, hb.merge_lora_(model)")
    codes = frozen_weight(module)
    if codes is None:
        raise ValueError(f"module={module.title}: its weight is trained; freeze it first, hb.freeze_(model)")
    spec = codes.spec
    if spec.needs_rng or spec.needs_sign_rng:
        raise ValueError(f"module={module.title}: its codes were drawn at random, so a merged weight has no bytes")
    if module.shared_input is not None:
        raise ValueError(f"module={module.title}: a fused norm feeds it; call hb.nn.unfuse_(model) before")


def check_adapter(rank: int, alpha: float, dropout: float, merge_aware: bool) -> None:
    """Raise TypeError or ValueError unless these are of an adapter."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank={rank!r}: give a whole number of at least 1, such as 16")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha={alpha!r}: give a number, such as 2 * rank")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha!r}: give a finite number above 0, such as 2 * rank")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        raise TypeError(f"dropout={dropout!r}: give a number, such as 0.05")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout!r}: give 0 <= dropout < 1, such as 0.05")
    if dropout and merge_aware:
        raise ValueError(
            f"dropout={dropout!r} with merge_aware=True: one weight multiplies x, so the adapter sees all of it or "
            "nothing; leave one of the two out"
        )
