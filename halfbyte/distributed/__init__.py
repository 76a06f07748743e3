"""Training on several ranks of torch.distributed: their random bits, and NVFP4 weights of sharded fp32 masters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfbyte.distributed.adopt import primary_weights_
from halfbyte.distributed.embedding import RowExchange, shard_embedding_
from halfbyte.distributed.fsdp import WeightGather, fsdp_gather_nvfp4_
from halfbyte.distributed.head import LogitShards
from halfbyte.distributed.partial_cast import cast_master_weights_to_nvfp4, post_all_gather_processing
from halfbyte.distributed.placing import place_ranks_
from halfbyte.distributed.plan import storage_plan
from halfbyte.distributed.zero import ZeroConfig, ZeroOptimizer

if TYPE_CHECKING:
    from halfbyte.distributed.expert_style import ExpertParallel
    from halfbyte.distributed.experts import ExpertExchange, shard_experts_
    from halfbyte.distributed.feature_styles import GroupedColwise, GroupedRowwise
    from halfbyte.distributed.tp_styles import NVFP4Colwise, NVFP4Rowwise

__all__ = [
    "ExpertExchange",
    "ExpertParallel",
    "GroupedColwise",
    "GroupedRowwise",
    "LogitShards",
    "NVFP4Colwise",
    "NVFP4Rowwise",
    "RowExchange",
    "WeightGather",
    "ZeroConfig",
    "ZeroOptimizer",
    "cast_master_weights_to_nvfp4",
    "fsdp_gather_nvfp4_",
    "place_ranks_",
    "post_all_gather_processing",
    "primary_weights_",
    "shard_embedding_",
    "shard_experts_",
    "storage_plan",
]


_LATER = {
    "NVFP4Colwise": "tp_styles",
    "NVFP4Rowwise": "tp_styles",
    "GroupedColwise": "feature_styles",
    "GroupedRowwise": "feature_styles",
    "ExpertParallel": "expert_style",
    "ExpertExchange": "experts",
    "shard_experts_": "experts",
}


def __getattr__(name: str) -> Any:
    """Import torch's styles, which take a while, for those who name ours."""
    if name in _LATER:
        return getattr(import_module(f"halfbyte.distributed.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
