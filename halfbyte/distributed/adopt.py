"""Weights that exist in NVFP4 only before any optimizer asks for them: made of values, or of loaded codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from halfbyte.distributed.weights import make_primary, tiled_parameters
from halfbyte.nn import Linear
from halfbyte.nn.sibling_amax import shared_amax
from halfbyte.spec import NVFP4
from halfbyte.tensor import QuantTensor, quantize


def primary_weights_(
    model: nn.Module, quants: Mapping[str, QuantTensor] | None = None, *, dtype: torch.dtype | None = None
) -> tuple[str, ...]:
    """Put PrimaryWeights in the place of the weights that a model's recipes allow, and return their names.

    Forwards, and what is exported, are bit for bit those of before; the values are gone, codes and their transpose
    stay, 1.125 bytes a weight. `ZeroOptimizer` then starts masters from the values of the codes.

    Args:
        model: converted by `hb.quantize_`; which weights are chosen is ZeroOptimizer's rule (docs/primary_weights.md).
        quants: {name of a parameter: codes} that are taken as they are, of `hb.export.load` for instance; of others, or
            codes in another spec than the recipe's, the weight is quantized.
        dtype: that weights are rounded to before that; None for their own.

    Raises:
        ValueError: no weight can be one, or codes of siblings that share an amax have different ones.
    """
    tiled = tiled_parameters(model)
    chosen = {name: spec for name, spec in tiled.items() if model.get_parameter(name).dim() == 2}
    if not chosen:
        raise ValueError(
            f"model={type(model).__name__}: no weight has a recipe with one 16x16 spec for forward and backward, such "
            "as 'nvfp4'; convert it with hb.quantize_ first"
        )
    blocks = {name: _codes(model, name, spec, (quants or {}).get(name), dtype) for name, spec in chosen.items()}
    _check_shared(model, blocks)
    amaxes: dict[int, Tensor] = {}
    for name, quant in blocks.items():
        weight = make_primary(model, name, (chosen[name], quant.dtype), torch.empty_like(quant.qdata), amaxes)
        with torch.no_grad():
            weight.copy_(quant)
        weight.without_masters = True
    return tuple(blocks)


def _check_shared(model: nn.Module, blocks: Mapping[str, QuantTensor]) -> None:
    """Raise ValueError where layers that share an amax have codes under several."""
    seen: dict[int, tuple[str, float]] = {}
    for name, quant in blocks.items():
        group = getattr(model.get_submodule(name.rpartition(".")[0]), "amax_group", ())
        assert quant.amax is not None, "NVFP4 has one"
        own = name, float(quant.amax)
        first = seen.setdefault(id(group[0]), own) if group else own
        if first[1] != own[1]:
            raise ValueError(
                f"quants[{name!r}] has amax {own[1]} and {first[0]!r}, which shares it, {first[1]}: convert the model "
                "with hb.quantize_(…, share_amax=())"
            )


def _codes(
    model: nn.Module, name: str, spec: NVFP4, quant: QuantTensor | None, dtype: torch.dtype | None
) -> QuantTensor:
    """Return what the forward multiplies by."""
    layer = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(layer, Linear), "tiled_parameters chose it"
    if isinstance(layer.weight, QuantTensor):
        return layer.weight
    if quant is not None and quant.spec == spec and quant.shape == layer.weight.shape:
        return cast(QuantTensor, quant.to(layer.weight.device))
    rounded = layer.weight.detach() if dtype is None else layer.weight.detach().to(dtype)
    amax = shared_amax(layer, dtype) if layer.amax_group else None
    return quantize(rounded, spec, amax=amax)
