"""Products whose rows are summed alike in every batch: equal bits over batches of 1 to 4,096 of 100,000 rows."""

import pytest
import torch
from causal_checks import check_causal

import halfbyte as hb
from halfbyte import ops
from halfbyte.sides import Side

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RL = hb.recipes.rl()
MXFP8 = hb.Recipe(fprop=hb.GemmSpec(a=hb.MXFP8(), b=hb.MXFP8(), batch_invariant=True))
ROWS = 100_000
BATCHES = (1, 2, 3, 7, 16, 17, 63, 64, 65, 128, 200, 256, 511, 1000, 1024, 2048, 4096)
SHAPES = ((4096, 4096), (512, 1024), (96, 2880), (2048, 16384))  # N, K


def bits(y):
    return y.contiguous().view(torch.uint8)


def tokens(K):
    g = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16, generator=g)
    for shape in ((ROWS, 1), (1, K)):  # of equal sizes fp32 sums may be exact
        x.mul_(torch.exp(2 * torch.randn(shape, device="cuda", generator=g)).bfloat16())
    return x


def starts(size):
    return [start for start in (0, 1, 777, 50_000, ROWS - size) if start + size <= ROWS]


@pytest.mark.parametrize("recipe", [RL, MXFP8], ids=["nvfp4", "mxfp8"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_batch(shape, out_dtype, recipe):
    N, K = shape
    x, w = tokens(K), torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = hb.linear(x, w, None, recipe, out_dtype=out_dtype)
        for size in BATCHES:
            for start in starts(size):
                y = hb.linear(x[start : start + size], w, None, recipe, out_dtype=out_dtype)
                assert torch.equal(bits(y), bits(whole[start : start + size])), (size, start)


def test_all_rows_one_batch_after_another():
    """Every row, in batches of 4,096 and of sizes that differ, and a thousand rows one by one."""
    x, w = tokens(1024), torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = hb.linear(x, w, None, RL)
        for sizes in ([4096] * 25, [4096, 333, 1, 70, 2048] * 20):
            parts = [hb.linear(part, w, None, RL) for part in x.split(_until(sizes))]
            assert torch.equal(bits(torch.cat(parts)), bits(whole))
        alone = torch.cat([hb.linear(x[i : i + 1], w, None, RL) for i in range(1000)])
        assert torch.equal(bits(alone), bits(whole[:1000]))


def _until(sizes):
    found = []
    for size in sizes:
        found.append(min(size, ROWS - sum(found)))
    return [*[size for size in found if size], *([ROWS - sum(found)] if sum(found) < ROWS else [])]


def test_other_products_depend_on_it():
    """Without the mode a row's bits change with the batch: what the tests above compare is not equal by itself."""
    x, w = tokens(4096), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    free = hb.recipes.rl(batch_invariant=False)
    with torch.no_grad():
        whole, few = (hb.linear(t, w, None, free, out_dtype=torch.float32) for t in (x, x[:16]))
    assert not torch.equal(bits(whole[:16]), bits(few))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_experts(out_dtype):
    """Tokens of an expert, beside few or many others, whatever the other experts have."""
    x = tokens(2048)[:20_000]
    w = torch.randn(4, 1024, 2048, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([9000, 9001, 15_000, 20_000], device="cuda", dtype=torch.int32)
    with torch.no_grad():
        whole = hb.grouped_linear(x, w, ends, RL, out_dtype=out_dtype)
        for sizes in ((1, 0, 1, 3), (17, 1, 64, 0), (500, 1, 129, 5000), (4096, 0, 1, 1)):
            firsts, parts = (0, 9000, 9001, 15_000), []
            for first, size in zip(firsts, sizes, strict=True):
                parts.append(slice(first, first + size))
            given = torch.cat([x[part] for part in parts])
            offsets = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
            y = hb.grouped_linear(given, w, offsets, RL, out_dtype=out_dtype)
            assert torch.equal(bits(y), bits(torch.cat([whole[part] for part in parts]))), sizes


def test_row_bytes_do_not_depend_on_the_batch():
    x, spec = tokens(4096), RL.fprop.a
    whole = ops.quantize(x, Side(spec))
    for size in BATCHES:
        for start in starts(size):
            part = ops.quantize(x[start : start + size], Side(spec))
            for got, want in zip(part, whole, strict=True):
                assert torch.equal(bits(got), bits(want[start : start + size]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "recipe, causal",
    [(RL, True), (hb.recipes.rl(batch_invariant=False), True), (hb.recipes.nvfp4(), False)],
    ids=["rl", "free_order", "nvfp4"],
)
def test_logits_of_earlier_tokens_do_not_move(recipe, causal, dtype):
    """In forwards of equal shape any order of summation will do; with an amax for all tokens they move."""
    check_causal(recipe, causal, "cuda", dtype)
