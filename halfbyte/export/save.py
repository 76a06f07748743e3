"""save: a trained model as a Hugging Face folder that serving engines load, with the bytes that it was trained with."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.export import forms, names, stacked, write
from halfbyte.export.calibrate import input_amaxes
from halfbyte.export.contract import FILE, Contract, ContractLayer, digest
from halfbyte.export.serve import half_quantized, input_spec, servable, share_groups
from halfbyte.export.trained import Trained, find_trained
from halfbyte.lora.freeze import reads_more_than_codes
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.notebook import ShowsText
from halfbyte.report import some
from halfbyte.spec import NVFP4
from halfbyte.tensor.quant_tensor import describe
from halfbyte.version import __version__


@dataclass(frozen=True, kw_only=True)
class ExportedLayer:
    """One layer of an export: how its weight is stored, and the share of its bytes that are not the trained ones."""

    name: str
    spec: str
    changed: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Exported(ShowsText):
    """What `save` wrote; prints as a table.

    Args:
        folder: where it lies.
        layers: the quantized ones, in the model's order.
        exclude: modules that stay in high precision.
        changed: bytes of codes and scales that are not the trained ones, and all of them.
        nbytes: of all tensors.
        unfusable: layers in high precision that engines fuse with quantized ones, which engines refuse; transformers
            does not mind.
        more_than_codes: layers whose recipe multiplies a part of x by the weight in high precision, not stored.
    """

    folder: Path
    layers: tuple[ExportedLayer, ...]
    exclude: tuple[str, ...]
    changed: tuple[int, int]
    nbytes: int
    unfusable: tuple[str, ...] = ()
    more_than_codes: tuple[str, ...] = ()

    @property
    def share_changed(self) -> float:
        """The share of the quantized bytes that differ from the trained ones, 0 where nothing was quantized again."""
        return self.changed[0] / self.changed[1] if self.changed[1] else 0.0

    def __str__(self) -> str:
        table = [("layer", "stored as", "bytes changed", "why")]
        table += [(row.name, row.spec, f"{100 * row.changed:.3g} %", row.reason) for row in self.layers]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(
            f"{len(self.layers)} layers in NVFP4, {len(self.exclude)} modules in high precision, {self.nbytes:,} bytes "
            f"in {self.folder}; {100 * self.share_changed:.3g} % of the quantized bytes differ from the trained ones"
        )
        if self.unfusable:
            lines.append(
                f"engines fuse {some(self.unfusable)} with layers in NVFP4 and refuse families of two formats: train "
                "all of a family in one recipe"
            )
        if self.more_than_codes:
            lines.append(
                f"the training of {some(self.more_than_codes)} multiplied part of x (its mean, or few channels) by the "
                "weight in high precision, which the files do not hold: outputs differ though codes do not; a recipe "
                "with activation_mean='kept' and channels=None trains what is served"
            )
        return "\n".join(lines)


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    format: str = forms.COMPRESSED_TENSORS,
    activations: str = forms.NONE,
    batches: Iterable[Any] = (),
    compute_dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> Exported:
    """Write a model that `hb.quantize_` converted as a checkpoint for serving engines: weights, config, tokenizer.

    Weights whose forward is in NVFP4 are stored as the codes and scales that this forward reads; nothing is quantized
    again except what engines cannot read (siblings that they fuse with several amaxes, an amax per row, rotations),
    which the result reports. All else keeps its dtype. `halfbyte.json` holds the contract of training.

    Args:
        model: a PreTrainedModel of transformers, whole in memory.
        folder: that is not there yet, or empty; it appears when all of it is written.
        format: "compressed-tensors" or "modelopt".
        activations: how engines quantize what layers multiply by: "static" in NVFP4 with the factors found in
            `batches`; "per-token" in NVFP4 with a factor of every token's own, which not all engines know; "none" not.
        batches: for "static": mappings of the model's arguments, tuples of them, or tensors.
        compute_dtype: that GEMMs computed in, to which weights were rounded first; None: the weights' own. Has to be
            said for float32 weights.
        tokenizer: whose save_pretrained writes it beside the weights.

    Returns:
        Exported, which prints as a table.

    Raises:
        ValueError: an argument is no such word, the folder is taken, or the model has no trained bytes or no form.
        OSError: the folder cannot be written; nothing is left then.
    """
    target = Path(folder).absolute()
    _check(model, format, activations, batches)
    write.refuse_taken(target)
    trained = find_trained(model, compute_dtype)
    names.check_tied(model, trained)
    stacked.check_stacked(trained, format)
    trained, groups = servable(model, trained)
    amaxes = input_amaxes(model, list(trained), batches) if activations == forms.STATIC else {}
    tensors, layers, exclude = _tensors(model, trained, format, amaxes, share_groups(model, trained, groups))
    contract = Contract(
        version=__version__,
        format=format,
        activations=activations,
        layers=layers,
        recipes=_recipes(model),
    )
    with write.new_folder(target) as place:
        nbytes = write.write_tensors(place, tensors)
        _write_rest(place, model, contract, exclude)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
    rows, changed, total = zip(*((_row(one), *one.changed) for one in trained.values()), strict=True)
    sums = (sum(changed), sum(total))
    wrote = {"folder": target, "exclude": tuple(exclude), "nbytes": nbytes}
    said = {"unfusable": tuple(half_quantized(model, trained)), "more_than_codes": _more_than_codes(trained)}
    return Exported(layers=rows, changed=sums, **wrote, **said)


def _check(model: nn.Module, format: str, activations: str, batches: Iterable[Any]) -> None:
    names.check_model(model)
    for name, value, known in (("format", format, forms.FORMATS), ("activations", activations, forms.ACTIVATIONS)):
        if value not in known:
            raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, known))}")
    if activations != forms.STATIC and batches != ():
        raise ValueError(f"batches are given, and activations={activations!r} needs none; say activations='static'")
    if activations == forms.STATIC and batches == ():
        raise ValueError("activations='static': give batches, from which the factors of the inputs are found")


def _recipes(model: nn.Module) -> dict[str, str]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FollowsRecipe)}
    return {name: layer.recipe.key for name, layer in layers.items() if layer.recipe.specs}


def _tensors(
    model: nn.Module, trained: Mapping[str, Trained], form: str, amaxes: Mapping[str, float], shares: Mapping[str, int]
) -> tuple[dict[str, Tensor], dict[str, ContractLayer], list[str]]:
    """Return the checkpoint's tensors, what the contract says of the quantized ones, and the modules left alone."""
    plain = names.plain_state(model, trained)
    stored = names.in_checkpoint(model, plain)
    exclude = names.high_precision_modules(model, plain, stored)
    planes, owners = names.planes(model, trained)
    planes.update({one.key: stacked.stacked_planes(one) for one in trained.values() if one.transposed})
    owners |= {one.key: name for name, one in trained.items() if one.transposed}
    tensors, layers = write.same_memory(stored), {}
    for key, values in planes.items():
        one, prefix = trained[owners[key]], key.removesuffix(".weight")
        if one.transposed:
            tensors |= stacked.stacked_tensors(key, values, one.spec)
        else:
            tensors |= forms.weight_tensors(prefix, form, values, one.spec)
        if amaxes:
            factor = forms.input_factor(form, amaxes[one.layer], input_spec(one.recipe))
            tensors[stacked.part_key(key, forms.INPUTS[form])] = factor
        layers[key] = ContractLayer(
            layer=one.layer,
            spec=_stored_spec(one.spec, values[1].flatten(0, -2)).key,
            amax=float(values[2]).hex(),
            compute_dtype=str(one.compute_dtype).removeprefix("torch."),
            sha256=digest(values[0], values[1]),
            shares=shares.get(one.layer),
            changed=_share(one),
        )
    return tensors, layers, exclude


