"""Lines of memory that quantize kernels ask for, counted in their PTX: `python tests/ptx_requests.py CASE ...`.

What one instruction of one warp touches of a line of 128 bytes is one request, however little it is. A line that a
program has read before comes from the L1 cache; all else goes to the L2 cache, whose tags can bound a kernel long
before its bytes do (docs/internals/kernels.md, "Requests, not instructions"). Cases are pairs of `ptx_checks`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import torch
from ptx_checks import PAIRS, matrix
from ptx_emulator import Access, emulated

import halfbyte as hb
from halfbyte.kernels import backend
from halfbyte.kernels.record import TARGETS
from halfbyte.sides import both_sides

LINE, SECTOR = 128, 32
SHAPE = (1024, 512)  # rows of scales are a sector apart both ways, as they are a line apart in what is large


class Requests(NamedTuple):
    """Of 1,024 values of x: lines read for the first time by a program, read again, and written."""

    first: float
    again: float
    written: float


class Lines:
    """Counts what `emulated` watches."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.known: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)

    def __call__(self, access: Access) -> None:
        """Count one instruction's."""
        # Neighbouring rows of scales share a line here; where rows are long each has lines of its own.
        length = SECTOR if access.name == "st" and access.size <= 2 else LINE
        found = np.unique(np.stack([access.program, access.warp, access.offset // length]), axis=1)
        if access.name == "st":
            self.counts["written"] += found.shape[1]
            return
        for program, _, line in found.T:
            is_known = (access.tensor, int(line)) in self.known[int(program)]
            self.counts["again" if is_known else "first"] += 1
            self.known[int(program)].add((access.tensor, int(line)))


def requests(case: str, target: str = "sm_90") -> Requests:
    """Count those of a pair of operands, their amaxes given."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    x, specs = matrix(SHAPE), PAIRS[case]
    sides = both_sides(*specs, draw=hb.Philox(7, 11).on(x.device), sign_draw=hb.Philox(99, 3).on(x.device))
    amaxes = [x.abs().max().float() if spec.format.has_amax else None for spec in specs]
    sides = [side._replace(amax=amax) for side, amax in zip(sides, amaxes, strict=True)]
    lines = Lines()
    with emulated(TARGETS[target], lines) as kernels:
        backend.quantize_row_col(x, *sides)
    assert len(kernels) == 1, kernels
    return Requests(*(lines.counts[name] * 1024 / x.numel() for name in Requests._fields))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[1:]:
        found = requests(asked)
        print(f"{asked}: {found.first:.1f} read, {found.again:.1f} read again, {found.written:.1f} written", flush=True)
