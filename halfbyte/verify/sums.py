"""Checks of the sums that statistics are made of, against the reference on the CPU: equal up to the order of fp64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.arithmetic import ERROR_SUMS, OPERAND_SUMS
from halfbyte.layout import Blocks, Operand, round_up
from halfbyte.spec import MXFP8, NVFP4, Spec
from halfbyte.verify.compare import difference
from halfbyte.verify.kernels import CPU
from halfbyte.verify.matrix import SEED
from halfbyte.verify.record import Finding

GROUP = "sums of statistics"
SHAPES = ((256, 512), (37, 83))
SIZES = (0, 16, 32, 64, 128)
"""Of rotations; 0 is none."""
SPECS: dict[str, Spec] = {
    "an amax a row": NVFP4(outer="row"),
    **{f"MXFP8 {element}": MXFP8(element=element) for element in ("e4m3", "e5m2")},
}
"""Without a rotation."""
COUNTS = slice(OPERAND_SUMS.index("nonzero"), None)
ORDER = 1e-12
"""Relative: what the order of a sum in fp64 may change."""


class Case(NamedTuple):
    """One operand: rows and columns of x, the size of its rotation, whether x lies turned, and how it is quantized."""

    shape: tuple[int, int]
    size: int
    turned: bool
    spec: Spec


def error_figures(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """operand_sums and operand_noise of rows and columns, error_sums, square_sum, and column_outliers."""
    for shape in SHAPES:
        name = "x".join(map(str, shape))
        how = [(f"rotation {size}", size, NVFP4()) for size in SIZES] + [(what, 0, SPECS[what]) for what in SPECS]
        for (what, size, spec), turned in product(how, (False, True)):
            case = Case(shape, size, turned, spec)
            where = f"{name} {'columns' if turned else 'rows'}, {what}"
            yield GROUP, f"operand_sums, {where}", lambda case=case: _operand(device, backend, case)
        where = device, backend, shape
        yield GROUP, f"error_sums, {name}", lambda w=where: _errors(*w)
        yield GROUP, f"column_outliers, {name}", lambda w=where: _outliers(*w)


def coded(rows: int, cols: int, spec: Spec, generator: torch.Generator) -> Operand:
    """Return an operand of any codes, and of any scales but NaN, a fifth of them 0."""
    blocks = cols // spec.block_length
    qdata = torch.randint(0, 256, (rows, blocks * spec.format.block_bytes), generator=generator, dtype=torch.uint8)
    if not spec.format.has_amax:  # without codes that are no numbers, and beside scales that sums can hold
        qdata = torch.where(qdata & 0x7F >= 0x7B, 0x38, qdata)
        scale, amax = torch.randint(110, 135, (rows, blocks), generator=generator), torch.empty(0, dtype=torch.float32)
    else:
        scale = torch.randint(1, 127, (rows, blocks), generator=generator)
        amax = torch.rand((rows,) if spec.has_row_amax else (), generator=generator, dtype=torch.float32) * 8 + 1
    scale = torch.where(torch.rand(scale.shape, generator=generator, dtype=torch.float32) < 0.2, 0, scale).to(
        torch.uint8
    )
    return Operand(Blocks(qdata, scale, amax), spec, cols)


def _operand(device: torch.device, backend: str | None, case: Case) -> str | None:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(case.shape, generator=generator, dtype=torch.float32).bfloat16()
    x = x.T if case.turned else x
    wide = round_up(x.shape[1], max(case.spec.block_length, case.size))
    operand = coded(x.shape[0], wide, case.spec, generator)
    signs = torch.randint(0, 2, (case.size,), generator=generator) * 2.0 - 1 if case.size else None
    results = []
    for place, which in ((device, backend), (CPU, "reference")):
        given = operand._replace(blocks=Blocks(*(t.to(place) for t in operand.blocks)))
        turned = None if signs is None else signs.to(place)
        noise = ops.operand_noise(x.to(place), given, turned, backend=which)
        results.append((*ops.operand_sums(x.to(place), given, turned, True, backend=which), noise))
    (mine, largest, maxima, noise), (theirs, most, others, _) = results
    assert maxima is not None and others is not None, "they were asked for"
    if wrong := difference(maxima, others) or difference(largest, most) or difference(mine[COUNTS], theirs[COUNTS]):
        return wrong
    alone = theirs[OPERAND_SUMS.index("noise")]
    return _far(OPERAND_SUMS, mine, theirs) or _far(("noise alone",), noise[None], alone[None])


def _errors(device: torch.device, backend: str | None, shape: tuple[int, int]) -> str | None:
    generator = torch.Generator().manual_seed(SEED)
    got, wanted = (
        torch.randn(shape, generator=generator, dtype=torch.float32).bfloat16(),
        torch.randn(shape, generator=generator, dtype=torch.float32),
    )
    results = []
    for place, which in ((device, backend), (CPU, "reference")):
        sums = ops.error_sums(wanted.to(place), got.to(place), backend=which)
        results.append((sums, *ops.square_sum(got.to(place), backend=which)))
    (mine, squares, largest), (theirs, others, most) = results
    return difference(largest, most) or _far(
        (*ERROR_SUMS, "squares"), torch.cat((mine, squares[None])), torch.cat((theirs, others[None]))
    )


def _far(names: tuple[str, ...], mine: Tensor, theirs: Tensor) -> str | None:
    """Say which sum differs by more than another order of fp64 makes."""
    for name, got, want in zip(names, mine.tolist(), theirs.tolist(), strict=True):
        if not abs(got - want) <= ORDER * abs(want):
            return f"{name}: {got}, expected {want}"
    return None


def _outliers(device, backend, shape) -> str | None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float32).bfloat16()
    limit = torch.tensor(1.5, dtype=torch.float64)
    mine, theirs = (
        ops.column_outliers(x.to(place), limit.to(place), which)
        for place, which in ((device, backend), (CPU, "reference"))
    )
    return difference(mine, theirs)
