"""Products of one row in Triton's interpreter: bits of the order that the kernel says, whatever the tile."""

import kernel_checks
import pytest
import row_checks as checks
import torch
from repeating import kernels

import halfbyte as hb
from halfbyte import reference
from halfbyte.functional.mean import bias_with_mean
from halfbyte.kernels import launch, record
from halfbyte.kernels.gemm import dense, route
from halfbyte.kernels.gemm.row_route import row_problem
from halfbyte.kernels.route import choose_from
from halfbyte.kernels.scenario_values import tensor
from halfbyte.kernels.target import assumed, nvidia
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.sides import Epilogue

__all__ = ["kernels"]


@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_sums_have_one_order(case):
    checks.check_order(case, "cpu")


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_bits(check):
    check("cpu")


@pytest.mark.parametrize("pair", ((hb.NVFP4(), kernel_checks.TILE), (kernel_checks.ROW, kernel_checks.ROW)), ids=str)
def test_operands_that_were_codes(pair):
    """Sums of 48 products of 6-bit numbers are exact, so that all roundings are the reference's."""
    ours, theirs = zip(*map(kernel_checks.decoded_pair, (torch.randn(1, 48), torch.randn(40, 48)), pair), strict=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        epilogue = Epilogue(dtype, torch.randn(40))
        kernel_checks.same(checks.multiplied(*ours, epilogue), reference.gemm_nt(*theirs, epilogue))


def test_a_mean_is_multiplied_in_one_launch():
    """On the GPU that splits were chosen for, and where FP4 products are native."""
    for capability in (90, 100):
        with assumed(nvidia(capability, 132)), launch.rehearsing() as events:
            dense.gemm_nt(Decoded(tensor(1, 4096)), Decoded(tensor(4096, 4096)), Epilogue(torch.float32, tensor(4096)))
        kernels = [event.kernel.__name__ for event in events if isinstance(event, launch.Launched)]
        assert kernels == [checks.KERNEL]


@pytest.mark.usefixtures("kernels")
def test_a_layer_that_splits_its_mean_asks_for_it():
    mean, w, bias = torch.randn(70).bfloat16(), torch.randn(33, 70).bfloat16(), torch.randn(33)
    seen = checks.Names()
    with launch.watching(seen):
        v = bias_with_mean(bias, mean, w, torch.bfloat16)
    assert seen.found == [checks.KERNEL]
    torch.testing.assert_close(v, (w.double() @ mean.double() + bias).float())


WAYS = {
    # rows of a, a's and b's dtype, variant, whether columns of b lie together: what speaks against it
    (1, torch.bfloat16, torch.bfloat16, "auto", False): "None",
    (1, torch.float32, torch.float16, "auto", False): "None",
    (2, torch.bfloat16, torch.bfloat16, "auto", False): "it multiplies one row, not 2",
    (1, torch.bfloat16, torch.bfloat16, "pointer", False): "variant='pointer' is asked for",
    (1, torch.bfloat16, torch.bfloat16, "auto", True): "strides (1, 512) do not lie together",
    (1, torch.float64, torch.bfloat16, "auto", False): "fp32 does not hold float64 times bfloat16",
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("target", record.TARGETS)
def test_what_is_multiplied_so(way, target):
    M, a_dtype, b_dtype, variant, turned = way
    a, out = tensor(M, 256, dtype=a_dtype), tensor(M, 512)
    b = tensor(256, 512, dtype=b_dtype).T if turned else tensor(512, 256, dtype=b_dtype)
    with assumed(record.TARGETS[target]):
        request = route.Product(a, b, (out, None), 256, variant)
        assert WAYS[way] in str(row_problem(request))
        assert (choose_from(route.DENSE, request).kernel == checks.KERNEL) == (WAYS[way] == "None")
        if a_dtype == b_dtype:  # the other table has bf16 alone
            assert choose_from(route.INVARIANT, request).kernel != checks.KERNEL
