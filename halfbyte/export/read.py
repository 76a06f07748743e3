"""load: a folder of NVFP4 weights in ModelOpt's or compressed-tensors' form, ours or another's, as QuantTensors."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.export import forms, stacked
from halfbyte.export.checkpoint import Checkpoint
from halfbyte.export.contract import DTYPES, FILE, Contract, ContractLayer, digest
from halfbyte.export.files import inner_object, read_folder_json, read_tensors
from halfbyte.export.serve import decode_factor, encode_factor, input_spec
from halfbyte.layout import Blocks
from halfbyte.spec import NVFP4, parse, parse_recipe
from halfbyte.tensor import QuantTensor

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "FP8")
FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
PARTS = ("weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
CACHE = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
ULPS = (0, 1, -1, 2, -2)
NAMES = {
    forms.MODELOPT: ("weight", "weight_scale_2"),
    forms.COMPRESSED_TENSORS: ("weight_packed", "weight_global_scale"),
}


def load(folder: str | Path) -> Checkpoint:
    """Read a checkpoint with weights in NVFP4 (and FP8, in a checkpoint of mixed precision).

    Codes and block scales are those of the files. Of a folder that halfbyte wrote, the contract of training says specs
    and amaxes and is checked against the files; else the amax is that whose fp32 factor is the stored one.

    Args:
        folder: with config.json and safetensors, and hf_quant_config.json if ModelOpt wrote it.

    Raises:
        ValueError: a file is missing, truncated or foreign, a weight lacks a part, the form is another one, or the
            files are not those that the contract is of.
        ImportError: the package safetensors is missing.
    """
    path = Path(folder)
    config = read_folder_json(path / "config.json")
    form, described = _form(path, config)
    tensors = read_tensors(path)
    contract = _contract(path)
    experts = stacked.find_stacked(path, form, tensors)
    rest = {key: tensor for key, tensor in tensors.items() if key not in experts}
    weights, fp8 = _weights(path, form, rest) | experts, _fp8(path, tensors)
    _check_described(path, form, described, weights, fp8)
    if contract is not None:
        _check_contract(path, contract, form, weights)
    dtype = DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))), torch.bfloat16)
    layers = {} if contract is None else contract.layers
    quants = {key: _quant(path, key, form, weight, (layers.get(key), dtype)) for key, weight in weights.items()}
    values = {key: _fp8_values(path, key, tensors, dtype) for key in fp8}
    quantized = (*weights, *fp8)
    used = {stacked.part_key(key, part) for key in quantized for part in (*PARTS, "weight", "weight_shape")} | set(
        experts
    )
    rest = {key: tensor for key, tensor in tensors.items() if key not in used}
    cache = {key: tensor for key, tensor in rest.items() if key.endswith(CACHE)}
    return Checkpoint(
        folder=path,
        format=form,
        config={key: value for key, value in config.items() if key != "quantization_config"},
        tensors={key: tensor for key, tensor in rest.items() if key not in cache} | quants | values,
        input_amaxes=_input_amaxes(path, form, {key: _input_spec(contract, key) for key in quants}, tensors),
        fp8=tuple(fp8),
        transposed=tuple(experts),
        cache_scales=cache,
        contract=contract,
    )


def _form(path: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the form and what describes it; older ModelOpt wrote only hf_quant_config.json."""
    described = config.get("quantization_config")
    if described is None and (path / "hf_quant_config.json").exists():
        return forms.MODELOPT, read_folder_json(path / "hf_quant_config.json").get("quantization") or {}
    method = described.get("quant_method") if isinstance(described, dict) else None
    if method not in forms.FORMATS or not isinstance(described, dict):
        found = "no quantization_config" if described is None else f"quant_method={method!r}"
        raise ValueError(
            f"{path / 'config.json'}: has {found}; this reads {' and '.join(map(repr, forms.FORMATS))}; load others "
            "with transformers' from_pretrained"
        )
    return method, described


