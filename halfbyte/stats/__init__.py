"""What quantization does to a model while it trains: statistics of sampled steps (docs/statistics.md)."""

from halfbyte.stats.collect import Statistics, collect_stats
from halfbyte.stats.figures import LayerStatistics, Product, Quantized, Spread
from halfbyte.stats.sinks import JSONL, Table, TensorBoard, WandB
from halfbyte.stats.table import StepStatistics

__all__ = [
    "JSONL",
    "LayerStatistics",
    "Product",
    "Quantized",
    "Spread",
    "Statistics",
    "StepStatistics",
    "Table",
    "TensorBoard",
    "WandB",
    "collect_stats",
]
