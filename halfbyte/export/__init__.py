"""Checkpoints that serving engines load: the bytes a model was trained with, in ModelOpt's or compressed-tensors' form.

`save` writes a Hugging Face folder, `load` reads one back, ours or another's; docs/export.md says what lies in it.
"""

from halfbyte.export.checkpoint import Checkpoint
from halfbyte.export.contract import Contract, ContractLayer
from halfbyte.export.read import load
from halfbyte.export.save import Exported, ExportedLayer, save

__all__ = ["Checkpoint", "Contract", "ContractLayer", "Exported", "ExportedLayer", "load", "save"]
