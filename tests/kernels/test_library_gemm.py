"""Products that cuBLAS makes and `combine_kernel` ends: when, and that all of the epilogue is there."""

from __future__ import annotations

import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels.gemm import dense, route
from halfbyte.kernels.target import assumed, nvidia
from halfbyte.sides import Epilogue

H200 = nvidia(90, 132)


def plan(M, N, K, target=H200, dtype=torch.bfloat16, **options):
    a, b, out = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((M, K), (N, K), (M, N)))
    with assumed(target):
        return route.gemm_plan(a, b, (out.to(dtype), None), K, **options)


@pytest.mark.parametrize("M, N", ((768, 768), (2048, 768), (768, 2048), (512, 512), (512, 1408)))
def test_weight_gradients_between_our_tiles(M, N):
    assert plan(M, N, 32768) is None


@pytest.mark.parametrize("M, N, K", ((1024, 1024, 32768), (2816, 1024, 32768), (2048, 2048, 16384), (8192, 8192, 8192)))
def test_large_tiles_that_fill_the_gpu_are_ours(M, N, K):
    assert plan(M, N, K) is not None


def test_what_cublas_is_not_asked_for():
    """Few rows, short contractions, large outputs, fp32 sums, forced kernels, batch invariance, other GPUs."""
    M, N, K = 768, 2048, 32768
    assert plan(M, N, K) is None
    assert plan(256, N, K) is not None and plan(M, N, 4096) is not None and plan(5632, 2048, 16384) is not None
    assert plan(M, N, K, dtype=torch.float32).splits * 8192 >= K
    for options in ({"variant": "pointer"}, {"variant": "tma"}, {"batch_invariant": True}):
        assert plan(M, N, K, **options) is not None
    for target in (nvidia(80, 108), nvidia(100, 148), nvidia(120, 170)):
        assert plan(M, N, K, target) is not None


@pytest.mark.parametrize("pair", ((hb.NVFP4(), checks.TILE), (checks.ROW, checks.ROW), (None, None)), ids=str)
def test_the_whole_epilogue(pair, monkeypatch):
    def mm(a, b, out_dtype):  # torch's own takes out_dtype on a GPU alone
        calls.append(out_dtype)
        return a.to(out_dtype) @ b.to(out_dtype)

    calls = []
    monkeypatch.setattr(dense, "gemm_plan", lambda *_: None)
    monkeypatch.setattr(torch, "mm", mm)
    M, N, K = 40, 24, 64
    xs = (torch.randn(n, K).bfloat16() for n in (M, N))
    ours, theirs = zip(*map(checks.decoded_pair, xs, pair), strict=True)
    bias, addend, outer = torch.randn(N), torch.randn(M, N), (torch.randn(M), torch.randn(N))
    for epilogue in (Epilogue(), Epilogue(bias=bias), Epilogue(bias=bias, addend=addend, outer=outer)):
        y = dense.gemm_nt(*ours, epilogue._replace(out_dtype=torch.float32))
        expected = reference.gemm_nt(*theirs, epilogue._replace(out_dtype=torch.float32))
        assert (y - expected).norm() <= 1e-6 * expected.norm()
    assert calls == [torch.float32] * 3
