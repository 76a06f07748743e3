"""HalfbyteConfig: models of transformers that train under a recipe, by `from_pretrained(…, quantization_config=…)`.

A quantizer of transformers chooses what becomes of a model before its weights are loaded. This one converts its layers
as `hb.quantize_` does; weights stay masters in high precision under their names, so checkpoints are those of the model,
with the recipe in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.convert import check_share_amax, quantize_
from halfbyte.decide import SHARE_AMAX
from halfbyte.distributed import primary_weights_
from halfbyte.policy import Keep
from halfbyte.recipes import PRESETS, read_recipe, resolve
from halfbyte.report import Report
from halfbyte.spec import Recipe
from halfbyte.state import RunState

METHOD = "halfbyte"
Weights = Literal["plain", "nvfp4"]


@register_quantization_config(METHOD)
class HalfbyteConfig(QuantizationConfigMixin):
    """How a model of transformers is converted: the arguments of `hb.quantize_`, as config.json can hold them.

    Args:
        recipe: a Recipe, a preset's name or a recipe's key.
        rules: {glob: recipe, or None for high precision}; the last match wins.
        keep: what stays in high precision, an hb.Keep or a dict of its fields; None for its defaults.
        seed: of the RunState that random operands draw from.
        weights: "plain" keeps masters in high precision; "nvfp4" keeps, once loaded, the codes alone of every weight
            that the recipes allow (hb.distributed.primary_weights_), which a ZeroOptimizer trains.
        share_amax: groups of globs, as for hb.quantize_; None for its default.
        quant_method: "halfbyte", as config.json says it.

    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    def __init__(
        self,
        recipe: Recipe | str = "nvfp4",
        rules: Mapping[str, Recipe | str | None] | None = None,
        keep: Keep | Mapping[str, Any] | None = None,
        seed: int = 0,
        weights: Weights = "plain",
        share_amax: Sequence[Sequence[str]] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method={quant_method!r}: HalfbyteConfig is {METHOD!r}")
        RunState(seed)  # refuses what is no seed
        if weights not in get_args(Weights):
            raise ValueError(f"weights={weights!r}: give 'plain' or 'nvfp4'")
        self.quant_method: Any = METHOD
        self.recipe = _written(recipe)
        self.rules = {glob: None if rule is None else _written(rule) for glob, rule in (rules or {}).items()}
        self.keep = _kept(keep)
        check_share_amax(share_amax or ())
        self.share_amax = None if share_amax is None else [list(group) for group in share_amax]
        self.seed, self.weights = seed, weights

    def convert_(self, model: nn.Module) -> Report:
        """Convert a model as `hb.quantize_` does, and return its report."""
        rules = {glob: None if rule is None else read_recipe(rule) for glob, rule in self.rules.items()}
        keep = None if self.keep is None else Keep(**self.keep | {"names": tuple(self.keep["names"])})
        with torch.device("cpu"):  # transformers builds models on the meta device, which holds no state
            groups = SHARE_AMAX if self.share_amax is None else self.share_amax
            chosen = {"rules": rules, "keep": keep, "share_amax": groups}
            return quantize_(model, read_recipe(self.recipe), **chosen, state=RunState(self.seed))


def _written(recipe: Recipe | str) -> str:
    """Return a recipe as text: the name that it was given by, else its key."""
    if isinstance(recipe, str):
        read_recipe(recipe)
        return recipe
    resolve(recipe)
    return next((name for name, preset in PRESETS.items() if preset() == recipe), recipe.key)


def _kept(keep: Keep | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if keep is None:
        return None
    if not isinstance(keep, Keep | Mapping):
        raise TypeError(f"keep={keep!r}: give a Keep, such as hb.Keep(last_fraction=0.3)")
    if not isinstance(keep, Keep):
        keep = Keep(**dict(keep))
    fields = {"first_blocks": keep.first_blocks, "last_fraction": keep.last_fraction}
    return {"names": list(keep.names), **fields}


def _refuse_codes(files: Sequence[Any]) -> None:
    """Raise ValueError for a folder of ModelOpt's form, which transformers does not know: codes are no values."""
    for file in files:
        folder = Path(file).parent
        if (folder / "hf_quant_config.json").exists():
            raise ValueError(
                f"{folder}: its weights are codes in ModelOpt's form, which from_pretrained does not read; use "
                "halfbyte.integrations.transformers.load_exported(folder, HalfbyteConfig(…))"
            )


def _refuse_offload(device_map: Any, layers: Sequence[str]) -> None:
    """Raise ValueError where converted layers would live on a disk or, beside a GPU, in the host's memory."""
    if not isinstance(device_map, Mapping):
        return
    kinds = {place: str(device).partition(":")[0] for place, device in device_map.items()}  # GPUs may be numbers
    away = {"disk", "cpu"} if set(kinds.values()) - {"cpu", "disk"} else {"disk"}
    for layer in layers:
        parts = layer.split(".")
        homes = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
        home = next(([kinds[home]] for home in homes if home in kinds), [])
        own = [kind for place, kind in kinds.items() if place.startswith(f"{layer}.")]  # of its weight alone
        kind = next((kind for kind in own + home if kind in away), None)
        if kind is not None:
            raise ValueError(
                f"device_map puts {layer} on {kind!r}: accelerate would bring back one layer at a time, without "
                "gradients and without the siblings that share its amax; give room for all converted layers "
                f"(max_memory, more GPUs), or keep it in high precision, rules={{{layer!r}: None}}"
            )


@register_quantizer(METHOD)
class HalfbyteQuantizer(HfQuantizer):
    """What transformers calls while it loads a model with a HalfbyteConfig.

    report: of the conversion; report.state is the RunState that `HalfbyteCallback` advances in a Trainer, and that a
        loop of your own has to.
    """

    report: Report | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse places of converted layers; transformers calls it before and once "auto" has become a map."""
        _refuse_offload(kwargs.get("device_map"), () if self.report is None else self.report.converted)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _refuse_codes(kwargs.get("checkpoint_files") or ())
        config: Any = self.quantization_config
        self.report = config.convert_(model)
        _refuse_offload(kwargs.get("device_map"), self.report.converted)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if getattr(self.quantization_config, "weights", "plain") == "nvfp4":
            primary_weights_(model)
        return model

    def is_serializable(self) -> bool:
        """Return whether save_pretrained writes the model: plain parameters; codes are hb.export.save's."""
        return getattr(self.quantization_config, "weights", "plain") == "plain"

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        from halfbyte.unconvert import unquantize_

        unquantize_(model)
        return model
