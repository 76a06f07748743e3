"""halfbyte: train neural networks in NVFP4 on any hardware, with the same bytes everywhere.

`import halfbyte as hb`, then `report = hb.quantize_(model, hb.recipes.nvfp4())` converts a model in place.
"""

from halfbyte import arguments as _arguments
from halfbyte.version import __version__

try:
    from halfbyte import distributed, export, layout, nn, recipes, stats
    from halfbyte import integrations as integrations  # imports the package of each when it is asked for
    from halfbyte.convert import Keep, Report, high_precision, quantize_, set_recipe_
    from halfbyte.functional import gemm_nt, grouped_gemm_nt, grouped_linear, linear, linear_shared
    from halfbyte.lora import freeze_, lora_, merge_lora_
    from halfbyte.memory import memory_report
    from halfbyte.nn import cache_weights
    from halfbyte.ops import backends, selective_checkpoint_ops
    from halfbyte.rng import Philox
    from halfbyte.schedule import Schedule
    from halfbyte.spec import MXFP8, NVFP4, BlockMax, Eden, FourOverSix, GemmSpec, Hadamard, Recipe
    from halfbyte.state import RunState
    from halfbyte.stats import collect_stats, inspect
    from halfbyte.tensor import QuantTensor, grouped_quantize_row_col, quantize, quantize_row_col
    from halfbyte.unconvert import unquantize_
except KeyboardInterrupt:  # torch takes seconds to import, before any code of the command runs
    _arguments.end_command()
    raise

__all__ = [
    "MXFP8",
    "NVFP4",
    "BlockMax",
    "Eden",
    "FourOverSix",
    "GemmSpec",
    "Hadamard",
    "Keep",
    "Philox",
    "QuantTensor",
    "Recipe",
    "Report",
    "RunState",
    "Schedule",
    "__version__",
    "backends",
    "cache_weights",
    "collect_stats",
    "distributed",
    "export",
    "freeze_",
    "gemm_nt",
    "grouped_gemm_nt",
    "grouped_linear",
    "grouped_quantize_row_col",
    "high_precision",
    "inspect",
    "layout",
    "linear",
    "linear_shared",
    "lora_",
    "memory_report",
    "merge_lora_",
    "nn",
    "quantize",
    "quantize_",
    "quantize_row_col",
    "recipes",
    "selective_checkpoint_ops",
    "set_recipe_",
    "stats",
    "unquantize_",
]
