"""Every way that bench.parallel times, on ranks that are there."""

from __future__ import annotations

import ranks

from bench import parallel
from bench.gather import shape_of

MODELS = {parallel.DENSE: "nano", parallel.MIXTURE: "moe-tiny"}
TOKENS, LAYERS = 64, 2


def lines(rank: int, world: int) -> list[dict]:
    """Return a line of figures for every way."""
    parallel.WARM_UP = parallel.TIMED = 1
    shapes = {case: shape_of(name, LAYERS) for case, name in MODELS.items()}
    found = []
    for how in parallel.WAYS:
        found.append(how._asdict() | parallel.measure(shapes[how.case], how, TOKENS, ranks.device()))
        found[-1] |= parallel.beside(found[-1], found)
    return found
