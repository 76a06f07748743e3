"""The processes that share the GPU tests: each test runs once, whichever process claims it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_what_runs_and_what_took_long_is_known(tmp_path):
    record = Path(__file__).parent / "gpu" / "run.py"
    spec = importlib.util.spec_from_file_location("run", record)
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    (tmp_path / "a").write_text("x.py::a\t1.5\nx.py::b\t")
    (tmp_path / "b").write_text("x.py::c\t20.0\n")
    (tmp_path / "c").write_text("")
    assert runner.times(str(tmp_path)) == [(float("inf"), "x.py::b"), (20.0, "x.py::c"), (1.5, "x.py::a")]
