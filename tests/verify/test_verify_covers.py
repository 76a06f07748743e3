"""`halfbyte verify` launches every kernel of the package, and notices when one of them is wrong."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import halfbyte.kernels
from halfbyte.kernels.quantize import route
from halfbyte.ops import (
    backends,  # noqa: F401  the module, which the package hides behind its function
    quantization,
)
from halfbyte.verify import fused, grouped, invariants, kernels, logits, mean, plan, primary, record, sums

CPU = torch.device("cpu")
ELSEWHERE = {
    "clear_tail_kernel": "behind torch._grouped_mm, which takes CUDA tensors; tests/gpu/test_gpu_grouped.py",
    "quantize_neighbours_kernel": "operands of millions of values, which `verify` quantizes on a GPU; the next test",
    "e2m1_pair_kernel": "the self-test of sm_100's casts, which `verify` runs by itself (casts.py)",
}


def all_kernels() -> set[str]:
    """Return the names of every kernel that has a launcher: functions of the compiler's called …_kernel."""
    names = set()
    for info in pkgutil.walk_packages(halfbyte.kernels.__path__, "halfbyte.kernels."):
        module = importlib.import_module(info.name)
        names |= {n for n, v in vars(module).items() if isinstance(v, InterpretedFunction) and n.endswith("_kernel")}
    return names


@pytest.fixture
def triton_on_the_cpu(monkeypatch):
    module = sys.modules["halfbyte.ops.backends"]
    runs = module.BackendStatus(name="triton", available=True, reason="the interpreter")
    lacks = module.BackendStatus(name="native", available=False, reason="the interpreter")
    monkeypatch.setattr(module, "_triton_status", lambda device: runs)
    monkeypatch.setattr(module, "_native_status", lambda device: lacks)
    monkeypatch.setattr(module, "_casts", lambda device: "")
    module._cached_status.cache_clear()
    yield
    module._cached_status.cache_clear()


def test_every_kernel_is_launched(monkeypatch, triton_on_the_cpu):
    launched = set()
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **options: launched.add(self.fn.__name__))
    findings = plan.findings(plan.Scope(device=CPU, backend="triton"))
    record.run_checks(f for f in findings if f[0] != invariants.GROUP)  # nothing is computed, so nothing agrees
    assert len(all_kernels()) >= 38
    assert all_kernels() - launched == set(ELSEWHERE)


def test_large_tiles_are_launched_on_a_gpu(monkeypatch, triton_on_the_cpu):
    assert [name for _, name, _ in kernels.large_tiles(torch.device("cuda"), "triton")] == [
        "16x16 four candidates, large"
    ]
    assert not list(kernels.large_tiles(CPU, "triton"))
    monkeypatch.setattr(route, "LEAST_WAVES", 0)
    monkeypatch.setattr(route, "QUICK_TILE_BLOCKS", {4: 0})
    launched, run = set(), InterpretedFunction.run
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *a, **more: launched.add(self.fn.__name__) or run(self, *a, **more)
    )
    assert kernels.large_tiles_differ(CPU, "triton", (64, 512)) is None
    assert "quantize_neighbours_kernel" in launched
    whole = kernels.ops.quantize

    def wrong(x, side, backend):
        blocks = whole(x, side, backend=backend)
        blocks.block_scale[40, 3] ^= int(backend == "triton")
        return blocks

    monkeypatch.setattr(kernels.ops, "quantize", wrong)
    assert "block_scale: 1 of" in kernels.large_tiles_differ(CPU, "triton", (64, 512))


def altered(function, index):
    """Return `function` with the lowest bit of one finite element of a result changed where Triton is asked for."""

    def run(*arguments):
        out = function(*arguments)
        if arguments[-1] == "triton" and isinstance(out[index], torch.Tensor) and out[index].numel():
            flat = out[index].view(-1)
            at = int(flat.isfinite().nonzero()[0])
            flat[at] = torch.nextafter(flat[at], torch.full_like(flat[at], 1e9))
        return out

    return run


