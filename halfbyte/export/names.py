"""The names and shapes in which a model's tensors lie in checkpoints; transformers knows them for each architecture.

It holds the experts of a layer as one tensor [E, N, K] where checkpoints hold [N, K] for each; others are renamed, cut
or joined along their rows. What it does to a weight it does alike to codes and scales of the same rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.export.trained import RULE, Trained
from halfbyte.tensor import QuantTensor


class Planes(dict[str, tuple[Tensor, Tensor, Tensor]]):
    """{key of a checkpoint's weight: its codes uint8 [N, K/2], scales uint8 [N, K/16], amax fp32 []}."""


def check_model(model: nn.Module) -> None:
    """Raise ValueError unless this is a model of transformers that lies whole in memory."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        raise ValueError(
            f"model={type(model).__name__}: engines load architectures of Hugging Face transformers, and this is none "
            "of its models; export the PreTrainedModel inside it, or write hb.tensor.to_safetensors(…) for your loader"
        )
    whole: Any = model
    if getattr(whole, "_hf_peft_config_loaded", False) or any(".lora_" in key for key, _ in model.named_parameters()):
        raise ValueError(f"model={type(model).__name__}: it holds adapters; merge them into the weights first")
    if whole.is_remote_code():
        raise ValueError(
            f"model={type(model).__name__}: its code is not part of transformers, and engines need a model of their "
            "own for it; its weights are in model.save_pretrained(…)"
        )
    absent = [name for name, p in model.named_parameters() if p.is_meta]
    if absent:
        raise ValueError(
            f"{absent[0]} is on the meta device, as accelerate offloads; bring the whole model to a device"
        )


def plain_state(model: nn.Module, trained: Mapping[str, Trained]) -> dict[str, Tensor]:
    """Return what stays in high precision, with the model's keys; of tied tensors one."""
    whole: Any = model
    quantized = {one.key for one in trained.values()}
    tied: Mapping[str, str] = getattr(whole, "all_tied_weights_keys", None) or {}
    ignored = set(getattr(whole, "_keys_to_ignore_on_save", None) or ())
    state = model.state_dict()
    result = {}
    for key, tensor in state.items():
        source = state.get(tied[key]) if key in tied else None
        is_alias = source is not None and source.data_ptr() == tensor.data_ptr()
        if key in quantized or key in ignored or is_alias:
            continue
        if isinstance(tensor, QuantTensor):  # a primary weight whose layer computes in high precision
            tensor = tensor.dequantize()
        result[key] = tensor.detach()
    return result


def check_tied(model: nn.Module, trained: Mapping[str, Trained]) -> None:
    """Raise ValueError where another module holds a quantized weight too, as an embedding does that is the head."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    quantized = {one.key for one in trained.values()}
    for names in users.values():
        if len(names) > 1 and quantized & set(names):
            raise ValueError(
                f"{names[0]}: it is {names[1]} too, and not both read it in NVFP4: no bytes are its own; {RULE}"
            )


def in_checkpoint(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that the checkpoints of this architecture have."""
    loading: Any = sys.modules["transformers.core_model_loading"]
    return dict(loading.revert_weight_conversion(model, dict(state)))


def planes(model: nn.Module, trained: Mapping[str, Trained]) -> tuple[Planes, dict[str, str]]:
    """Return codes, scales and amax of every quantized weight of the checkpoint, and the layer that each is of.

    Raises:
        ValueError: the checkpoints of this architecture hold a weight that has no codes of its own.
    """
    codes, scales, amaxes, origins = {}, {}, {}, {}
    for number, one in enumerate(trained.values()):
        if one.transposed:  # checkpoints hold it as the model does: export/stacked.py
            continue
        parts = [(q.qdata, q.block_scale.view(torch.uint8), _column(q)) for q in one.quants]
        stacked = [torch.stack(plane) if one.per_expert else plane[0] for plane in zip(*parts, strict=True)]
        codes[one.key], scales[one.key], amaxes[one.key] = stacked
        origins[one.key] = torch.full_like(amaxes[one.key], number)
    turned = [in_checkpoint(model, plane) for plane in (codes, scales, amaxes, origins)]
    layers, result, owner = list(trained), Planes(), {}
    for key, code in turned[0].items():
        scale, amax, origin = (plane[key] for plane in turned[1:])
        if code.dim() != 2 or not key.endswith(".weight") or bool((amax != amax[0, 0]).any()):
            raise ValueError(
                f"{layers[int(origin.flatten()[0])]}: in checkpoints of {type(model).__name__} its weight is part of "
                f"{key}, which has no amax of its own; {RULE}"
            )
        scale = scale.reshape(code.shape[0], -1)  # transformers 5.17 squeezes experts of one block a row
        result[key] = (code.contiguous(), scale.contiguous(), amax[0, 0].clone())
        owner[key] = layers[int(origin[0, 0])]
    return result, owner


def _column(q: QuantTensor) -> Tensor:
    """Return a weight's amax beside every row, so that it goes where the rows go; twice, as one could be squeezed."""
    assert q.amax is not None, "NVFP4 has one"
    return q.amax.expand(q.shape[0], 2).contiguous()


def high_precision_modules(model: nn.Module, plain: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[str]:
    """Return the modules that multiply by a matrix in high precision: engines ask for them by name.

    Args:
        plain: what stays in high precision, with the model's keys.
        stored: the same, with those of the checkpoint.
    """
    tables = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {
        key.removesuffix(".weight"): None
        for state in (stored, plain)
        for key, tensor in state.items()
        if key.endswith(".weight") and tensor.dim() > 1 and tensor.data_ptr() not in tables
    }
    heads = {name: None for name, m in model.named_modules() if type(m) is nn.Linear}
    experts = {key.rpartition(".")[0]: None for key in stored if _holds_experts(key, stored[key])}
    return list(heads | found | experts)


def _holds_experts(key: str, tensor: Tensor) -> bool:
    """Whether a tensor [E, ...] is the experts of a layer under a name of their own, such as gate_up_proj."""
    return tensor.dim() == 3 and "expert" in key and not key.endswith(".weight")
