"""Codes of a format that kernels do not know are refused wherever they would be read for another's."""

import sys

import pytest
import torch

import halfbyte as hb
from halfbyte import ops
from halfbyte.formats import MXFP8_E4M3, NVFP4_E2M1
from halfbyte.layout import Operand
from halfbyte.ops.primary import primary_stages
from halfbyte.pieces import CastTarget
from halfbyte.sides import Side

X = torch.linspace(-3, 3, 64 * 64).view(64, 64)
SPEC = hb.MXFP8()
STORED = Operand(ops.quantize(X, Side(SPEC)), SPEC, 64)
EXPERTS = ops.grouped_quantize_row_col(X.view(2, 32, 64).contiguous(), None, Side(SPEC), None)[0]
GROUPED = Operand(EXPERTS, SPEC, 64)
ENDS = torch.tensor([20, 64], dtype=torch.int32)
OUT = torch.zeros(2, 64, 64)
CALLS = {
    "quantize": lambda: ops.quantize(X, Side(SPEC)),
    "dequantize": lambda: ops.dequantize(STORED),
    "decode": lambda: ops.decode(STORED),
    "gemm_nt": lambda: ops.gemm_nt(STORED, STORED),
    "gemm_nt, the right one": lambda: ops.gemm_nt(X.bfloat16(), STORED),
    "gemm_nt, into": lambda: ops.gemm_nt(STORED, STORED, out=torch.zeros(64, 64)),
    "grouped_dequantize": lambda: ops.grouped_dequantize(GROUPED, None),
    "grouped_gemm_nt": lambda: ops.grouped_gemm_nt(X.bfloat16(), GROUPED, ENDS),
    "operand_sums": lambda: ops.operand_sums(X, STORED),
    "operand_noise": lambda: ops.operand_noise(X, STORED),
    "QuantTensor": lambda: hb.quantize(X, SPEC).dequantize(),
}


@pytest.fixture
def only_nvfp4(monkeypatch):
    """Let kernels run here, which know one format."""
    for name in ("backends", "quantization", "gemm", "grouped"):
        monkeypatch.setattr(sys.modules[f"halfbyte.ops.{name}"], "choose", lambda device, backend: "triton")
    monkeypatch.setattr(sys.modules["halfbyte.ops.backends"], "KERNEL_FORMATS", (NVFP4_E2M1,))


@pytest.mark.parametrize("call", CALLS)
def test_what_would_be_read_for_another_format_is_refused(call, only_nvfp4):
    said = r"MXFP8\(element='e4m3'\) has no kernel on backend 'triton', which runs on cpu: give backend='reference'"
    with pytest.raises(ValueError, match=said):
        CALLS[call]()


@pytest.mark.parametrize("call", CALLS)
def test_the_reference_reads_it(call):
    CALLS[call]()


@pytest.mark.parametrize(("op", "specs", "shape"), [("gemm", 2, (64, 64, 64)), ("dequantize", 1, (64, 64))])
def test_what_reads_it_is_explained_as_refused(monkeypatch, op, specs, shape):
    assert any(step.programs for step in hb.ops.explain(shape, *["nvfp4"] * specs, op=op, target="sm_90").steps)
    monkeypatch.setattr(sys.modules["halfbyte.ops.backends"], "KERNEL_FORMATS", (MXFP8_E4M3,))
    (step,) = hb.ops.explain(shape, *["nvfp4"] * specs, op=op, target="sm_90").steps
    assert "refused" in step.kernel and "NVFP4" in step.why and not step.programs


def test_a_rule_of_tiles_without_kernels_is_refused_for_primary_weights(monkeypatch):
    spec = hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix(), e4m3_max=256.0)
    blocks = ops.quantize(X, Side(spec))
    target = CastTarget(64, 64, spec, torch.float32, blocks, False, 0, 0)
    primary_stages((), [target], 16, X.device)
    backends = sys.modules["halfbyte.ops.backends"]
    monkeypatch.setattr(backends, "choose", lambda device, backend: "triton")
    monkeypatch.setattr(backends, "without_kernel", lambda known: "its rule" if known == spec else None)
    with pytest.raises(ValueError, match="its rule has no kernel on backend 'triton'"):
        primary_stages((), [target], 16, X.device)


def test_codes_of_a_rule_without_kernels_are_read_and_explained_all_the_same(monkeypatch):
    """A rule says how bytes are chosen; what they stand for follows from the format."""
    spec = hb.NVFP4(scaling=hb.FourOverSix())
    stored = Operand(ops.quantize(X, Side(spec)), spec, 64)
    wanted = ops.dequantize(stored), ops.gemm_nt(stored, stored)
    backends = sys.modules["halfbyte.ops.backends"]
    monkeypatch.setattr(backends, "choose", lambda device, backend: "triton")
    for module in (backends, sys.modules["halfbyte.ops.explain"]):
        monkeypatch.setattr(module, "without_kernel", lambda known: "its rule" if known == spec else None)
    with pytest.raises(ValueError, match="its rule has no kernel on backend 'triton'"):
        ops.quantize(X, Side(spec))
    assert torch.equal(ops.dequantize(stored), wanted[0]) and torch.equal(ops.gemm_nt(stored, stored), wanted[1])
    (step,) = hb.ops.explain((64, 64), spec, op="quantize", target="sm_90").steps
    assert "refused" in step.kernel
    assert any(step.programs for step in hb.ops.explain((64, 64), spec, op="dequantize", target="sm_90").steps)
