"""`halfbyte verify`: is every byte right on this machine, and how fast is it?"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata

import torch

from halfbyte import files
from halfbyte.arguments import ArgumentParser, given_path
from halfbyte.kernels.target import find
from halfbyte.ops.backends import BACKENDS, PORTABLE, REFERENCE, TRITON, backends, choose
from halfbyte.verify import casts, plan, record, speed, timing
from halfbyte.verify.against import against
from halfbyte.verify.fingerprint import fingerprint
from halfbyte.verify.peers import PEERS
from halfbyte.verify.plan import Scope
from halfbyte.verify.record import Check, Verification
from halfbyte.version import __version__

DESCRIPTION = """Compare every kernel on this machine's GPU with the reference, byte for byte, check GEMMs against fp64,
and measure a few speeds beside the machine's ceilings. Without a GPU, check the reference itself.
The exit status is 1 if anything differs. With --against, compare the bytes of another package with ours and say which
of its rules makes each difference; the exit status is 1 if a byte has no such rule."""


def main(arguments: list[str]) -> int:
    """Run `halfbyte verify`; the exit status is 0, or 1 if a check failed."""
    options = _parse(arguments)
    if options.report is not None:
        _check_report(options)
    if options.against is not None:
        return against(options)
    if options.path is not None:
        raise ValueError(f"--path {options.path}: says where a package of --against lies; give both")
    device = _device(options.device)
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: give a number of processes, 1 or more")
    scope = Scope(device=device, backend=_backend(device, options), full=options.full)
    jobs = options.jobs or (min(16, os.cpu_count() or 1) if device.type == "cuda" else 1)
    report = verify(scope, jobs=jobs, with_speed=options.speed, after=_count if sys.stderr.isatty() else None)
    if sys.stderr.isatty():
        print(file=sys.stderr)  # ends the line that counted
    if options.report is not None:
        written = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **report.as_json()}
        files.write_text(options.report.resolve(), json.dumps(written, indent=1) + "\n")
    if options.json:
        print(json.dumps(report.as_json(), indent=1))
    elif options.row:
        print(record.ROW_HEAD, record.row(report), sep="\n")
    else:
        if device.type != "cuda":
            print("No GPU is visible: the kernels were not run, only the reference was checked.\n")
        elif scope.backend == REFERENCE and options.backend is None:
            triton = {status.name: status for status in backends(device)}[TRITON]
            print(f"The kernels were not run, only the reference was checked: {triton.reason}.\n")
        print(record.text(report))
    return 0 if report.passed else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="halfbyte verify", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--row", action="store_true", help="print this machine's row of docs/hardware.md")
    parser.add_argument(
        "--report", type=given_path, metavar="FILE", help="write the report there too, as JSON, to send"
    )
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default the first GPU if there is one")
    parser.add_argument("--backend", choices=BACKENDS, help="by default what runs there")
    parser.add_argument("--force", action="store_true", help="run the kernels on an AMD GPU, whose bytes are not known")
    parser.add_argument("--full", action="store_true", help="every spec on every input")
    parser.add_argument("--jobs", type=int, help="processes that share the work; by default up to 16 on a GPU")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True, help="measure speeds too")
    parser.add_argument(
        "--against", choices=tuple(PEERS), help="compare with another package's bytes instead, on the CPU"
    )
    parser.add_argument("--path", help="of te and vllm: the folder that the wheel was unpacked into, or the file in it")
    return parser.parse_args(arguments)


def _check_report(options: argparse.Namespace) -> None:
    """Raise ValueError where a report could not be written, before minutes of work."""
    if options.against is not None:
        raise ValueError(
            f"--report {options.report}: is about this machine, not about --against; leave one of them out"
        )
    if not options.report.parent.is_dir() or (options.report.exists() and not options.report.is_file()):
        raise ValueError(f"--report {options.report}: give a file in a folder that is there; --json prints the report")


def _device(asked: str | None) -> torch.device:
    """Return the device to check: by default the first GPU if there is one.

    Raises:
        ValueError: it is no CUDA GPU that torch sees, and no CPU.
    """
    try:
        device = torch.device(asked if asked is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:  # torch lists every name of a device that it has heard of
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {asked}: use cuda, cuda:1 or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        sees = f"{count} GPUs, numbered from 0; choose one of them" if count else "no GPU; choose cpu"
        raise ValueError(f"--device {device}: torch sees {sees}")
    return device


def _backend(device: torch.device, options: argparse.Namespace) -> str | None:
    """Return the backend to compare with the reference; None on a CPU, unless one is asked for."""
    if options.force:
        if options.backend is not None:
            raise ValueError(f"--force --backend {options.backend}: --force chooses the kernels; leave one of them out")
        if device.type == "cpu":
            raise ValueError("--force: there is no GPU whose kernels could be forced; leave it out")
        choose(device, PORTABLE)
        return PORTABLE
    return choose(device, options.backend) if options.backend is not None or device.type == "cuda" else None


def verify(
    scope: Scope, *, jobs: int = 1, with_speed: bool = True, after: Callable[[int], None] | None = None
) -> Verification:
    """Check everything in `scope`.

    Args:
        scope: device, backend, and how much.
        jobs: processes that share the checks.
        with_speed: measure speeds, on a GPU.
        after: called with the number of checks done, now and then.
    """
    start = time.perf_counter()
    checks = plan.run_all(scope, jobs, after)
    checks += casts.casts(scope.device)
    native = plan.native_status(scope.device)
    if not native.available:
        checks.append(_not_run(record.NATIVE_GEMM, native.reason))
    speeds, limits = [], ""
    if scope.device.type == "cuda" and with_speed:
        measured = timing.ceilings(scope.device)
        speeds, limits = list(speed.speeds(scope.device, measured, scope.backend)), measured.text()
    return Verification(
        machine=machine(scope),
        checks=checks,
        fingerprint=fingerprint(scope.device, scope.backend),
        ceilings=limits,
        speeds=speeds,
        seconds=time.perf_counter() - start,
    )


def _not_run(group: str, reason: str) -> Check:
    return Check(group=group, name="", outcome=record.NOT_RUN, detail=reason)


def machine(scope: Scope) -> dict[str, str]:
    """Return what identifies the machine, for reports."""
    device = scope.device
    if device.type == "cuda":
        target = find(device)
        units = "SMs" if target.ptx else "CUs"
        name = f"{torch.cuda.get_device_name(device)} ({target.name}, {target.multiprocessors} {units})"
    else:
        name = f"{platform.machine()} CPU"
    return {"device": name, "backend": scope.backend or "none: the reference alone", "versions": versions()}


def versions() -> str:
    """Return the versions that decide bytes and speed, in one line."""
    parts = [f"halfbyte {__version__}", f"torch {torch.__version__}"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        parts.append(f"Triton {metadata.version('triton')}")
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    if torch.version.hip:
        parts.append(f"ROCm {torch.version.hip}")
    return ", ".join((*parts, f"Python {platform.python_version()}"))


def _count(done: int) -> None:
    print(f"\r{done} checks done", end="", file=sys.stderr, flush=True)
