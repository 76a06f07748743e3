"""NVFP4 weights for optimizers that shard fp32 masters over the ranks of torch.distributed."""

from halfbyte.distributed.partial_cast import cast_master_weights_to_nvfp4, post_all_gather_processing
from halfbyte.distributed.plan import storage_plan
from halfbyte.distributed.zero import ZeroConfig, ZeroOptimizer

__all__ = [
    "ZeroConfig",
    "ZeroOptimizer",
    "cast_master_weights_to_nvfp4",
    "post_all_gather_processing",
    "storage_plan",
]
