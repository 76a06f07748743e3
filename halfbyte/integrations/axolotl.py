"""An Axolotl plugin that trains in a recipe: `plugins: [halfbyte.integrations.axolotl.NVFP4Plugin]` in its YAML.

Axolotl builds a model and hands it to its plugins before adapters are put in, then builds transformers' Trainer: one
is where the model is converted, the other where HalfbyteCallback comes in.
"""

from __future__ import annotations

from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from halfbyte.integrations.quantizer import HalfbyteConfig
from halfbyte.integrations.trainer import HalfbyteCallback

EVALUATION = "high_precision"


class HalfbyteArgs(BaseModel):
    """What the plugin reads of a YAML file; the words of HalfbyteConfig and HalfbyteCallback."""

    halfbyte_recipe: str = "nvfp4"
    halfbyte_rules: dict[str, str | None] | None = None
    halfbyte_keep: dict[str, Any] | None = None
    halfbyte_seed: int = 0
    halfbyte_evaluation: Literal["high_precision", "as_trained"] = EVALUATION


class NVFP4Plugin(BasePlugin):
    """Converts the model that Axolotl built, and adds the callback that moves its RunState on."""

    def get_input_args(self) -> str:
        """Return where Axolotl finds the options."""
        return f"{__name__}.{HalfbyteArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Convert the model, before adapters are put in: these stay in high precision."""
        if cfg.get("load_in_4bit") or cfg.get("load_in_8bit"):
            raise ValueError(
                "load_in_4bit, load_in_8bit: bitsandbytes holds the weights then; leave them out, the recipe quantizes"
            )
        rules, keep = cfg.get("halfbyte_rules"), cfg.get("halfbyte_keep")
        config = HalfbyteConfig(
            cfg.get("halfbyte_recipe") or "nvfp4",
            rules=None if rules is None else dict(rules),
            keep=None if keep is None else dict(keep),
            seed=cfg.get("halfbyte_seed") or 0,
        )
        print(config.convert_(model))

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Return the callback that every Trainer of a converted model needs."""
        return [HalfbyteCallback(evaluation=cfg.get("halfbyte_evaluation") or EVALUATION)]
