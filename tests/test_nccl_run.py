"""The tests of ranks with a GPU each: they run over gloo as well, and a run of them in which nothing ran fails."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).parent / "nccl" / "run.py"
ONE = "test_what_a_backward_is_sent_is_the_quantized_transpose"


def run(*options: str) -> tuple[int, str]:
    result = subprocess.run([sys.executable, str(RUN), *options], capture_output=True, text=True)
    return result.returncode, result.stdout.splitlines()[-1]


def test_over_gloo():
    status, said = run("--on", "cpu", "-k", f"{ONE} and 2")
    assert status == 0 and said.startswith("passed: 1 tests, ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_nothing_ran_it_fails():
    status, said = run("-k", ONE)
    assert status == 1 and said.startswith("FAILED: nothing ran: all 2 tests were skipped; `make test-distributed`")
    status, said = run("-k", "absent")
    assert status != 0 and said.startswith("FAILED: nothing ran: no test was collected; ")
