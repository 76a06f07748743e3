"""Machine instructions per element of quantization kernels, counted in what is compiled for sm_90: no GPU is needed.

`python -m bench.instructions` prints a table, `--write` keeps it for docs. Counted is the way through a whole tile if
nothing needs a range check: of a branch not the side that divides slowly, loops as often as a program takes them. At
copy bandwidth an H200 has about 22 issue slots for an element, half as many on the pipe of integer operations; what
reads two registers of one bank seems to take two (`register_banks`).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import ASTSource

from bench.machine import commit
from bench.markdown import rows
from bench.records import Record
from bench.register_banks import conflicts
from halfbyte import recipes
from halfbyte.kernels import record
from halfbyte.kernels.quantize import both, grouped, one
from halfbyte.rng import Philox
from halfbyte.sides import Side, both_sides
from halfbyte.spec import MXFP8, NVFP4, Eden, FourOverSix, Hadamard, Spec

RESULT = Path(__file__).parent / "results" / "instructions.json"
TARGET = "sm_90"
SHAPE = (8192, 8192)
FRESH = Hadamard(size=128, signs="fresh")
DRAWN, DRAWN_ROTATED = (NVFP4(rounding="stochastic", rotation=rotation) for rotation in (None, Hadamard()))
SIX = NVFP4(scaling=FourOverSix(), e4m3_max=256.0)
FOUR = NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5)))
EDEN = NVFP4(scaling=Eden(), fp4_max=recipes.EDEN_FP4_MAX, e4m3_max=recipes.EDEN_E4M3_MAX)
EDEN_ROTATED = replace(EDEN, rotation=FRESH)
ROTATED = {size: NVFP4(rotation=Hadamard(size=size)) for size in (16, 64, 128)}
DENSE: dict[str, tuple[Spec, Spec | None, tuple[bool, bool]]] = {
    "1x16 nearest": (NVFP4(), None, (False, False)),
    "1x16 stochastic": (DRAWN, None, (False, False)),
    "4over6 MAE, exact error": (SIX, None, (False, False)),
    "4over6 MAE, scaled error": (NVFP4(scaling=FourOverSix(error_math="scaled")), None, (False, False)),
    **{f"rotation of {size}": (spec, None, (False, False)) for size, spec in ROTATED.items()},
    "row + rotated column, nearest": (NVFP4(), ROTATED[16], (False, False)),
    "row + rotated column, stochastic": (DRAWN, DRAWN_ROTATED, (False, False)),
    "row as values + rotated column, nearest": (NVFP4(), ROTATED[16], (True, False)),
    "both as values, nearest": (NVFP4(), ROTATED[16], (True, True)),
    "both as values, stochastic": (DRAWN, DRAWN_ROTATED, (True, True)),
    "4over6 row as values + rotated column": (SIX, ROTATED[16], (True, True)),
    "4over6, both as values": (SIX, SIX, (True, True)),
    "NVFP4 row + MXFP8 column": (NVFP4(), MXFP8(), (False, False)),
    "four candidates": (FOUR, None, (False, False)),
    "four candidates in 16x16 tiles": (replace(FOUR, block=(16, 16)), None, (False, False)),
    "MS-EDEN": (EDEN, None, (False, False)),
    "MS-EDEN, rotation of 128, fresh": (EDEN_ROTATED, None, (False, False)),
    "MS-EDEN row + column rotated by 16": (EDEN, replace(EDEN, rotation=Hadamard()), (False, False)),
    "MS-EDEN row + column rotated by 16, fresh": (
        EDEN,
        replace(EDEN, rotation=Hadamard(signs="fresh")),
        (False, False),
    ),
}
GROUPED: dict[str, tuple[Spec, Spec, tuple[int, int, int]]] = {
    "8 groups: row + rotated column, nearest": (NVFP4(), ROTATED[16], (8, 32768, 7168)),
    "8 groups: row + rotated column, stochastic": (DRAWN, DRAWN_ROTATED, (8, 32768, 2048)),
    "60 small groups: row + rotated column, nearest": (NVFP4(), ROTATED[16], (60, 8192, 2048)),
    "60 small groups: row + rotated column, stochastic": (DRAWN, DRAWN_ROTATED, (60, 8192, 1408)),
    "8 groups: rotation of 64": (ROTATED[64], ROTATED[64], (8, 32768, 2048)),
    "8 groups: rotation of 128": (ROTATED[128], ROTATED[128], (8, 32768, 2048)),
    "8 groups: MS-EDEN, rotation of 128, fresh": (EDEN_ROTATED, EDEN_ROTATED, (8, 32768, 2048)),
}
"""Of tokens [groups, rows of all, columns], as codes."""
INTEGER_PIPE = {"FMNMX", "FSEL", "FSETP", "HMNMX2", "IADD3", "ISETP", "LEA", "LOP3", "P2R", "PLOP3", "PRMT", "R2P"}
INTEGER_PIPE |= {"SEL", "SGXT", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3"}
LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;")
LABEL = re.compile(r"(\.L_x_\d+):")
JUMP = re.compile(r"(?P<guard>@!?U?P\w+ )?BRA.*\((?P<label>\.L_x_\d+)\)")


class Counted(NamedTuple):
    """Of one kernel: registers and spilled bytes of a thread; of an element instructions, integer ones, `conflicts`."""

    kernel: str
    registers: int
    instructions: float
    integer: float
    conflicts: float
    spilled: int = 0


def quantize(row: Spec, col: Spec | None, transient: tuple[bool, bool]) -> None:
    """Quantize a matrix so."""
    meta = torch.device("meta")
    x, amax = torch.empty(SHAPE, dtype=torch.bfloat16, device=meta), torch.empty((), device=meta)
    draw = Philox(7, 11).on(meta)
    specs = [spec for spec in (row, col) if spec is not None]
    drawn = draw if any(spec.needs_rng for spec in specs) else None
    signs = draw if any(spec.needs_sign_rng for spec in specs) else None
    if col is None:
        one.quantize_side(x, Side(row, draw=drawn, sign_draw=signs, amax=amax))
    else:
        sides = both_sides(row, col, draw=drawn, sign_draw=signs, transient=transient)
        both.quantize_row_col(x, *(side and side._replace(amax=amax) for side in sides))


def quantize_groups(row: Spec, col: Spec, shape: tuple[int, int, int]) -> None:
    """Quantize tokens in groups so."""
    meta, (groups, *size) = torch.device("meta"), shape
    offsets, amax = torch.empty(groups, dtype=torch.int32, device=meta), torch.empty(groups, device=meta)
    draw = Philox(7, 11).on(meta)
    draws = {"draw": draw if row.needs_rng else None, "sign_draw": draw if row.needs_sign_rng else None}
    sides = both_sides(row, col, **draws, row_amax=amax, col_amax=amax)
    grouped.grouped_quantize_row_col(torch.empty(size, dtype=torch.bfloat16, device=meta), offsets, *sides)


CASES: dict[str, Callable[[], None]] = {name: partial(quantize, *case) for name, case in DENSE.items()}
CASES |= {name: partial(quantize_groups, *case) for name, case in GROUPED.items()}


STEPS = {"quantize_neighbours_kernel": 4}
"""Steps of most programs of kernels that are told at run time how many; each has two turns, written out."""


def counted(run: Callable[[], None], options: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Counted]:
    """Yield what each kernel takes that `run` launches, but a plan of groups, with these options beside its own."""
    with record.recording(record.TARGETS[TARGET]) as launches:
        run()
    for launch in launches:
        if launch.kernel.fn.__name__ != "plan_kernel":
            yield _count(launch, options)


def _count(launch: record.Specialized, options: Mapping[str, Any]) -> Counted:
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=record.gpu(record.TARGETS[TARGET]), options={**launch.options, **options})
    names = list(launch.signature)
    constants = {names[place[0]]: value for place, value in launch.constants.items() if len(place) == 1}
    name = launch.kernel.fn.__name__
    loop = STEPS.get(name, constants.get("LOOP", 1))
    lines = taken(disassembled(compiled.asm["cubin"]), loop // _turn(constants) * max(1, constants.get("TURNS", 1)))
    operations = [text.split()[0].partition(".")[0] for text in lines]
    threads = 32 * {**launch.options, **options}["num_warps"]
    per = threads / (_tile(constants) * loop * (2 if name in STEPS else 1))
    integer = sum(name in INTEGER_PIPE for name in operations)
    registers, spilled = record._resources(compiled.asm["cubin"])
    counts = (count * per for count in (len(operations), integer, conflicts(lines)))
    return Counted(name, registers, *counts, spilled=spilled)


def _tile(constants: Mapping[str, Any]) -> int:
    """Return the elements that a program quantizes at once."""
    if "TR" in constants:
        return constants["TR"] * constants["TC"]
    if "T" in constants:
        return constants["RULE"].group * constants["T"]
    return constants["RULE"].group * constants["N"] * constants.get("R", 1) * constants.get("C", 1)


def _turn(constants: Mapping[str, Any]) -> int:
    """Return the tiles that a turn of a program's loop quantizes, as `quantize_rows_kernel` says."""
    rule = constants.get("RULE")
    is_quick = rule is not None and rule.errors == "quick" and not rule.tile
    return 2 if is_quick and constants["LOOP"] % 2 == 0 else 1


