"""The partial cast gives the bytes of quantizing the whole weight, on every rank and for every split."""

import cast_checks as checks
import pytest
import ranks
import torch

import halfbyte as hb
from halfbyte.distributed import cast_master_weights_to_nvfp4
from halfbyte.tensor import PrimaryWeight


@pytest.mark.parametrize("spec", (checks.TILE, checks.FOUR_OVER_SIX), ids=("standard", "four_over_six"))
def test_every_start_offset(spec):
    ranks.run(2, checks.every_start, spec, [(16, 20), (9, 33), (40, 16)], torch.float32)


@pytest.mark.parametrize("world", (1, 3, 8))
def test_random_splits(world):
    ranks.run(world, checks.random_splits, 20)


def test_two_ranks():
    ranks.run(2, checks.two_ranks)


def test_borders_that_move_between_other_ranks():
    ranks.run(3, checks.moving_borders, seconds=60)


@pytest.mark.parametrize("spec", (checks.TILE, checks.FOUR_OVER_SIX), ids=("standard", "four_over_six"))
def test_one_process_needs_no_group(spec):
    master = torch.randn(40, 24)
    weight = PrimaryWeight.empty((40, 24), spec, scale_layout="swizzled_32_4_4")
    cast_master_weights_to_nvfp4([weight], [master.view(-1)], [0], None, manual_post_all_gather_processing=False)
    checks.check_bytes(weight, weight.qdata.view(-1), master, 0, 960)
    turned = hb.quantize(master.bfloat16(), spec).transpose()
    assert torch.equal(weight.turned.qdata, turned.qdata)
    assert torch.equal(weight.turned.block_scale, turned.block_scale.view(torch.uint8))


@pytest.mark.parametrize("kind", (torch.Tensor.detach, torch.nn.Parameter), ids=("tensors and None", "parameters"))
def test_master_that_changes_its_dtype_in_place(kind):
    """A list that holds not only tensors: the same object, address and size, read as what it is now."""
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    weights = [PrimaryWeight.empty((16, 32)), PrimaryWeight.empty((16, 16))]
    master, other = kind(values.flatten().clone()), None if kind is torch.Tensor.detach else kind(torch.zeros(256))
    starts = [0, None if other is None else 0]
    cast_master_weights_to_nvfp4(weights, [master, other], starts, None)
    assert torch.equal(weights[0].qdata, hb.quantize(values.bfloat16(), checks.TILE).qdata)
    narrow, address = master.data.view(torch.bfloat16)[:512], master.data_ptr()
    narrow.copy_(values.roll(7).flatten())
    master.data = narrow
    assert master.data_ptr() == address and master.numel() == 512 and master.dtype == torch.bfloat16
    cast_master_weights_to_nvfp4(weights, [master, other], starts, None)
    assert torch.equal(weights[0].qdata, hb.quantize(values.roll(7).bfloat16(), checks.TILE).qdata)


def test_weights_that_come_to_share_an_amax():
    """The same weights, masters and memory, but for one tensor: a cast that was prepared would write the old one."""
    masters = [torch.randn(512, generator=torch.Generator().manual_seed(i)) * (1 + 9 * i) for i in range(2)]
    weights = [PrimaryWeight.empty((16, 32)), PrimaryWeight.empty((16, 32))]
    cast_master_weights_to_nvfp4(weights, masters, [0, 0], None)
    largest = [master.bfloat16().abs().max().float() for master in masters]
    assert [weight.amax for weight in weights] == largest and largest[1] > largest[0]
    weights[0].amax = weights[1].amax
    cast_master_weights_to_nvfp4(weights, masters, [0, 0], None)
    for weight, master in zip(weights, masters, strict=True):
        whole = hb.quantize(master.view(16, 32).bfloat16(), checks.TILE, amax=largest[1])
        assert weight.amax == largest[1] and torch.equal(weight.qdata, whole.qdata)


def test_wrong_weights_are_refused():
    good = PrimaryWeight.empty((16, 16))
    for weight, reason in (
        (torch.zeros(16, 16), "is Tensor: give 2-D QuantTensors"),
        (hb.quantize(torch.zeros(16, 16), hb.NVFP4()), "needs 16x16 tiles"),
        (hb.quantize(torch.zeros(16, 16), hb.MXFP8()), "needs 16x16 tiles"),
        (hb.quantize(torch.zeros(32, 16), checks.TILE)[:16], "is a view or transpose"),
    ):
        with pytest.raises(ValueError, match=r"^model_weights\[1\].*" + reason):
            cast_master_weights_to_nvfp4([good, weight], [torch.zeros(256)] * 2, [0, 0], None)
    for master, reason in (
        (torch.zeros(256, dtype=torch.float64), "fp32, bf16 or fp16"),
        (torch.zeros(257), "do not lie"),
    ):
        with pytest.raises(ValueError, match=reason):
            cast_master_weights_to_nvfp4([good], [master], [0], None)
    with pytest.raises(ValueError, match="master_weights has 0 entries for 1"):
        cast_master_weights_to_nvfp4([good], [], [0], None)
    whole = torch.zeros(256)
    for arguments, reason in (
        (([good], None, [0], None), "master_weights is NoneType: give a list"),
        (([good], [whole], 0, None), "start_offsets is int"),
        ((iter([good]), [whole], [0], None), "model_weights is list_iterator"),
        (([good], [whole], [0], None, torch.zeros(2)), "fsdp_shard_model_weights is Tensor"),
    ):
        with pytest.raises(ValueError, match=reason):
            cast_master_weights_to_nvfp4(*arguments)
    with pytest.raises(ValueError, match="masters are rounded to nearest"):
        PrimaryWeight.empty((16, 16), hb.NVFP4(block=(16, 16), rounding="stochastic"))
