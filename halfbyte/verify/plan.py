"""Which checks belong to a verification, and how several processes share them.

Most of the time goes into compiling kernels, so checks that run the same kernels are one task.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from halfbyte import ops
from halfbyte.ops.backends import NATIVE, TRITON
from halfbyte.verify import fused, grouped, invariants, kernels, logits, mean, primary, record, sums
from halfbyte.verify.fingerprint import EXPECTED, fingerprint
from halfbyte.verify.record import Check, Finding


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is verified.

    Args:
        device: a CUDA device, or the CPU.
        backend: whose functions are compared with the reference; None compares nothing and checks the reference alone.
        full: every spec on every input.
    """

    device: torch.device
    backend: str | None
    full: bool = False


def native_status(device: torch.device) -> ops.BackendStatus:
    """Return whether FP4 tensor cores are used on `device`, and why not."""
    return {status.name: status for status in ops.backends(device)}[NATIVE]


def findings(scope: Scope) -> list[Finding]:
    """Return all checks of a verification."""
    found = list(invariants.invariants())
    if scope.backend is None:
        return found
    # The native backend quantizes with Triton's kernels and emulates what its GEMM does not do: both are checked.
    where = scope.device, TRITON if scope.backend == NATIVE else scope.backend
    found += kernels.maxima(*where)
    found += kernels.quantization(*where, scope.full)
    found += kernels.large_tiles(*where)
    found += kernels.row_col(*where, scope.full)
    found += kernels.transient(*where)
    found += kernels.decoding(*where)
    found += kernels.transposition(*where)
    found += kernels.products(*where)
    found += grouped.grouped(*where)
    found += fused.fused(*where)
    found += mean.mean(*where)
    found += sums.error_figures(*where)
    found += logits.shared_logits(*where)
    found += primary.primary(*where)
    if native_status(scope.device).available:
        found += kernels.products(scope.device, NATIVE, record.NATIVE_GEMM)
    found.append(("fingerprint", "equal on every machine", partial(_same_fingerprint, *where)))
    return found


def _same_fingerprint(device: torch.device, backend: str) -> str | None:
    found = fingerprint(device, backend)
    return None if found == EXPECTED else f"{found}, expected {EXPECTED}"


def run_all(scope: Scope, jobs: int, after: Callable[[int], None] | None = None) -> list[Check]:
    """Run all checks of a verification.

    Args:
        scope: what is verified.
        jobs: processes to share them; 1 runs them in this one.
        after: called with the number of checks done so far, now and then.
    """
    checks: list[tuple[int, Check]] = []
    with contextlib.ExitStack() as stack:
        if jobs <= 1:
            done: Iterator[list[tuple[int, Check]]] = (_run(scope, task) for task in _tasks(scope))
        else:  # a CUDA context does not survive a fork
            spawn = multiprocessing.get_context("spawn")
            threads = max(1, torch.get_num_threads() // jobs)
            pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=torch.set_num_threads, initargs=(threads,))
            stack.enter_context(pool)
            # Whoever is free takes the next: how long a kernel compiles is not known before.
            futures = [pool.submit(_run, scope, task) for task in _tasks(scope)]
            done = (future.result() for future in as_completed(futures))
        for some in done:
            checks += some
            if after is not None:
                after(len(checks))
    return [check for _, check in sorted(checks, key=lambda pair: pair[0])]


def _compiled_as(name: str) -> str:
    """Return what checks have in common that run the same compiled kernels: other values in the same shape."""
    for values in ("non-finite", "zeros"):
        name = name.replace(values, "regular")
    return name


@lru_cache(maxsize=1)
def _tasks(scope: Scope) -> dict[str, list[tuple[int, Finding]]]:
    """Return the checks that run the same compiled kernels, with their places in the whole."""
    found: dict[str, list[tuple[int, Finding]]] = {}
    for place, finding in enumerate(findings(scope)):
        group, name, _ = finding
        found.setdefault(f"{group}/{_compiled_as(name)}", []).append((place, finding))
    return found


def _run(scope: Scope, task: str) -> list[tuple[int, Check]]:
    """Run the checks of one task."""
    return [(place, record.run_checks([finding])[0]) for place, finding in _tasks(scope)[task]]
