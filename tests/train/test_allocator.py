"""The commands' process keeps the memory that it frees: a step's temporaries are not fetched from the system again."""

import platform
import subprocess
import sys

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
    assert given_back > 20 * 256 and kept < 256  # pages of 4 KiB: 2,048 a step, if all come anew


def test_the_commands_ask_for_it(monkeypatch):
    from halfbyte.train import commands, launch

    asked = []
    monkeypatch.setattr(commands.allocator, "keep_freed_memory", lambda: asked.append(True))
    monkeypatch.setattr(launch, "refuse_many", lambda name: None)
    monkeypatch.setattr(commands, "_train", lambda options, interrupts: 0)
    assert commands.train_command(["--steps", "1"]) == 0 and asked == [True]
