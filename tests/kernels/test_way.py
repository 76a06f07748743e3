"""x goes one way from an op to a kernel: through the files that docs/internals/kernels.md lists, never back to one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from quantize_checks import sample
from repeating import kernels

import halfbyte as hb
from halfbyte import ops
from halfbyte.kernels import launch
from halfbyte.kernels.quantize import route
from halfbyte.layout import SWIZZLED_32_4_4, Operand
from halfbyte.sides import Side, both_sides

__all__ = ["kernels"]
pytestmark = pytest.mark.usefixtures("kernels")

PACKAGE = Path(hb.__file__).parent
PAGE = PACKAGE.parent / "docs" / "internals" / "kernels.md"
TABLE = re.compile(r"^`(\w+)`:\n\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| `(.+)` \| (`.+`) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w/]+)`")

PLAIN, TILE, MX = hb.NVFP4(), hb.NVFP4(block=(16, 16)), hb.MXFP8()
SEARCH = hb.NVFP4(scaling=hb.FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5)), block=(16, 16))
RHT, WIDE = (hb.NVFP4(rotation=hb.Hadamard(size=size)) for size in (16, 64))
LAYOUTS = {"scale_layout": SWIZZLED_32_4_4}
ENDS = torch.tensor([32, 64, 96, 128], dtype=torch.int32)
Way = tuple[str, ...]


class Ways:
    """Through which files of the kernels every launch was reached, from the body of its op on."""

    def __init__(self) -> None:
        self.found: set[tuple[str, Way]] = set()

    def launched(self, launched: launch.Launched) -> None:
        function = launched.kernel.fn
        files, frame = [Path(function.__code__.co_filename)], sys._getframe()
        while frame is not None:
            files.append(Path(frame.f_code.co_filename))
            frame = frame.f_back
        names = [file.relative_to(PACKAGE).with_suffix("").as_posix() for file in files if PACKAGE in file.parents]
        body = next(i for i, name in enumerate(names) if name.startswith("ops/"))
        inside = [name.removeprefix("kernels/") for name in reversed(names[:body]) if name != "kernels/launch"]
        self.found.add((function.__name__, tuple(name for name, _ in groupby(inside))))


def ways(*calls: Callable) -> set[tuple[str, Way]]:
    seen = Ways()
    with launch.watching(seen):
        for call in calls:
            call()
    return seen.found


def x(rows: int = 128, cols: int = 256) -> torch.Tensor:
    return sample("normal", (rows, cols), torch.bfloat16, "cpu")


def experts() -> torch.Tensor:
    return x(4 * 128).view(4, 128, 256)


def one(spec, t=None, **options) -> Callable:
    return lambda: ops.quantize(x() if t is None else t, Side(spec, **options))


def two(row, col, t=None, **options) -> Callable:
    return lambda: ops.quantize_row_col(x() if t is None else t, *both_sides(row, col, **options))


def groups(row, col, t=None, **options) -> Callable:
    ends, t = (ENDS, x()) if t is None else (None, t)
    return lambda: ops.grouped_quantize_row_col(t, ends, *both_sides(row, col, **options))


def stored(spec=PLAIN, **options) -> Operand:
    return Operand(ops.quantize(x(), Side(spec, **options), backend="reference"), spec, 256, **options)


def grouped(t=None, side: int = 0, **options) -> Operand:
    ends, t = (ENDS, x()) if t is None else (None, t)
    both = ops.grouped_quantize_row_col(t, ends, *both_sides(PLAIN, PLAIN, **options), backend="reference")
    return Operand(both[side], PLAIN, t.shape[-1 - side], **options)


def quantizing() -> Iterator[Callable]:
    yield from (one(spec) for spec in (PLAIN, TILE, RHT, WIDE))
    yield from (one(PLAIN, x(16)), one(RHT, x().T), one(TILE, x(128, 512)), one(TILE, **LAYOUTS))
    yield searching


def searching() -> None:
    """Quantize as if these were the many tiles of a large tensor."""
    with patch.dict(route.QUICK_TILE_BLOCKS, {4: 0}), patch.object(route, "LEAST_WAVES", 0):
        one(SEARCH)()


def quantizing_both() -> Iterator[Callable]:
    yield from (two(PLAIN, PLAIN), two(PLAIN, RHT), two(PLAIN, RHT, x(256, 304)), two(PLAIN, WIDE), two(None, RHT))
    yield from (two(TILE, TILE), two(TILE, TILE, **LAYOUTS), two(TILE, TILE, transient=(True, True)))


def quantizing_groups() -> Iterator[Callable]:
    yield from (groups(*pair) for pair in ((PLAIN, RHT), (None, WIDE), (None, PLAIN)))
    yield from (groups(TILE, TILE), groups(TILE, TILE, transient=(True, True)), groups(PLAIN, PLAIN, **LAYOUTS))
    w = experts()
    yield from (groups(*pair, w) for pair in ((PLAIN, RHT), (PLAIN, None), (TILE, None)))
    yield from (groups(TILE, TILE, w), groups(TILE, TILE, w, transient=(True, True)))


def products() -> Iterator[Callable]:
    yield lambda: ops.gemm_nt(stored(), stored())
    yield lambda: ops.gemm_nt(x(16, 4096), x(16, 4096))
    yield lambda: ops.gemm_nt(x(1), x(16))


def grouped_products() -> Iterator[Callable]:
    yield lambda: ops.grouped_gemm_nt(grouped(), grouped(experts()), ENDS)
    yield lambda: ops.grouped_gemm_nt(grouped(side=1), grouped(side=1), ENDS)
    yield lambda: ops.grouped_gemm_nt(grouped(**LAYOUTS), grouped(experts()), ENDS)


def transposing() -> None:
    blocks = stored(TILE).blocks
    ops.transpose(blocks.qdata, blocks.block_scale, 128, 256)


CALLS: dict[str, Callable[[], Iterator[Callable]]] = {
    "quantize": quantizing,
    "quantize_row_col": quantizing_both,
    "amax": lambda: iter([lambda: ops.amax(x())]),
    "dequantize": lambda: iter([lambda: ops.dequantize(stored())]),
    "decode": lambda: iter([lambda: ops.decode(stored(MX))]),
    "transpose": lambda: iter([transposing]),
    "gemm_nt": products,
    "grouped_quantize_row_col": quantizing_groups,
    "grouped_dequantize": lambda: (lambda o=o: ops.grouped_dequantize(grouped(**o), ENDS) for o in ({}, LAYOUTS)),
    "grouped_decode": lambda: iter([lambda: ops.grouped_decode(grouped(experts()))]),
    "grouped_gemm_nt": grouped_products,
}


def listed() -> dict[str, set[tuple[str, Way]]]:
    text = PAGE.read_text(encoding="utf-8")
    table: dict[str, set[tuple[str, Way]]] = {}
    for call, rows in TABLE.findall(text[text.index("## The way of x") : text.index("## Heads")]):
        lines = ROW.findall(rows)
        table[call] = {(name, whole(way.split(" → "))) for way, names in lines for name in NAME.findall(names)}
    return table


def whole(files: list[str]) -> Way:
    """Give a file that is named alone the folder of the one before, as the page does; but for those beside folders."""
    way: list[str] = []
    for file in files:
        is_there = (PACKAGE / "kernels" / f"{file}.py").is_file()
        way.append(file if is_there else f"{way[-1].rpartition('/')[0]}/{file}")
    return tuple(way)


def rooms(way: Way) -> list[str]:
    return [room for room, _ in groupby(name.split("/")[0] for name in way)]


def test_the_page_lists_every_call():
    assert list(listed()) == list(CALLS)


@pytest.mark.parametrize("call", CALLS)
def test_launches_are_reached_as_the_page_says(call):
    found = ways(*CALLS[call]())
    assert found == listed()[call]
    for kernel, way in found:
        assert len(set(way)) == len(way), f"{kernel}: back to a file it had left"
        assert len(set(rooms(way))) == len(rooms(way)), f"{kernel}: back to a room it had left"


def test_a_way_back_is_seen():
    assert rooms(("quantize/grouped", "amax/grouped", "quantize/grouped_wide")) == ["quantize", "amax", "quantize"]