def _stored_spec(spec: NVFP4, scales: Tensor) -> NVFP4:
    """Return a weight's spec; in 1x16 blocks where a checkpoint cuts it within tiles, as gate from up of an expert."""
    first = torch.arange(scales.shape[0], device=scales.device) // spec.block[0] * spec.block[0]
    return spec if torch.equal(scales, scales[first]) else dataclasses.replace(spec, block=(1, spec.block[1]))


def _write_rest(place: Path, model: Any, contract: Contract, exclude: list[str]) -> None:
    model.config.save_pretrained(place)
    path = place / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = forms.quantization_config(contract.format, contract.activations, exclude)
    write.write_folder_json(path, config)
    if contract.format == forms.MODELOPT:
        write.write_folder_json(place / "hf_quant_config.json", forms.modelopt_file(contract.activations, exclude))
    if model.can_generate():
        model.generation_config.save_pretrained(place)
    (place / FILE).write_text(contract.to_json(), encoding="utf-8")


def _more_than_codes(trained: Mapping[str, Trained]) -> tuple[str, ...]:
    recipes = {name: one.recipe for name, one in trained.items() if one.recipe is not None}
    return tuple(name for name, recipe in recipes.items() if reads_more_than_codes(recipe))


def _row(one: Trained) -> ExportedLayer:
    return ExportedLayer(name=one.layer, spec=describe(one.spec), changed=_share(one), reason=one.reason)


def _share(one: Trained) -> float:
    share = one.changed[0] / one.changed[1] if one.changed[1] else 0.0
    assert math.isfinite(share), "a part of a whole"
    return share
