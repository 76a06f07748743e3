"""load_exported: a checkpoint of NVFP4 weights, ours or another's, as a model of transformers that trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch
import transformers

from halfbyte.distributed import primary_weights_
from halfbyte.export import Checkpoint, load
from halfbyte.integrations.quantizer import HalfbyteConfig, Weights


def load_exported(
    folder: str | Path,
    quantization_config: HalfbyteConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    weights: Weights = "plain",
) -> Any:
    """Return the model of a folder in ModelOpt's or compressed-tensors' form, with the values of its codes as masters.

    Masters made of codes quantize to those codes again under the recipe that they were trained with, which the contract
    of training says; moments of an optimizer begin anew.

    Args:
        folder: as `hb.export.load` reads it.
        quantization_config: how to convert the model; None: as the contract of training says.
        dtype: of the masters; None: that of the folder's config.
        weights: "plain" makes masters of all codes; "nvfp4" keeps those of weights in 16x16 tiles as they are, as
            PrimaryWeights, which a ZeroOptimizer trains.

    Returns:
        A PreTrainedModel of the architecture that config.json names, in eval mode.

    Raises:
        ValueError: the folder is damaged, has no contract and nobody says how to convert, or is of an architecture
            that transformers does not know, or lacks weights of it, or has some of another shape.
    """
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r}: give 'plain' or 'nvfp4'")
    checkpoint = load(folder)
    chosen = quantization_config or _of_contract(checkpoint)
    cls = _architecture(checkpoint)
    config = _config(checkpoint.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = config.dtype or torch.bfloat16 if dtype is None else dtype
    model, found = cls.from_pretrained(
        None,
        config=config,
        state_dict=checkpoint.masters(dtype),
        dtype=dtype,
        quantization_config=chosen,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # named below; transformers' own error names none
    )
    other = sorted((key, list(stored), list(wanted)) for key, stored, wanted in found["mismatched_keys"])
    if other:
        key, stored, wanted = other[0]
        raise ValueError(
            f"{checkpoint.folder}: {key} is {stored} and its config.json makes it {wanted} ({len(other)} differ): the "
            "files are of another model; copy the folder again"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(f"{checkpoint.folder}: {missing[0]} is missing ({len(missing)} are); copy the folder again")
    if weights == "nvfp4":
        primary_weights_(model, checkpoint.quantized)
    return model


def _of_contract(checkpoint: Checkpoint) -> HalfbyteConfig:
    if checkpoint.contract is None:
        raise ValueError(
            f"{checkpoint.folder} has no contract of training: say how it is to be trained, such as "
            "quantization_config=HalfbyteConfig(recipe='nvfp4_forward')"
        )
    groups: dict[int, dict[str, None]] = {}
    for weight in checkpoint.contract.layers.values():
        if weight.shares is not None:
            groups.setdefault(weight.shares, {})[weight.layer] = None
    shares = [list(group) for group in groups.values()]
    return HalfbyteConfig(rules={"*": None, **checkpoint.contract.recipes}, share_amax=shares)


def _architecture(checkpoint: Checkpoint) -> Any:
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise ValueError(
            f"{checkpoint.folder}: architectures={names} in config.json; transformers {transformers.__version__} has "
            "no model of that name"
        )
    return cls


def _config(folder: Path) -> Any:
    """Return config.json as transformers reads it; its errors do not name the folder."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its strict dataclasses have errors of their own
        raise ValueError(f"{folder / 'config.json'}: transformers cannot read it: {error}") from error
