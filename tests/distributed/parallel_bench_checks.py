"""Every way that bench.parallel times, on ranks that are there."""

from __future__ import annotations

import ranks

from bench import parallel
from bench.gather import shape_of

MODELS = {parallel.DENSE: "nano", parallel.MIXTURE: "moe-tiny"}
TOKENS, LAYERS, ROUNDS = 64, 2, 2


def lines(rank: int, world: int) -> list[dict]:
    """Return a line of figures for every way."""
    parallel.WARM_UP = parallel.AWAITED = parallel.TIMED = 1
    found = []
    for case, name in MODELS.items():
        ways = [how for how in parallel.WAYS if how.case == case]
        measured = parallel.measure(shape_of(name, LAYERS), ways, TOKENS, ranks.device(), ROUNDS)
        lines = [how._asdict() | line for how, line in zip(ways, measured, strict=True)]
        found += [line | parallel.beside(line, lines) for line in lines]
    return found
