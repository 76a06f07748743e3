"""Triton's newest release, beside the one that the other tests have: `make test-targets` installs it into .venv."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_stand_in_launches as stand_in

from halfbyte.kernels import calling

ROOT = Path(__file__).resolve().parents[2]
NEWEST = Path(sys.prefix, f"triton-{calling.RELEASES[-1]}")


@pytest.fixture(scope="module", autouse=True)
def newest():
    assert (NEWEST / "triton").is_dir(), f"make test-targets installs Triton {calling.RELEASES[-1]} into {NEWEST}"


def test_launches_are_repeated(tmp_path):
    found = stand_in.given(tmp_path, [NEWEST])
    assert re.match(re.escape(calling.RELEASES[-1]) + r"\.\d", found["triton"])
    stand_in.check(found)


def test_kernels_of_a_request_are_compiled_side_by_side(tmp_path):
    stand_in.check_together(stand_in.given(tmp_path, [NEWEST], "compiling_together.py"))


@pytest.mark.parametrize("case", ["activation", pytest.param("gradient", marks=pytest.mark.full)])
def test_a_kernel_makes_the_bytes_of_the_reference(case):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (NEWEST, ROOT / "tests", ROOT)))
    command = [sys.executable, str(ROOT / "tests/ptx_checks.py"), "sm_90", case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{case} on sm_90: equal"