@pytest.mark.parametrize(
    "name, index, says, kind",
    [
        ("norm", 0, "y: 1 of", "LayerNorm"),
        ("norm_backward", 1, "dweight: 1 of", "LayerNorm"),
        ("add_norm", 1, "sum: 1 of", "LayerNorm of a sum"),
        ("norm_backward", 0, "dx: 1 of", "LayerNorm of a sum"),
    ],
)
def test_a_wrong_bit_of_a_norm_is_noticed(monkeypatch, triton_on_the_cpu, name, index, says, kind):
    monkeypatch.setattr(fused.ops, name, altered(getattr(fused.ops, name), index))
    finding = next(f for f in fused.fused(CPU, "triton") if f[1].startswith(f"{kind}, 37x83 bfloat16, amaxes"))
    (check,) = record.run_checks([finding])
    assert check.outcome == record.FAILED and says in check.detail


def test_a_wrong_bit_of_an_activation_is_noticed(monkeypatch, triton_on_the_cpu):
    monkeypatch.setattr(fused.ops, "activation", altered(fused.ops.activation, 0))
    finding = next(f for f in fused.fused(CPU, "triton") if f[1] == "gelu gated")
    (check,) = record.run_checks([finding])
    assert check.outcome == record.FAILED and check.detail.startswith("h: 1 of")


def test_a_wrong_bit_of_a_mean_is_noticed(monkeypatch, triton_on_the_cpu):
    checks = {what: check for _, what, check in mean.mean(CPU, "triton") if "37x83 bfloat16" in what}
    assert len(checks) == 6 and not any(check() for check in checks.values())
    monkeypatch.setattr(mean.ops, "token_mean", altered(mean.ops.token_mean, 0))
    assert "result 1" in checks["token_sum and token_mean, 37x83 bfloat16"]()
    monkeypatch.setattr(mean.ops, "amax_with_product", altered(mean.ops.amax_with_product, 0))
    assert "result 0" in checks["amax_with_product, 37x83 bfloat16"]()


def test_a_sum_over_tokens_may_be_added_in_any_order_and_miss_nothing():
    x = mean._x((520, 64), torch.bfloat16)
    forwards, backwards = torch.zeros(64), torch.zeros(64)
    for row, last in zip(x.float(), x.float().flip(0), strict=True):
        forwards, backwards = forwards + row, backwards + last
    assert not torch.equal(backwards, forwards), "orders differ"
    assert mean.sum_problem(backwards, x) is None and mean.sum_problem(forwards, x) is None
    assert "64 of 64" in mean.sum_problem(x[:-1].float().sum(0), x)
    backwards[5] += 0.2
    assert "the first at [5]" in mean.sum_problem(backwards, x)
    backwards[5] = torch.nan
    assert "the first at [5]" in mean.sum_problem(backwards, x)


@pytest.mark.parametrize("name, at", [("signal", 0), ("noise", 1), ("nonzero", 4), ("scale_underflow", 8)])
def test_a_wrong_sum_of_statistics_is_noticed(monkeypatch, triton_on_the_cpu, name, at):
    checks = {what: check for _, what, check in sums.error_figures(CPU, "triton") if "37x83" in what}
    assert len(checks) == 18 and not any(check() for check in checks.values())
    whole = sums.ops.operand_sums

    def wrong(*arguments, backend):
        found, *rest = whole(*arguments, backend=backend)
        if backend == "triton":
            found[at] *= 1 + 1e-9
        return found, *rest

    monkeypatch.setattr(sums.ops, "operand_sums", wrong)
    said = checks["operand_sums, 37x83 columns, rotation 64"]()
    assert said and (said.startswith(name) or at >= 4)


@pytest.mark.parametrize("at", [1, 2])
def test_a_wrong_maximum_of_statistics_is_noticed(monkeypatch, triton_on_the_cpu, at):
    checks = {what: check for _, what, check in sums.error_figures(CPU, "triton")}
    whole = sums.ops.operand_sums

    def wrong(*arguments, backend):
        found = list(whole(*arguments, backend=backend))
        found[at] = found[at] + (backend == "triton")
        return found

    monkeypatch.setattr(sums.ops, "operand_sums", wrong)
    assert "differ" in checks["operand_sums, 37x83 rows, rotation 16"]()


