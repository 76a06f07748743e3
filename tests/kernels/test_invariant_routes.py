"""What decides the order of a sum where rows are summed alike in every batch: nothing but N and K, on every target."""

from itertools import product

import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels import record
from halfbyte.kernels.gemm import dense, native_route
from halfbyte.kernels.gemm.route import gemm_plan
from halfbyte.kernels.scenario_values import META, tensor
from halfbyte.kernels.target import assumed
from halfbyte.sides import Epilogue

SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 1000, 1024, 2049, 4096, 8192, 100_000)
RL = hb.recipes.rl().fprop


def plans(N, K, dtype):
    return [gemm_plan(tensor(M, K), tensor(N, K), (tensor(M, N, dtype=dtype), None), K, "auto", True) for M in SIZES]


@pytest.mark.parametrize("target", record.TARGETS)
def test_kernel_steps_and_splits_do_not_depend_on_the_batch(target):
    with assumed(record.TARGETS[target]):
        for N, K, dtype in product((8, 96, 512, 4096, 14336), (64, 1024, 16384), (torch.bfloat16, torch.float32)):
            found = plans(N, K, dtype)
            assert {(plan.tma, plan.tile.bk, plan.splits, plan.upcast) for plan in found} == {
                (found[0].tma, found[0].tile.bk, 1, False)
            }
            assert all(plan.tile.bm % 64 == 0 for plan in found)  # one kind of instruction


def test_few_rows_are_spread_over_more_programs():
    with assumed(record.TARGETS["sm_90"]):
        tiles = [plan.tile for plan in plans(4096, 4096, torch.bfloat16)]
    assert tiles[0].bn < tiles[-1].bn and tiles[0].bm < tiles[-1].bm


def test_native_products_are_not_asked():
    with assumed(record.TARGETS["sm_100"]):
        assert native_route.choose_way(RL.a, RL.b, META).kernel == native_route.NATIVE
        way = native_route.choose_way(RL.a, RL.b, META, True)
    assert way.kernel == native_route.DECODED and "order of summation" in str(way.instead[0][1])


@pytest.mark.parametrize("variant", ["tma", "pointer"])
def test_the_product(variant):
    x, w = torch.randn(37, 160).bfloat16(), torch.randn(50, 160).bfloat16()
    (a, a_ref), (b, b_ref) = checks.decoded_pair(x, RL.a), checks.decoded_pair(w, RL.b)
    epilogue = Epilogue(torch.float32, torch.randn(50), batch_invariant=True)
    y = dense.gemm_nt(a, b, epilogue, variant=variant)
    torch.testing.assert_close(y, reference.gemm_nt(a_ref, b_ref, epilogue))
