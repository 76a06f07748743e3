"""`halfbyte verify`: is every byte right on this machine, and how fast is it?"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from itertools import chain

import torch

from halfbyte import ops
from halfbyte.ops.backends import BACKENDS, NATIVE, choose
from halfbyte.verify import invariants, kernels, record, speed, timing
from halfbyte.verify.fingerprint import EXPECTED, fingerprint
from halfbyte.verify.record import Check, Finding, Report
from halfbyte.version import __version__

DESCRIPTION = """Compare every kernel on this machine's GPU with the reference, byte for byte, check GEMMs against fp64,
and measure a few speeds beside the machine's ceilings. Without a GPU, check the reference itself.
The exit status is 1 if anything differs."""


def main(arguments: list[str]) -> int:
    """Run `halfbyte verify`; the exit status is 0, or 1 if a check failed."""
    options = _parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU; without the option the reference is checked")
    report = verify(device, options.backend, full=options.full, with_speed=options.speed, progress=sys.stderr.isatty())
    if options.json:
        print(json.dumps(report.as_json(), indent=1))
    elif options.row:
        print(record.ROW_HEAD, record.row(report), sep="\n")
    else:
        if device.type != "cuda":
            print("No GPU is visible: the kernels were not run, only the reference was checked.\n")
        print(record.text(report))
    return 0 if report.passed else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="halfbyte verify", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--row", action="store_true", help="print this machine's row of docs/hardware.md")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default the first GPU if there is one")
    parser.add_argument("--backend", choices=BACKENDS, help="by default what runs there")
    parser.add_argument("--full", action="store_true", help="every spec on every input: several minutes of compiling")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True, help="measure speeds too")
    return parser.parse_args(arguments)


def verify(
    device: torch.device,
    backend: str | None = None,
    *,
    full: bool = False,
    with_speed: bool = True,
    progress: bool = False,
) -> Report:
    """Check everything that runs on `device`.

    Args:
        device: a CUDA device, or the CPU for the reference alone.
        backend: a backend's name; None takes what runs on `device`.
        full: every spec on every input.
        with_speed: measure speeds, on a GPU.
        progress: count the checks in a line on stderr.
    """
    start = time.perf_counter()
    chosen = choose(device, backend)
    findings: Iterator[Finding] = invariants.invariants()
    if device.type == "cuda" or backend is not None:
        findings = chain(findings, _kernel_findings(device, chosen, full))
    checks = record.run(findings, _Progress() if progress else None)
    on_native = _native_status(device)
    if on_native.available:
        checks += record.run(kernels.products(device, NATIVE, record.NATIVE_GEMM))
    else:
        checks.append(_not_run(record.NATIVE_GEMM, on_native.reason))
    speeds, limits = [], ""
    if device.type == "cuda" and with_speed:
        measured = timing.ceilings(device)
        speeds, limits = list(speed.speeds(device, measured)), measured.text()
    return Report(
        machine=machine(device, chosen),
        checks=checks,
        fingerprint=fingerprint(device, chosen),
        ceilings=limits,
        speeds=speeds,
        seconds=time.perf_counter() - start,
    )


def _kernel_findings(device: torch.device, backend: str, full: bool) -> Iterator[Finding]:
    yield from kernels.maxima(device, backend)
    yield from kernels.quantization(device, backend, full)
    yield from kernels.row_col(device, backend, full)
    yield from kernels.decoding(device, backend)
    yield from kernels.transposition(device, backend)
    yield from kernels.products(device, backend)
    yield "fingerprint", "equal on every machine", lambda: _same_fingerprint(device, backend)


def _same_fingerprint(device: torch.device, backend: str) -> str | None:
    found = fingerprint(device, backend)
    return None if found == EXPECTED else f"{found}, expected {EXPECTED}"


def _native_status(device: torch.device) -> ops.BackendStatus:
    known = {status.name: status for status in ops.backends(device)}
    reason = "FP4 tensor cores need sm_100 or later"
    return known.get(NATIVE) or ops.BackendStatus(name=NATIVE, available=False, reason=reason)


def _not_run(group: str, reason: str) -> Check:
    return Check(group=group, name="", outcome=record.NOT_RUN, detail=reason)


def machine(device: torch.device, backend: str) -> dict[str, str]:
    """Return what identifies the machine, for reports."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        name = f"{facts.name} (sm_{facts.major}{facts.minor}, {facts.multi_processor_count} SMs)"
    else:
        name = f"{platform.machine()} CPU"
    return {"device": name, "backend": backend, "versions": versions()}


def versions() -> str:
    """Return the versions that decide bytes and speed, in one line."""
    parts = [f"halfbyte {__version__}", f"torch {torch.__version__}"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        parts.append(f"Triton {metadata.version('triton')}")
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    return ", ".join((*parts, f"Python {platform.python_version()}"))


class _Progress:
    """Counts checks on one line of stderr."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, check: Check) -> None:
        self.count += 1
        print(f"\r{self.count} checks, {check.group:<32}", end="", file=sys.stderr, flush=True)
        if check.outcome == record.FAILED:
            print(f"\n{check.group}: {check.name}: {check.detail}", file=sys.stderr)
