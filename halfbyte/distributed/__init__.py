"""Training on several ranks of torch.distributed: their random bits, and NVFP4 weights of sharded fp32 masters."""

from halfbyte.distributed.adopt import primary_weights_
from halfbyte.distributed.embedding import RowExchange, shard_embedding_
from halfbyte.distributed.fsdp import WeightGather, fsdp_gather_nvfp4_
from halfbyte.distributed.partial_cast import cast_master_weights_to_nvfp4, post_all_gather_processing
from halfbyte.distributed.placing import place_ranks_
from halfbyte.distributed.plan import storage_plan
from halfbyte.distributed.zero import ZeroConfig, ZeroOptimizer

__all__ = [
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
    "storage_plan",
]
