"""Other packages that train or load models, each in a module that imports it, when it is asked for by its name."""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = ("axolotl", "lightning", "megatron", "torchtitan", "transformers")
"""Those that are meant to be used; their packages are imported with them."""


def __getattr__(name: str) -> ModuleType:
    if name not in MODULES:
        raise AttributeError(f"halfbyte.integrations has no {name!r}; it has {', '.join(MODULES)}")
    return importlib.import_module(f"{__name__}.{name}")
