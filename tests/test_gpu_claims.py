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
    assert runner.skipped(str(tmp_path)) == ["x.py::c"]


def test_what_files_took_is_added_up(runner):
    ran = [(float("inf"), "tests/gpu/x.py::a"), (20.0, "tests/gpu/x.py::b[::]"), (1.5, "y.py::a"), (30.0, "y.py::b")]
    assert runner.by_file(ran) == ["y 2 in 32 s", "x 1 in 20 s"]


def test_what_takes_long_is_begun_first(tmp_path):
    conftest = Path(__file__).parent / "gpu" / "conftest.py"
    shutil.copy(conftest, tmp_path)
    (tmp_path / "claims").mkdir()
    body = "import pytest\n\n@pytest.mark.parametrize('case', list('abcdefgh'))\ndef test_{}(case):\n    pass\n"
    for name, test in (("auto", "short"), ("stats", "figures_are_those_of_the_cpu"), ("gemm", "row_col")):
        (tmp_path / f"test_gpu_{name}.py").write_text(body.format(test))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", ".", "--claims=claims"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    ran = [line.partition("::")[2].partition("[")[0] for line in said.splitlines() if " PASSED " in line]
    long = {"test_figures_are_those_of_the_cpu", "test_row_col"}
    assert len(ran) == 24 and set(ran[:16]) == long and set(ran[16:]) == {"test_short"}


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
    monkeypatch.setattr(runner, "visible", lambda: ["0"])
    assert runner.main(options) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{said}1 processes" if status == 0 else said)


def test_what_was_skipped_is_named_though_others_ran(tmp_path, runner, monkeypatch, capsys):
    shutil.copy(Path(__file__).parent / "gpu" / "conftest.py", tmp_path)
    body = "def test_one():\n    pass\n\n\ndef test_two():\n    pytest.skip('needs two GPUs')\n"
    (tmp_path / "test_gpu_one.py").write_text(f"import pytest\n\n\n{body}")
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "MOST_PROCESSES", 1)
    monkeypatch.setattr(runner, "visible", lambda: ["0"])
    assert runner.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition("::")[2] for line in said if line.startswith("skipped ")] == ["test_two"]


def test_processes_take_turns_at_the_gpus_and_see_all_of_them(tmp_path, runner, monkeypatch, capsys):
    shutil.copy(Path(__file__).parent / "gpu" / "conftest.py", tmp_path)
    waits = "while len(list(Path(__file__).parent.glob('seen-*'))) < 4:\n        time.sleep(0.01)"  # each runs one
    (tmp_path / "test_gpu_one.py").write_text(
        "import os, time\nfrom pathlib import Path\nimport pytest\n\n"
        "@pytest.mark.parametrize('name', 'abcd')\ndef test_one(name):\n"
        "    gpus = os.environ['CUDA_VISIBLE_DEVICES']\n"
        f"    Path(__file__).with_name(f'seen-{{name}}').write_text(gpus)\n    {waits}\n"
    )
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "MOST_PROCESSES", 2)
    monkeypatch.setattr(runner, "visible", lambda: ["3", "GPU-5"])
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 9)
    assert runner.main([]) == 0
    assert sorted(path.read_text() for path in tmp_path.glob("seen-*")) == ["3,GPU-5"] * 2 + ["GPU-5,3"] * 2
    assert "4 processes, 2 GPUs" in capsys.readouterr().out


def test_gpus_keep_the_names_that_were_given(runner, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner.visible() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5,2")
    assert runner.visible() == ["GPU-5", "2"]
