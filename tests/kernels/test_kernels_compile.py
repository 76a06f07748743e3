"""The listed configurations of every kernel (bf16, whole blocks) compile for every target, without spills.

The kernels here are defined for the interpreter, so the compiler runs in processes of its own.
"""

import os
import subprocess
import sys
import tempfile

import pytest

from halfbyte.kernels import targets

# Two processes of about equal work; capabilities that share code paths are split between them.
GROUPS = ((80, 90, 103), (89, 100, 120))


def run(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, *arguments]
        environment["TRITON_CACHE_DIR"] = cache
        return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.targets
@pytest.mark.parametrize("capabilities", GROUPS, ids=str)
def test_every_configuration_fits_its_target(capabilities):
    done = run("-m", "halfbyte.kernels.targets", *map(str, capabilities))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_target_is_compiled():
    assert sorted(sum(GROUPS, ())) == sorted(targets.TARGETS)
    kernels = {case.kernel.__name__ for case in targets.all_cases()}
    assert {"gemm_tma_kernel", "gemm_pointer_kernel", "dequantize_kernel", "transpose_kernel"} <= kernels
    assert {f"quantize_{name}_kernel" for name in ("rows", "cols", "row_col", "wide", "small")} <= kernels
    assert {"amax_rows_kernel", "amax_rotated_kernel", "e2m1_pair_kernel"} <= kernels


UNFIT = """
import dataclasses
from halfbyte.kernels import gemm, targets
case = next(c for c in gemm.compile_cases() if c.kernel.__name__ == "gemm_pointer_kernel")
case = dataclasses.replace(case, arguments={**case.arguments, "BM": 64, "BN": 64, "BK": 128}, num_stages=7)
print(targets.compile_case(case, 80).problem())
"""


def test_a_configuration_that_does_not_fit_is_reported():
    done = run("-c", UNFIT)
    assert done.returncode == 0, done.stderr
    assert "shared memory" in done.stdout


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (targets.Usage(90, 255, 0, 227 << 10), None),
        (targets.Usage(90, 255, 8, 0), "spills 8 bytes"),
        (targets.Usage(120, 64, 0, (99 << 10) + 16), "limit is 101376"),
    ],
)
def test_limits(usage, expected):
    problem = usage.problem()
    assert problem is None if expected is None else expected in problem
