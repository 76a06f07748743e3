"""Ranks forked from a process that has imported torch are to torchrun and to themselves what interpreters are."""

from __future__ import annotations

import pytest
import test_torchrun

BEGIN = """
import atexit, os, signal, sys, threading, torch
atexit.register(sys.stdout.write, "last\\n")
begun = os.environ["RANK"], sys.argv[1:], __name__, os.getpgid(0) == os.getpid(), torch.get_num_threads(), os.getcwd()
sys.stdout.write(f"{begun}\\n")
"""
TERMINATES = 'import ctypes; atexit.register(ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev)'
OTHERS_WAIT = 'if os.environ["RANK"] == "0": raise OSError("mine")\nthreading.Event().wait(100)'
ENDS = {
    "": (0, []),
    "sys.exit(3)": (1, ["exitcode  : 3"]),
    'sys.exit("said")': (1, ["exitcode  : 1", "said\n"]),
    "1 / 0": (1, ["exitcode  : 1", "ZeroDivisionError: division by zero"]),
    "os.kill(os.getpid(), signal.SIGKILL)": (1, ["exitcode  : -9", "SIGKILL"]),
    TERMINATES: (1, ["exitcode  : -6", "terminate called"]),
    OTHERS_WAIT: (1, ["OSError: mine", "SIGTERM"]),
}


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.full)], ids=["forked", "anew"])
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_begins_and_ends_as_an_interpreter_does(tmp_path, end, is_forked):
    program = tmp_path / "program.py"
    program.write_text(BEGIN + end)
    done = test_torchrun.torchrun(str(program), "-m", "b", is_forked=is_forked)
    status, said = ENDS[end]
    assert done.returncode == status and all(part in done.stderr for part in said), done.stderr
    assert ("terminate called" in done.stderr) == (end == TERMINATES)
    printed = done.stdout.splitlines()
    begun = {line for line in printed if line != "last"}
    expected = {str((str(rank), ["-m", "b"], "__main__", True, 1, "/")) for rank in (0, 1)}
    assert begun and begun <= expected, "torchrun may stop a rank that has not begun when the other one has failed"
    assert status or (begun == expected and printed.count("last") == 2)
