"""Instructions of a tile, counted in compiled kernels: as many tiles are walked through as a program quantizes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COUNTED = """
import sys
from bench import instructions
found, walk = [], instructions.taken
instructions.taken = lambda lines, loop: found.append(walk(lines, loop)) or found[-1]
(counted,) = instructions.counted(instructions.CASES[sys.argv[1]])
print(sum(line.startswith("STG.E.64") for line in found[0]), sum(line.startswith("STG") for line in found[0]))
"""


@pytest.mark.parametrize("case", ["4over6 MAE, exact error", "4over6 MAE, scaled error"])
def test_four_tiles_a_program_store_their_words_four_times(case):
    """The first goes through two tiles a turn of its loop, the second through one; a tile is a block for a thread."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNTED, case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words, stores = map(int, done.stdout.split())
    assert (words, stores) == (4, 8)