def disassembled(cubin: bytes) -> list[str]:
    """Return instructions, without guards, and labels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.nvdisasm.path
        text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    found = []
    for line in text.splitlines():
        match = LINE.match(line) or LABEL.match(line)
        if match:
            found.append(match.group(1))
    return found


def taken(lines: Sequence[str], loop: int) -> list[str]:
    """Return the instructions on the way that nothing irregular lies on; every jump back is taken loop - 1 times."""
    places = {line: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    out, i = [], 0
    left: dict[int, int] = {}
    while i < len(lines):
        line = lines[i]
        i += 1
        if line.startswith(".L_x_"):
            continue
        plain = re.sub(r"^@!?U?P\w+ ", "", line)
        out.append(plain)
        if plain.startswith("EXIT") and (plain == line or _is_last(lines, i, places, left)):
            return out
        jump = JUMP.match(line)
        if jump is None:
            continue
        goal = places[jump["label"]]
        if goal < i:
            turns = left.get(goal, loop - 1)
            if not turns and not jump["guard"]:
                return out
            left[goal], i = (turns - 1, goal) if turns else (turns, i)
        elif (
            not jump["guard"]
            or _is_slow(lines[i:goal])
            or _is_padding(lines[i:goal])
            or _is_repeated(lines[i:goal])
            or _is_voted(jump["guard"], lines[: i - 1])
        ):
            i = goal
    return out


def _is_last(lines: Sequence[str], i: int, places: Mapping[str, int], left: Mapping[int, int]) -> bool:
    """Whether a whole tile leaves before line i: a loop that is done follows, or what only a group's padding needs."""
    for j in range(i, len(lines)):
        jump = JUMP.match(lines[j])
        if jump is not None and not jump["guard"]:
            return left.get(places[jump["label"]]) == 0
        if lines[j] == "EXIT":
            return _is_padding(lines[i:j])
    return False


