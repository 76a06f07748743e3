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


# A tile is a block for a thread, of pairs two along rows and two along columns; some programs of groups only clear.
CASES = {
    "4over6 MAE, exact error": (4, 8),  # two tiles a turn of the loop
    "4over6 MAE, scaled error": (4, 8),  # one
    "8 groups: row + rotated column, stochastic": (8, 16),
    "60 small groups: row + rotated column, stochastic": (8, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tile_of_a_program_stores_its_words(case):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNTED, case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words, stores = map(int, done.stdout.split())
    assert (words, stores) == CASES[case]
