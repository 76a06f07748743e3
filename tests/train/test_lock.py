"""One writer per folder: the second is told who the first is, and harms nothing of it."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfbyte import cli, files
from halfbyte.train import lock, log

ROOT = Path(__file__).resolve().parent.parent.parent
pytest.importorskip("tyro")


def wait_until(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the first process ended"
        assert time.monotonic() < deadline, f"nothing within {seconds} s"
        time.sleep(0.02)


def test_two_trainings_in_one_folder_at_once(folder, capsys):
    """The first goes on as if alone, under all commands of a second; after kill -9 the folder is free."""
    out = folder / "compared" / "bf16"
    options = ["--preset", "tiny", "--corpus", str(folder / "corpus"), "--cache", str(folder / "cache")]
    options += ["--steps", "1000000", "--log-every", "1", "--checkpoint-every", "7", "--eval-every", "1000000"]
    command = ["train", "--recipe", "bf16", *options, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([sys.executable, "-m", "halfbyte", *command], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: any((out / "checkpoints").glob("step-*.pt")), first)
        before = (out / "log.jsonl").read_bytes()
        compare = ["compare", "--recipes", "mxfp8,bf16", *options, "--out", str(folder / "compared")]
        for second in (command, [*command, "--overwrite"], compare):
            assert cli.main(second) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and f"out={str(out)!r} is in use" in error and "choose another --out" in error
            assert f"pid {first.pid} on {socket.gethostname()}, since 20" in error and "train bf16" in error
        wait_until(lambda: (out / "log.jsonl").stat().st_size > 2 * len(before), first)
        assert (out / "log.jsonl").read_bytes().startswith(before)
        steps, _ = log.curve(out, "step")
        assert steps == list(range(1, len(steps) + 1))
        assert not (folder / "compared" / "mxfp8" / "log.jsonl").exists()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    with lock.hold("another", out):
        assert json.loads((out / lock.NAME).read_text())["pid"] == os.getpid()
    assert (out / lock.NAME).read_text() == "" and not capsys.readouterr().err


def _try(folder, start, found, all_tried):
    start.wait()
    try:
        with lock.hold("one of many", folder):
            found.put("in")
            all_tried.wait(30)
    except ValueError as error:
        found.put(str(error))


def test_of_many_at_the_same_moment_one_gets_in(tmp_path):
    context = multiprocessing.get_context("fork")
    start, found, all_tried = context.Barrier(5), context.Queue(), context.Event()
    many = [context.Process(target=_try, args=(tmp_path, start, found, all_tried)) for _ in range(5)]
    for process in many:
        process.start()
    answers = [found.get(timeout=30) for _ in many]
    all_tried.set()
    for process in many:
        process.join()
    assert answers.count("in") == 1
    pids = {re.search(r"pid (\d+) on", answer)[1] for answer in answers if answer != "in"}
    assert len(pids) == 1 and int(pids.pop()) in {process.pid for process in many}


def test_an_exception_gives_the_folder_back(tmp_path):
    with pytest.raises(RuntimeError), lock.hold("a run", tmp_path / "new"):
        raise RuntimeError
    with lock.hold("a run", tmp_path / "new"), pytest.raises(ValueError, match="is in use by another process \\(a run"):
        lock.hold("another", tmp_path / "new").__enter__()


def test_a_child_that_lives_on_does_not_keep_the_folder(tmp_path):
    """A fork has the file's descriptor too, and a lock belongs to all who have it."""
    context = multiprocessing.get_context("fork")
    over = context.Event()
    with lock.hold("a run", tmp_path):
        child = context.Process(target=over.wait, args=(30,))
        child.start()
    with lock.hold("another", tmp_path):
        assert child.is_alive()
    over.set()
    child.join()


def test_one_folder_that_is_taken_gives_the_others_back(tmp_path):
    with lock.hold("a run", tmp_path / "b"):
        with pytest.raises(ValueError, match="/b' is in use"):
            lock.hold("a comparison", tmp_path / "a", tmp_path / "b").__enter__()
        with lock.hold("another", tmp_path / "a"):
            pass


@pytest.mark.parametrize("left", ["[]", "{", '{"pid": "x"}', "\xff", "[" * 100000])
def test_a_damaged_record_is_no_obstacle(tmp_path, left):
    (tmp_path / lock.NAME).write_text(left, encoding="latin-1")
    with lock.hold("a run", tmp_path):
        pass


def test_taking_over_from_another_host_is_said(tmp_path, capsys):
    """Some network filesystems keep locks to the host."""
    record = {"work": "train nvfp4", "pid": 7, "host": "elsewhere", "since": "2026-01-02 03:04:05 +0000"}
    (tmp_path / lock.NAME).write_text(json.dumps(record))
    with lock.hold("a run", tmp_path):
        pass
    error = capsys.readouterr().err
    assert "took over from pid 7 on elsewhere, there since 2026-01-02 03:04:05" in error and error.count("\n") == 1
    with lock.hold("a run", tmp_path):
        pass
    assert not capsys.readouterr().err


def test_without_locks_the_pid_decides_and_that_is_said_once(tmp_path, capsys, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    alive = {"work": "train nvfp4", "pid": os.getppid(), "host": socket.gethostname(), "since": "2026-01-02"}
    (tmp_path / lock.NAME).write_text(json.dumps(alive))
    with pytest.raises(ValueError, match=f"is in use by another process \\(train nvfp4, pid {os.getppid()} on"):
        lock.hold("a run", tmp_path).__enter__()
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / lock.NAME).write_text(json.dumps(alive | {"pid": gone.pid}))
    capsys.readouterr()
    with lock.hold("a run", tmp_path, tmp_path / "b", tmp_path / "c"):
        files.write_text(tmp_path / "file", "written all the same")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no locks on this filesystem (No locks available)" in error


@pytest.mark.parametrize("reason, is_free", [(errno.EPERM, False), (errno.ESRCH, True)])
def test_without_locks_a_process_that_may_not_be_signalled_lives(tmp_path, monkeypatch, reason, is_free):
    """It is another user's: kill(2) says EPERM of it, and ESRCH where there is none."""

    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    def kill(pid, number):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "kill", kill)
    record = {"work": "train nvfp4", "pid": os.getpid() + 1, "host": socket.gethostname(), "since": "2026-01-02"}
    (tmp_path / lock.NAME).write_text(json.dumps(record))
    with contextlib.nullcontext() if is_free else pytest.raises(ValueError, match="in use"), lock.hold("run", tmp_path):
        pass


def test_a_folder_without_the_right_to_write_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        lock.hold("a run", tmp_path / "file").__enter__()


def test_a_file_that_is_being_written_is_no_leftover(tmp_path):
    """Of this or another process: locks belong to open files."""
    killed = tmp_path / ".step-00000002.pt.k1ll3d__.tmp"
    killed.write_bytes(b"half")
    foreign = tmp_path / ".swap.of.an.editor.tmp"
    foreign.write_bytes(b"theirs")
    with files.atomic(tmp_path / "step-00000004.pt") as file:
        file.write(b"whole")
        files.remove_leftovers(tmp_path, "step-*.pt", "latest")
        assert not killed.exists() and foreign.exists() and len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / "step-00000004.pt").read_bytes() == b"whole"
