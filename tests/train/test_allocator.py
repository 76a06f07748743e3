"""The commands' process keeps the memory that it frees: a step's temporaries are not fetched from the system again."""

import platform
import subprocess
import sys
import types

import pytest

FAULTS = """
import resource, sys
import torch
from halfbyte.train import allocator

torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert allocator.keep_freed_memory()

def step():
    return [torch.ones(1 << 18) for _ in range(8)]  # 1 MiB each

step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library frees in another way")
def test_freed_memory_is_kept():
    given_back, kept = page_faults("given back"), page_faults("kept")
    assert kept < 256 and given_back > 4 * max(kept, 256)  # pages of 4 KiB: 2,048 a step, if all come anew


@pytest.mark.parametrize("refused", [None, -1, -3])
def test_both_thresholds_are_asked_for_and_a_refusal_is_told(monkeypatch, refused):
    """glibc's malloc.h: M_TRIM_THRESHOLD is -1, M_MMAP_THRESHOLD -3, at most half of 64 MiB; mallopt gives 0 for no."""
    from halfbyte.train import allocator

    asked = {}

    def mallopt(parameter, value):
        asked[parameter] = value
        return int(parameter != refused)

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    assert allocator.keep_freed_memory() is (refused is None)
    assert asked.items() <= {-1: 2**31 - 1, -3: 32 * 2**20}.items() and -1 in asked


def test_where_there_is_no_such_setting_nothing_is_kept(monkeypatch):
    from halfbyte.train import allocator

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert allocator.keep_freed_memory() is False


def test_the_commands_ask_for_it(monkeypatch):
    from halfbyte.train import commands

    asked = []
    monkeypatch.setattr(commands.allocator, "keep_freed_memory", lambda: asked.append(True))
    monkeypatch.setattr(commands, "_train", lambda options, interrupts, ranks: 0)
    assert commands.train_command(["--steps", "1"]) == 0 and asked == [True]
