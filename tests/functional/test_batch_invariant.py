"""Products whose rows have the same bits in every batch: dense, of experts, of a whole forward.

That the kernels' choice does not depend on the batch is in tests/kernels/test_invariant_routes.py, their bits on a GPU
in tests/gpu/test_gpu_batch_invariant.py.
"""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.library import opcheck

import halfbyte as hb
from halfbyte import ops, reference
from halfbyte.sides import Epilogue, Side
from halfbyte.spec import parse_recipe

RL = hb.recipes.rl()
MXFP8 = hb.Recipe(fprop=hb.GemmSpec(a=hb.MXFP8(), b=hb.MXFP8(), batch_invariant=True))
ROWS = 4096
BATCHES = (1, 2, 3, 15, 16, 17, 64, 100, 1000, 2048)


def data(dtype=torch.bfloat16, K=1100, N=24):
    """Return tokens and a weight of very different sizes, by row and by block: of equal ones fp32 sums are exact."""
    g = torch.Generator().manual_seed(0)

    def sizes(*shape):
        return torch.exp(3 * torch.randn(shape, generator=g))

    blocks = sizes(-(-K // 16)).repeat_interleave(16)[:K]
    x = torch.randn(ROWS, K, generator=g) * sizes(ROWS, 1) * blocks
    return x.to(dtype), (torch.randn(N, K, generator=g) * sizes(N, K)).to(dtype)


def bits(y):
    return y.contiguous().view(torch.uint8)


def starts(size):
    """Return where batches of a size begin: at the edges, and where blocks of a BLAS end."""
    return sorted({start for start in (0, 1, 31, 1023, ROWS - size) if start + size <= ROWS})


@pytest.mark.parametrize("recipe", [RL, MXFP8], ids=["nvfp4", "mxfp8"])
def test_a_row_does_not_depend_on_its_batch(recipe):
    """The product of more than one segment, to fp32, where sums in another order differ."""
    x, w = data(K=1100 if recipe is RL else 200)
    bias = torch.ones(len(w)).bfloat16()
    with torch.no_grad():
        whole = hb.linear(x, w, bias, recipe, out_dtype=torch.float32)
        for size in BATCHES:
            for start in starts(size):
                y = hb.linear(x[start : start + size], w, bias, recipe, out_dtype=torch.float32)
                assert torch.equal(bits(y), bits(whole[start : start + size])), (size, start)


def test_experts():
    """Tokens of an expert, beside others of it or none, and whatever the other experts have."""
    x, w = data(K=160, N=16)
    w = torch.stack([w, w.flip(0) * 2])
    with torch.no_grad():
        whole = hb.grouped_linear(x, w, torch.tensor([1000, ROWS]), RL, out_dtype=torch.float32)
        for start, end in ((0, 1), (3, 90), (0, 1000)):
            offsets = torch.tensor([end - start, end - start + 7])
            y = hb.grouped_linear(torch.cat([x[start:end], x[1500:1507]]), w, offsets, RL, out_dtype=torch.float32)
            assert torch.equal(bits(y[: end - start]), bits(whole[start:end]))
            assert torch.equal(bits(y[end - start :]), bits(whole[1500:1507]))


def exact(a: torch.Tensor, b: torch.Tensor) -> np.float32:
    """Return the sum of products, rounded once to fp32, from exact fractions."""
    total = sum((Fraction(float(p)) * Fraction(float(q)) for p, q in zip(a, b, strict=True)), Fraction(0))
    return np.float32(float(total))  # a fraction of so few bits is a double


def test_the_reference_sums_a_segment_exactly():
    x, w = data(K=1024, N=3)
    a, b = (reference.decode(operand(t, spec)) for t, spec in ((x[:2], RL.fprop.a), (w, RL.fprop.b)))
    a, b = (side._replace(factor=torch.ones(())) for side in (a, b))
    y = reference.gemm_nt(a, b, Epilogue(torch.float32, batch_invariant=True))
    for i, j in np.ndindex(*y.shape):
        assert y[i, j].item() == exact(a.values[i], b.values[j])


def operand(t: torch.Tensor, spec: hb.NVFP4) -> ops.Operand:
    return ops.Operand(ops.quantize(t, Side(spec)), spec, t.shape[1])


def test_opcheck():
    x, w = torch.randn(9, 40), torch.randn(5, 40)
    sides = [ops.gemm.operand_arguments(operand(t, spec)) for t, spec in ((x, RL.fprop.a), (w, RL.fprop.b))]
    opcheck(torch.ops.halfbyte.gemm_nt_batch_invariant, (*sides[0], *sides[1], 40, torch.float32, torch.ones(5), ""))
    experts, _ = ops.grouped_quantize_row_col(w[None], None, Side(RL.fprop.b), None)
    right = ops.gemm.operand_arguments(ops.Operand(experts, RL.fprop.b, 40))
    arguments = *sides[0], *right, 40, torch.tensor([9]), torch.float32, ""
    opcheck(torch.ops.halfbyte.grouped_gemm_nt_batch_invariant, arguments)


def test_keys():
    free = hb.recipes.rl(batch_invariant=False)
    assert RL.fprop.batch_invariant and not free.fprop.batch_invariant and free != RL
    assert RL.key.split(";")[0] == f"{free.key.split(';')[0]}|batch_invariant"
    assert parse_recipe(RL.key) == RL and parse_recipe(free.key) == free
    with pytest.raises(ValueError, match="not a recipe's key"):
        parse_recipe(RL.key.replace("|batch_invariant", "|invariant"))


def test_recipes_that_are_made_of_one_keep_it_where_they_can():
    assert hb.recipes.row_scaled(scope="weights", base=RL).fprop.batch_invariant
    assert not hb.recipes.weight_only(base=RL).fprop.batch_invariant
    assert hb.recipes.mixed(RL, "bf16").fprop == RL.fprop


NVFP4_ROWS = hb.NVFP4(outer="row")
REFUSED = (
    (hb.NVFP4(), "one amax among its rows; use block=(1, 16) and outer='row'"),
    (hb.NVFP4(block=(16, 16)), "16x16 tiles among its rows"),
    (dataclasses.replace(NVFP4_ROWS, rounding="stochastic"), "use rounding='nearest'"),
    (None, "give both operands a spec"),
)


@pytest.mark.parametrize("a, remedy", REFUSED)
def test_what_depends_on_other_rows_is_refused(a, remedy):
    with pytest.raises(ValueError, match="batch_invariant=True") as caught:
        hb.GemmSpec(a=a, b=hb.NVFP4(), batch_invariant=True)
    assert remedy in str(caught.value)


def test_other_refusals():
    whole = hb.GemmSpec(a=NVFP4_ROWS, b=hb.NVFP4(), batch_invariant=True)
    with pytest.raises(ValueError, match="e5m2.*element='e4m3'"):
        hb.GemmSpec(a=hb.MXFP8(element="e5m2"), b=hb.MXFP8(), batch_invariant=True)
    with pytest.raises(ValueError, match=r"batch_invariant='yes': use one of False, True"):
        hb.GemmSpec(a=NVFP4_ROWS, b=hb.NVFP4(), batch_invariant="yes")
    with pytest.raises(ValueError, match=r"wgrad.batch_invariant=True.*use False"):
        hb.Recipe(wgrad=whole)
    with pytest.raises(ValueError, match="activation_mean='split': a mean over tokens depends on the batch"):
        hb.Recipe(fprop=whole, activation_mean="split")
    with pytest.raises(ValueError, match="batch_invariant=True: quantize is no product"):
        ops.explain((16, 16), "nvfp4", target="sm_90", batch_invariant=True)
    with pytest.raises(ValueError, match="use block=.*outer='row'"):
        ops.explain((16, 16, 16), "nvfp4", "nvfp4", target="sm_90", batch_invariant=True)