def _is_repeated(lines: Sequence[str]) -> bool:
    """Whether these hold a whole loop and go on: the candidates of a block whose quick errors lie too close."""
    if "EXIT" in lines:
        return False
    starts = {line for line in lines if line.startswith(".L_x_")}
    jumps = ((i, JUMP.match(line)) for i, line in enumerate(lines))
    loops = ((lines.index(jump["label"]), i) for i, jump in jumps if jump and jump["label"] in starts)
    return any(4 * start < end and 2 * (end - start) > len(lines) for start, end in loops)


def _is_padding(lines: Sequence[str]) -> bool:
    """Whether these clear what pads a group: they wait for the tile's own stores."""
    return any("BAR.SYNC" in line for line in lines) and not any(line.startswith(("LDG", "MUFU")) for line in lines)


def _is_slow(lines: Sequence[str]) -> bool:
    """Whether these divide with checks of their range, which is what they are there for."""
    return 25 * sum("CALL" in line or "FCHK" in line for line in lines) > len(lines)


def _is_voted(guard: str, before: Sequence[str]) -> bool:
    """Whether the threads of a warp have voted on this way: what it avoids is for blocks of no normal scale."""
    name = guard.strip("@! ")
    while True:
        writes = re.compile(rf"(@!?U?P\d )?\S+ (U?P[T\d], )?{name}(,|$)")
        place = next((i for i in reversed(range(len(before))) if writes.match(before[i])), None)
        if place is None or before[place].startswith("VOTE.ANY"):
            return place is not None
        compared = re.match(r"ISETP\.NE\.U32\.AND P\d, PT, (R\d+)", before[place])
        if compared is None:
            return False
        name, before = compared[1], before[:place]


def table(found: Mapping[str, Any]) -> str:
    """Return the counts as docs print them."""
    body = [
        [name, str(one["registers"]), *(f"{one[what]:.1f}" for what in ("instructions", "integer", "conflicts"))]
        for name, kernels in found["cases"].items()
        for one in kernels
    ]
    names = ["", "registers", "instructions an element", "on the integer pipe", "in one bank"]
    return rows(names, body)


def render(records: Sequence[Record]) -> str:
    """Return the table of the kept counts, for bench.tables."""
    return table(json.loads(RESULT.read_text(encoding="utf-8")))


def main(arguments: Sequence[str]) -> int:
    """Count, print the table and, with --write, keep it."""
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="parts of names of cases; by default all")
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {RESULT.name}")
    options = parser.parse_args(arguments)
    if options.write and options.cases:
        parser.error("--write keeps all cases; name none")
    found = {
        "environment": {"triton": triton.__version__, "target": TARGET, "commit": commit()},
        "cases": {
            name: [kernel._asdict() for kernel in counted(case)]
            for name, case in CASES.items()
            if not options.cases or any(part in name for part in options.cases)
        },
    }
    print(table(found))
    if options.write:
        RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
