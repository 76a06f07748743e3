"""The functions that Megatron-Core's distributed optimizer calls, called as it calls them."""

import inspect

import megatron_checks as checks
import pytest
import ranks
import torch

from halfbyte.integrations import megatron
from halfbyte.tensor import PrimaryWeight


def test_train_as_megatron_does():
    ranks.run(3, checks.train_as_megatron_does)


def test_signatures_are_those_of_megatron():
    """As megatron.core.fp4_utils and, the last, megatron.core.fp8_utils publish them."""
    published = {
        "is_nvfp4tensor": ["tensor"],
        "get_nvfp4_rowwise_packed_shape": ["shape"],
        "modify_nvfp4_rowwise_storage": ["fp4_tensor", "new_rowwise_data"],
        "quantize_nvfp4_param_shard": [
            "model_params", "main_params", "start_offsets", "data_parallel_group", "fsdp_shard_model_params",
        ],
        "post_all_gather_processing": ["model_params"],
    }  # fmt: skip
    for name, parameters in published.items():
        assert list(inspect.signature(getattr(megatron, name)).parameters) == parameters


def test_wrong_storage_and_shapes_are_refused():
    weight = PrimaryWeight.empty((16, 32))
    for data in (torch.zeros(255, dtype=torch.uint8), torch.zeros(256), torch.zeros(512, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="give contiguous uint8 of 256 bytes"):
            megatron.modify_nvfp4_rowwise_storage(weight, data)
    with pytest.raises(ValueError, match="no multiple of 8"):
        megatron.modify_nvfp4_rowwise_storage(weight, torch.zeros(257, dtype=torch.uint8)[1:])
    with pytest.raises(ValueError, match="K % 16 must be 0"):
        megatron.get_nvfp4_rowwise_packed_shape((16, 40))
    assert not megatron.is_nvfp4tensor(torch.zeros(2, 2))
