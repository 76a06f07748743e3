"""The functions that Megatron-Core's distributed optimizer calls, called as it calls them."""

import copy
import inspect

import megatron_checks as checks
import megatron_expert_checks as expert_checks
import pytest
import ranks
import torch

import halfbyte as hb
from halfbyte.integrations import megatron
from halfbyte.tensor import PrimaryWeight


def test_train_as_megatron_does():
    ranks.run(3, checks.train_as_megatron_does)


@pytest.mark.parametrize(("world", "later"), [(1, 2), (2, 3), (3, 2)])
def test_weights_of_odd_shards_are_cast_saved_and_loaded_by_other_ranks(world, later, tmp_path):
    """Neither tiles nor ranks divide them: shards begin within rows, tiles, experts and bytes; a rank may have none."""
    borders = [
        expert_checks.shares(torch.Size(shape).numel(), rank, world)[0]
        for shape in expert_checks.SHAPES.values()
        for rank in range(world)
    ]
    assert world != 3 or any(border % 2 for border in borders), "bytes are cut"
    for n, check in ((world, expert_checks.saved), (later, expert_checks.loaded)):
        assert ranks.run(n, check, str(tmp_path)) == [[]] * n


def test_experts_train_as_in_bf16():
    assert ranks.run(2, expert_checks.trained) == [[]] * 2


def test_signatures_are_those_of_megatron():
    """As megatron.core.fp4_utils and, the last four, megatron.core.fp8_utils publish them."""
    published = {
        "is_nvfp4tensor": ["tensor"],
        "get_nvfp4_rowwise_packed_shape": ["shape"],
        "modify_nvfp4_rowwise_storage": ["fp4_tensor", "new_rowwise_data"],
        "is_grouped_nvfp4tensor": ["tensor"],
        "modify_grouped_nvfp4_rowwise_storage": ["grouped_tensor", "new_rowwise_data"],
        "quantize_nvfp4_param_shard": [
            "model_params", "main_params", "start_offsets", "data_parallel_group", "fsdp_shard_model_params",
        ],
        "post_all_gather_processing": ["model_params"],
        "is_grouped_tensor": ["tensor"],
        "is_grouped_tensor_with_quantized_storage": ["tensor"],
        "get_grouped_quantized_members": ["tensor", "create_if_missing"],
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


def test_experts_are_told_from_matrices():
    matrix, experts, plain = PrimaryWeight.empty((16, 32)), PrimaryWeight.empty((2, 16, 32)), torch.zeros(2, 16, 32)
    grouped = ("is_grouped_nvfp4tensor", "is_grouped_tensor", "is_grouped_tensor_with_quantized_storage")
    for name, expected in (("is_nvfp4tensor", matrix), *((name, experts) for name in grouped)):
        assert [w for w in (matrix, experts, plain) if getattr(megatron, name)(w)] == [expected], name
    assert megatron.get_nvfp4_rowwise_packed_shape((2, 16, 32)) == (2, 16, 16)
    data = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"PrimaryWeight \[2, 16, 32\]: .*modify_grouped_nvfp4_rowwise_storage"):
        megatron.modify_nvfp4_rowwise_storage(experts, data)
    for wrong, text in ((matrix, r"PrimaryWeight \[16, 32\]"), (plain, r"Tensor \[2, 16, 32\]"), ([], "list")):
        with pytest.raises(ValueError, match=f"grouped_tensor is {text}: give a PrimaryWeight"):
            megatron.modify_grouped_nvfp4_rowwise_storage(wrong, data)
        with pytest.raises(ValueError, match=f"tensor is {text}: give a PrimaryWeight"):
            megatron.get_grouped_quantized_members(wrong, create_if_missing=True)
    with pytest.raises(ValueError, match="give contiguous uint8 of 512 bytes"):
        megatron.modify_grouped_nvfp4_rowwise_storage(experts, data[:256])
    with pytest.raises(ValueError, match="no multiple of 8"):
        megatron.modify_grouped_nvfp4_rowwise_storage(experts, torch.zeros(513, dtype=torch.uint8)[1:])


def test_members_are_the_experts_wherever_their_codes_move():
    values = torch.randn(3, 20, 32).bfloat16()
    quantized, _ = hb.grouped_quantize_row_col(values, None, hb.NVFP4(block=(16, 16)), None)
    weight = PrimaryWeight.empty((3, 20, 32)).as_parameter()
    with pytest.raises(RuntimeError, match="pass create_if_missing=True"):
        megatron.get_grouped_quantized_members(weight)
    first = megatron.get_grouped_quantized_members(weight, create_if_missing=True)
    with torch.no_grad():
        weight.copy_(quantized)
    buffer = torch.zeros(4, 480, dtype=torch.uint8)
    megatron.modify_grouped_nvfp4_rowwise_storage(weight, buffer[1:3].view(-1))
    members = megatron.get_grouped_quantized_members(weight)
    assert all(one is other for one, other in zip(first, members, strict=True))
    for member, value in zip(members, values, strict=True):
        want = hb.quantize(value, weight.spec)
        assert all(torch.equal(a, b) for a, b in zip(member.blocks, want.blocks, strict=True))
        assert buffer.data_ptr() < member.qdata.data_ptr() < buffer[3].data_ptr()
    other = copy.deepcopy(weight)
    with pytest.raises(RuntimeError, match="pass create_if_missing=True"):
        megatron.get_grouped_quantized_members(other)
    megatron.get_grouped_quantized_members(other, create_if_missing=True)[0].qdata.fill_(0)
    assert members[0].qdata.any() and not other.dequantize()[0].any()


def test_weights_of_experts_are_refused_that_no_cast_fills():
    for options, text in (
        ({"scale_layout": "swizzled_32_4_4"}, "scale_layout='swizzled_32_4_4': experts"),
        ({"amax": torch.zeros(())}, "amax: experts have linear scales and an amax each"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            PrimaryWeight.empty((2, 16, 32), **options)