def test_other_wrong_sums_of_statistics_are_noticed(monkeypatch, triton_on_the_cpu):
    checks = {what: check for _, what, check in sums.error_figures(CPU, "triton")}
    errors, outliers, noise, squares = (
        getattr(sums.ops, name) for name in ("error_sums", "column_outliers", "operand_noise", "square_sum")
    )

    def far(backend):
        return 1 + 1e-9 * (backend == "triton")

    monkeypatch.setattr(sums.ops, "column_outliers", lambda *a: outliers(*a) + (a[-1] == "triton"))
    assert "differ" in checks["column_outliers, 37x83"]()
    monkeypatch.setattr(sums.ops, "operand_noise", lambda *a, backend: noise(*a, backend=backend) * far(backend))
    assert checks["operand_sums, 37x83 rows, an amax a row"]().startswith("noise alone")
    monkeypatch.setattr(
        sums.ops, "square_sum", lambda *a, backend: [t * far(backend) for t in squares(*a, backend=backend)]
    )
    assert "differ" in checks["error_sums, 37x83"]()
    monkeypatch.setattr(sums.ops, "square_sum", squares)
    monkeypatch.setattr(sums.ops, "error_sums", lambda *a, backend: errors(*a, backend=backend) * far(backend))
    assert checks["error_sums, 37x83"]().startswith("signal")


@pytest.mark.parametrize("name, says", [("logit_peak", "differ"), ("logit_sums", "sums: "), ("target", "differ")])
def test_a_wrong_part_of_shared_logits_is_noticed(monkeypatch, triton_on_the_cpu, name, says):
    checks = {what: check for _, what, check in logits.shared_logits(CPU, "triton") if "37x83" in what}
    assert len(checks) == 4 and not any(check() for check in checks.values())
    op = "logit_sums" if name == "target" else name
    whole = getattr(logits.ops, op)

    def wrong(*arguments, backend):
        found = whole(*arguments, backend=backend)
        if backend == "triton":
            found[(1, 0) if name == "target" else 0] += 1 if name == "target" else found.abs().max() // 3
        return found

    monkeypatch.setattr(logits.ops, op, wrong)
    assert says in checks["logit_peak, logit_sums and logit_gradient_, 37x83 float32"]()


def test_a_wrong_gradient_of_shared_logits_is_noticed(monkeypatch, triton_on_the_cpu):
    checks = {what: check for _, what, check in logits.shared_logits(CPU, "triton") if "37x83 bfloat16" in what}
    whole = logits.ops.logit_gradient_

    def wrong(given, *arguments, backend):
        whole(given, *arguments, backend=backend)
        if given.shape[1] > 50 and backend == "triton":
            given[1, 2] *= 1.01

    monkeypatch.setattr(logits.ops, "logit_gradient_", wrong)
    said = checks["logit_peak, logit_sums and logit_gradient_, 37x83 bfloat16"]()
    assert said.startswith("gradient: ") and checks["the same, cut in two, 37x83 bfloat16"]() is not None


def test_a_wrong_nibble_of_a_primary_weight_is_noticed(monkeypatch):
    stages = primary.primary_stages

    class Wrong:
        def __init__(self, caster, pieces):
            self.caster, self.pieces = caster, pieces

        def __getattr__(self, name):
            return getattr(self.caster, name)

        def cast(self, *arguments):
            self.caster.cast(*arguments)
            self.pieces[0].codes[0] ^= 0x10

    def one_wrong(pieces, targets, tiles, device, backend):
        caster, finisher = stages(pieces, targets, tiles, device, "reference")
        return (caster if backend == "reference" else Wrong(caster, pieces)), finisher

    monkeypatch.setattr(primary, "primary_stages", one_wrong)
    (check,) = record.run_checks([next(primary.primary(CPU, "triton"))])
    assert check.outcome == record.FAILED and check.detail.startswith("weight 0 qdata: 1 of")


def test_transient_values_are_compared(monkeypatch):
    def decoded(x, row, col, backend):
        asked = [side and side._replace(transient=False) for side in (row, col)]
        sides = quantization.quantize_row_col(x, *asked, backend)
        if not any(side and side.transient for side in (row, col)):
            return sides
        return tuple(s and s._replace(qdata=torch.zeros(s.qdata.shape, dtype=torch.bfloat16)) for s in sides)

    monkeypatch.setattr(kernels.ops, "quantize_row_col", decoded)
    (check,) = record.run_checks([next(kernels.transient(CPU, "reference"))])
    assert check.outcome == record.FAILED and check.detail.startswith("row shape")


def test_the_reference_passes_what_was_added():
    findings = (*fused.fused(CPU, "reference"), *primary.primary(CPU, "reference"), *grouped.grouped(CPU, "reference"))
    failed = [check for check in record.run_checks(findings) if check.outcome == record.FAILED]
    assert not failed and len(findings) > 120
