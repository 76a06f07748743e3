"""A command that trains on a CPU beside other programs uses one thread, and says so."""

import subprocess
import sys

import pytest
import torch

from halfbyte.train import threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def several(monkeypatch):
    """Two threads that nobody asked for."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("together", "left"), [(30, 1), (501, 2), (2000, 2)])
def test_one_thread_where_several_do_less_than_half(monkeypatch, together, left):
    monkeypatch.setattr(threads, "operations", {2: together, 1: 1000}.get)
    said = threads.settle_threads(CPU)
    assert torch.get_num_threads() == left and len(said) == (left == 1)
    assert all(line.startswith("one thread in place of 2: ") and "OMP_NUM_THREADS" in line for line in said)


def test_what_is_chosen_stays(monkeypatch):
    monkeypatch.setattr(threads, "operations", {2: 0, 1: 1000}.get)
    assert threads.settle_threads(torch.device("cuda")) == () and torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads.settle_threads(CPU) == () and torch.get_num_threads() == 2


def test_operations_are_counted_on_as_many_threads_as_asked_and_change_nothing(monkeypatch):
    seen = []
    monkeypatch.setattr(threads, "SECONDS", 0.01)
    monkeypatch.setattr(
        threads.time, "perf_counter", lambda: (seen.append(torch.get_num_threads()), len(seen) / 250)[1]
    )
    assert threads.operations(1) == 2 and set(seen) == {1} and torch.get_num_threads() == 2


def test_the_command_settles(tmp_path):
    """In a process of its own, whose threads are said to hold each other up."""
    script = (
        "import sys, torch; from halfbyte.train import threads; from halfbyte import cli; torch.set_num_threads(2);"
        "threads.operations = {2: 0, 1: 9}.get; code = cli.main(sys.argv[1:]); print(torch.get_num_threads());"
        "sys.exit(code)"
    )
    (tmp_path / "text.txt").write_text("a few words, over and over. " * 400)
    command = ["train", "--preset", "tiny", "--steps", "1", "--corpus", "text.txt", "--out", "run", "--cache", "cache"]
    done = subprocess.run([sys.executable, "-c", script, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("one thread in place of 2: ") == 1 and done.stdout.splitlines()[-1] == "1"
