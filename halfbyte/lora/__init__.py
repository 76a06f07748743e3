"""Adapters over frozen codes (docs/lora.md)."""

from halfbyte.lora.adapt import Adapted, lora_
from halfbyte.lora.freeze import Frozen, freeze_
from halfbyte.lora.merge import Merged, MergedLayer, merge_lora_

__all__ = ["Adapted", "Frozen", "Merged", "MergedLayer", "freeze_", "lora_", "merge_lora_"]
