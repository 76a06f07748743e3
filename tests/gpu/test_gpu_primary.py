"""The kernels of primary weights on a GPU, bit for bit, and a training step that uses them."""

from functools import partial

import primary_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer, cast_master_weights_to_nvfp4
from halfbyte.tensor import PrimaryWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(16, 16), (33, 48), (1, 1), (7, 300), (1040, 768)]
LARGE = [(256, 2048), (2048, 512), (80, 64), (16, 4112)]


@pytest.mark.parametrize("name", checks.SPECS)
def test_parts(name):
    chosen = checks.SPECS[name].scaling != hb.BlockMax()
    checks.check_stages("cuda", SHAPES, checks.SPECS[name], FP32, checks.PARTS, broken=not chosen)
    checks.check_stages("cuda", SHAPES, checks.SPECS[name], FP32, checks.WHOLE, broken=True)


@pytest.mark.parametrize("dtype, rounded", ((BF16, BF16), (FP32, FP32), (FP32, FP16), (FP16, BF16), (BF16, FP32)))
def test_dtypes(dtype, rounded):
    checks.check_stages("cuda", SHAPES, checks.TILE, dtype, checks.PARTS, rounded=rounded, at_once=True)


@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_whole_blocks(dtype):
    cuts = [(0.0, 1.0), (0.1, 0.8), (0.3, 0.7), (0.5, 1.0)]
    for name in ("standard", "four_over_six"):
        checks.check_stages("cuda", LARGE, checks.SPECS[name], dtype, cuts, blocks=True)


def test_padding_swizzle_and_shards():
    def to_blocks(cols):
        return -(-cols // 16) * 16

    checks.check_stages("cuda", SHAPES, checks.TILE, FP32, checks.PARTS, pitch=to_blocks, blocks=True)
    checks.check_stages("cuda", SHAPES, checks.TILE, FP32, checks.WHOLE, scale_layout="swizzled_32_4_4")
    checks.check_stages("cuda", SHAPES, checks.TILE, FP32, checks.PARTS, shards=True)


def test_the_cast_is_quantize():
    masters = [torch.randn(shape, device="cuda") for shape in LARGE]
    weights = [PrimaryWeight.empty(shape, device="cuda") for shape in LARGE]
    flat = [master.view(-1) for master in masters]
    for _ in range(2):
        cast_master_weights_to_nvfp4(weights, flat, [0] * 4, None, manual_post_all_gather_processing=False)
        for weight, master in zip(weights, masters, strict=True):
            whole = hb.quantize(master.bfloat16(), weight.spec)
            assert all(torch.equal(a, b) for a, b in zip(weight.blocks, whole.blocks, strict=True))
            turned = whole.transpose()
            assert torch.equal(weight.turned.qdata, turned.qdata)
            assert torch.equal(weight.turned.block_scale, turned.block_scale.view(torch.uint8))
            master.mul_(-1.25)


def test_losses_of_codes_alone():
    losses = {}
    for weights in ("nvfp4", "plain"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            hb.nn.Linear(64, 128, dtype=BF16, device="cuda", state=(state := hb.RunState(0))),
            torch.nn.RMSNorm(128, dtype=BF16, device="cuda"),
            hb.nn.Linear(128, 96, dtype=BF16, device="cuda", state=state),
        )
        adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)
        zero = ZeroOptimizer(model, adamw, config=ZeroConfig(weights=weights, max_norm=1.0))
        x, y = torch.randn(32, 64, device="cuda", dtype=BF16), torch.randn(32, 96, device="cuda", dtype=BF16)
        losses[weights] = []
        for _ in range(20):
            loss = (model(x) - y).float().square().mean()
            loss.backward()
            state.advance()
            zero.step()
            losses[weights].append(loss.item())
    assert losses["nvfp4"] == losses["plain"] and losses["nvfp4"][-1] < losses["nvfp4"][0]
