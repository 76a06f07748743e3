"""What quantization does to a model while it trains: statistics of sampled steps (docs/statistics.md)."""

from halfbyte.stats.collect import StatsCollector, collect_stats
from halfbyte.stats.figures import LayerStatistics, OperandStatistics, ProductStatistics, TensorStatistics
from halfbyte.stats.inspection import Finding, InspectReport, inspect
from halfbyte.stats.noise import GradientNoise, gradient_noise
from halfbyte.stats.sensitivity import Proposal, SensitivityReport, Trial, sensitivity
from halfbyte.stats.sinks import JSONL, Table, TensorBoard, WandB, read_records
from halfbyte.stats.table import StepStatistics

__all__ = [
    "JSONL",
    "Finding",
    "GradientNoise",
    "InspectReport",
    "LayerStatistics",
    "OperandStatistics",
    "ProductStatistics",
    "Proposal",
    "SensitivityReport",
    "StatsCollector",
    "StepStatistics",
    "Table",
    "TensorBoard",
    "TensorStatistics",
    "Trial",
    "WandB",
    "collect_stats",
    "gradient_noise",
    "inspect",
    "read_records",
    "sensitivity",
]