def _contract(path: Path) -> Contract | None:
    try:
        return Contract.from_json((path / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; copy the folder again, or delete it to load the folder as anybody's"
        ) from error


Stored = tuple[Tensor, Tensor, Tensor]
"""Codes uint8 [N, K/2], block scales E4M3 [N, K/16], and the fp32 factor as the form has it, []."""


def _weights(path: Path, form: str, tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Return the parts of every weight in NVFP4, by the key that the architecture's checkpoints have."""
    packed, factor = NAMES[form]
    found = {}
    for key, codes in tensors.items():
        prefix, _, name = key.rpartition(".")
        if codes.dtype != torch.uint8 or name != packed:
            if codes.dtype == torch.uint8:
                raise ValueError(f"{path}: {key} is uint8, and weights of {form!r} are called ….{packed}: not read")
            continue
        parts = [tensors.get(f"{prefix}.{part}") for part in ("weight_scale", factor)]
        missing = [f"{prefix}.{n}" for n, part in zip(("weight_scale", factor), parts, strict=True) if part is None]
        scale, number = parts
        if missing or scale is None or number is None:
            raise ValueError(f"{path}: {missing[0]} is missing beside {key}; copy the folder again")
        _check_parts(path, key, (codes, scale, number))
        found[f"{prefix}.weight"] = (codes, scale, number.reshape(()).float())
    orphans = [k for k in tensors if k.endswith(f".{factor}") and f"{k.rpartition('.')[0]}.weight" not in found]
    if orphans:
        raise ValueError(f"{path}: {orphans[0]} is of a weight that is missing or not packed; copy the folder again")
    return found


def _check_parts(path: Path, key: str, parts: Stored) -> None:
    codes, scale, factor = parts
    expected = (codes.shape[0], codes.shape[-1] // 8)
    if codes.dim() != 2 or codes.shape[1] % 8 or scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != expected:
        raise ValueError(
            f"{path}: {key} is uint8 {list(codes.shape)} and its block scale {scale.dtype} {list(scale.shape)}; NVFP4 "
            f"has float8_e4m3fn {list(expected)}, linear"
        )
    if factor.numel() != 1 or not bool(torch.isfinite(factor.float()).all() & (factor.float() > 0).all()):
        raise ValueError(f"{path}: the fp32 factor of {key} is {factor.flatten().tolist()[:4]}; one positive number is")
    stacked.check_scales(path, key, scale)


def _fp8(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    keys = [k for k, t in tensors.items() if t.dtype == torch.float8_e4m3fn and k.endswith(".weight")]
    for key in keys:
        if f"{key}_scale" not in tensors:
            raise ValueError(f"{path}: {key}_scale is missing beside {key}; copy the folder again")
    return keys


def _fp8_values(path: Path, key: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the values of a weight in FP8 with one scale, or one for every row."""
    weight, scale = tensors[key].float(), tensors[f"{key}_scale"].float()
    if scale.numel() not in (1, weight.shape[0]):
        raise ValueError(f"{path}: {key}_scale is {list(scale.shape)}; FP8 with one scale, or one a row, is read")
    return (weight * scale.reshape(-1, 1)).to(dtype)


def _check_described(
    path: Path, form: str, described: Mapping[str, Any], weights: Mapping[str, Stored], fp8: list[str]
) -> None:
    """Raise where the config says something else than the files hold."""
    if form == forms.MODELOPT:
        algorithm = described.get("quant_algo")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{path}: quant_algo={algorithm!r}; {', '.join(ALGORITHMS)} are read")
        for name, layer in inner_object(path, described, "quantized_layers").items():
            said = inner_object(path, {name: layer}, name)
            _check_layer(path, name, said.get("quant_algo"), weights, fp8)
    groups = inner_object(path, described, "config_groups")
    for name in groups:
        scheme = inner_object(path, inner_object(path, groups, name), "weights")
        bits, kind, size = scheme.get("num_bits"), scheme.get("type"), scheme.get("group_size")
        if (bits, kind) != (8, "float") and (bits, kind, size) != (4, "float", NVFP4().block_length):
            raise ValueError(
                f"{path}: {name} has weights of {bits} bits, {kind}, in groups of {size}; NVFP4 and FP8 are read"
            )
    if not weights:
        raise ValueError(f"{path}: no tensor of it is a weight in NVFP4; load it with transformers' from_pretrained")


def _check_layer(path: Path, name: str, algorithm: Any, weights: Mapping[str, Stored], fp8: list[str]) -> None:
    """Raise unless a layer that a mixed checkpoint names lies there in the format that it says."""
    if algorithm not in ALGORITHMS and algorithm not in FP8_ALGORITHMS:
        raise ValueError(f"{path}: quantized_layers has {name} in {algorithm!r}; NVFP4 and FP8 are read")
    keys = fp8 if algorithm in FP8_ALGORITHMS else weights
    if not any(
        key == f"{name}.weight" or key.startswith(f"{name}.") or fnmatchcase(key, f"{name}.weight") for key in keys
    ):
        raise ValueError(
            f"{path}: quantized_layers has {name} in {algorithm}, and the files do not; copy the folder again"
        )


def _check_contract(path: Path, contract: Contract, form: str, weights: Mapping[str, Stored]) -> None:
    """Raise where the files are not those that the contract was written with."""

    def refuse(what: str) -> None:
        raise ValueError(
            f"{path}: {what}, so {FILE} is not the contract of these weights; copy the folder again, or delete {FILE} "
            "to load it as anybody's"
        )

    if contract.format != form:
        refuse(f"it is in the form {form!r} and was written as {contract.format!r}")
    for key in sorted(contract.layers.keys() ^ weights.keys()):
        refuse(f"{key} is in {'the contract' if key in contract.layers else 'the files'} alone")
    for key, layer in contract.layers.items():
        codes, scale, factor = weights[key]
        if digest(codes, scale) != layer.sha256:
            refuse(f"the bytes of {key} are not those of the export")
        if float(_factor(form, _spec(layer), torch.tensor(float.fromhex(layer.amax), dtype=torch.float32))) != float(
            factor
        ):
            refuse(f"the fp32 factor of {key} is not that of its amax")


def _spec(layer: ContractLayer) -> NVFP4:
    spec = parse(layer.spec)
    assert isinstance(spec, NVFP4), "checked when the contract was read"
    return spec


def _input_spec(contract: Contract | None, key: str) -> NVFP4:
    recipe = None if contract is None else contract.recipes.get(contract.layers[key].layer)
    return input_spec(None if recipe is None else parse_recipe(recipe))


def _factor(form: str, spec: NVFP4, amax: Tensor) -> Tensor:
    return decode_factor(spec, amax) if form == forms.MODELOPT else encode_factor(spec, amax)


def _quant(
    path: Path, key: str, form: str, stored: Stored, known: tuple[ContractLayer | None, torch.dtype]
) -> QuantTensor:
    (codes, scale, factor), (layer, dtype) = stored, known
    if layer is None:
        spec, amax = NVFP4(), _amax(form, NVFP4(), factor)
    else:
        spec, amax, dtype = (
            _spec(layer),
            torch.tensor(float.fromhex(layer.amax), dtype=torch.float32),
            DTYPES[layer.compute_dtype],
        )
    blocks = Blocks(codes.flatten(0, -2), scale.view(torch.uint8).flatten(0, -2), amax)
    return QuantTensor(blocks, spec, shape=(*codes.shape[:-1], codes.shape[-1] * 2), dtype=dtype)


def _amax(form: str, spec: NVFP4, factor: Tensor) -> Tensor:
    """Return the amax whose factor is the stored one, or comes nearest to it; several may have it."""
    product = torch.tensor(spec.e4m3_max * spec.fp4_max, dtype=torch.float32)
    nearest = factor * product if form == forms.MODELOPT else product / factor
    of_bf16 = nearest.bfloat16().float()  # what it was, if the tensor was bf16
    for amax in (of_bf16, *((nearest.view(torch.int32) + ulps).view(torch.float32) for ulps in ULPS)):
        if torch.equal(_factor(form, spec, amax), factor):
            return amax
    return nearest


def _input_amaxes(path: Path, form: str, specs: Mapping[str, NVFP4], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return what engines were told of inputs, as amaxes."""
    found = {}
    for key, spec in specs.items():
        name = stacked.part_key(key, forms.INPUTS[form])
        factor = tensors.get(name)
        if factor is not None:
            if factor.numel() != 1 or not 0 < float(factor) < float("inf"):
                raise ValueError(
                    f"{path}: {name} is {factor.flatten().tolist()[:4]}; one positive number is: no batch reached that "
                    "layer when it was calibrated; calibrate again, or remove the factor to read the weights"
                )
            found[key.removesuffix(".weight")] = float(_amax(form, spec, factor.reshape(()).float()))
    return found
