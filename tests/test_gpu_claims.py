"""The processes that share the GPU tests: each test runs once, whichever process claims it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = """
import pytest

@pytest.fixture(scope="module")
def of_module():
    yield

@pytest.mark.parametrize("shape", [(1,), (2,)])
@pytest.mark.parametrize("name", ["a", "b"])
def test_one(of_module, name, shape):
    pass
"""


def run(folder: Path, claims: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder), f"--claims={claims}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout


def test_what_others_claimed_is_passed_by(tmp_path):
    folder, claims = tmp_path / "tests", tmp_path / "claims"
    folder.mkdir()
    claims.mkdir()
    shutil.copy(Path(__file__).parent / "gpu" / "conftest.py", folder)
    for name in ("first", "second", "third"):
        (folder / f"test_gpu_{name}.py").write_text(TESTS)
    assert "12 passed" in run(folder, claims)
    works = sorted(claims.iterdir())
    assert len(works) == 6, "two shapes use the same kernels"
    for free in (works[0], works[3], works[4]):  # of modules that others work at too
        free.unlink()
    assert "6 passed" in run(folder, claims)
    assert len(list(claims.iterdir())) == 6


@pytest.fixture
def runner():
    record = Path(__file__).parent / "gpu" / "run.py"
    spec = importlib.util.spec_from_file_location("run", record)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_runs_and_what_took_long_is_known(tmp_path, runner):
    (tmp_path / "a").write_text("x.py::a\t1.5\tran\nx.py::b\t")
    (tmp_path / "b").write_text("x.py::c\t20.0\tskipped\n")
    (tmp_path / "c").write_text("")
    assert runner.times(str(tmp_path)) == [(float("inf"), "x.py::b"), (20.0, "x.py::c"), (1.5, "x.py::a")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_runner_fails_and_the_tests_are_skipped_with_a_reason():
    folder = Path(__file__).parent / "gpu"
    result = subprocess.run([sys.executable, str(folder / "run.py")], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == "FAILED: nothing ran: torch sees no GPU; `make test` runs the tests that need none\n"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        str(folder / "test_gpu_primary.py"),
    ]
    result = subprocess.run([*command, "-rs"], capture_output=True, text=True, cwd=folder.parent.parent)
    assert result.returncode == 0 and "skipped" in result.stdout and "passed" not in result.stdout
    assert "needs a CUDA GPU" in result.stdout


@pytest.mark.parametrize(
    ("body", "options", "status", "said"),
    [
        ("pass", [], 0, "passed: "),
        ("pytest.skip('another architecture')", [], 1, "FAILED: nothing ran: all 1 tests were skipped; "),
        ("pass", ["-k", "absent"], 1, "FAILED: nothing ran: no test was collected; "),
        ("assert False", [], 1, "FAILED: "),
    ],
)
def test_a_run_in_which_nothing_ran_fails(tmp_path, runner, monkeypatch, capsys, body, options, status, said):
    shutil.copy(Path(__file__).parent / "gpu" / "conftest.py", tmp_path)
    (tmp_path / "test_gpu_one.py").write_text(f"import pytest\n\ndef test_one():\n    {body}\n")
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "MOST_PROCESSES", 1)
    monkeypatch.setattr(runner, "sees_gpu", lambda: True)
    assert runner.main(options) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{said}1 processes" if status == 0 else said)
