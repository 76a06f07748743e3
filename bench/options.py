"""Quantization kernels under launch options that no route chose: `python -m bench.options CASE --try maxnreg=80`.

Counted without a GPU (`--count`): registers, spills, instructions and reads in one bank of what the compiler makes of
them. Timed on one: as CUDA graphs, in turn, with normal values and with heavy tails, amax given. The bytes of each are
compared with those of the route's own choice before. What a kernel does is no option: another checkout says that
(`bench.in_turn`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench import instructions, one_group
from bench.machine import facts
from bench.markdown import rows
from bench.measure import random_matrix
from halfbyte.kernels.quantize import both, grouped, one
from halfbyte.layout import Blocks
from halfbyte.rng import Philox
from halfbyte.sides import Side, both_sides
from halfbyte.verify.timing import input_sets

NAMES: Mapping[str, Callable[[str], Any]] = {"maxnreg": int, "num_warps": int, "num_stages": int, "ptx_options": str}
CHOOSERS: tuple[tuple[Any, str], ...] = (
    (one, "choose_one_side"),
    (both, "choose_pair"),
    (grouped, "choose_next_side"),
)
"""Who asks a route what to launch, and by which name."""
KINDS = ("normal", "heavy tails")
Quantize = Callable[[], list[Tensor]]


def parsed(text: str) -> dict[str, Any]:
    """Return launch options of "maxnreg=80,ptx_options=-O1".

    Raises:
        ValueError: it names none, or another than these.
    """
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in NAMES or not value:
            raise ValueError(f"--try {text}: {part!r} is no option; give {', '.join(f'{one}=…' for one in NAMES)}")
        found[name] = NAMES[name](value)
    return found


@contextmanager
def asked(options: Mapping[str, Any]) -> Iterator[None]:
    """Let every kernel of quantization be launched with these options beside those that its route chose."""
    with ExitStack() as stack:
        for module, name in CHOOSERS:
            stack.enter_context(patch.object(module, name, _with(getattr(module, name), options)))
        yield


def _with(choose: Callable[[Any], Any], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    def chosen(request: Any) -> Any:
        choice = choose(request)
        return choice._replace(constants=choice.constants | options) if choice.constants else choice

    return chosen


def calls(case: str, shape: tuple[int, int], kind: str, device: torch.device) -> list[Quantize]:
    """Return calls of a case of `bench.instructions` on as many matrices as no cache holds."""
    groups = instructions.GROUPED.get(case)
    if groups is not None:
        shape = groups[2][1:]
    matrices = []
    for seed in range(input_sets(device, 2 * shape[0] * shape[1])):
        generator = torch.Generator(device).manual_seed(seed)
        normal = torch.randn(shape, generator=generator, device=device).bfloat16()
        matrices.append(normal if kind == KINDS[0] else random_matrix(shape, device, seed))
    return [_call(case, x) for x in matrices]


def _call(case: str, x: Tensor) -> Quantize:
    draw = Philox(7, 11).on(x.device)
    if case in instructions.GROUPED:
        row, col, (count, *_) = instructions.GROUPED[case]
        ends = torch.arange(1, count + 1, device=x.device, dtype=torch.int32) * (len(x) // count)
        sides = both_sides(row, col, draw=draw, sign_draw=draw)
        sides = _with_amaxes(sides, grouped.grouped_quantize_row_col(x, ends, *sides))
        return lambda: _bytes(grouped.grouped_quantize_row_col(x, ends, *sides))
    row, col, transient = instructions.DENSE[case]
    if col is None:
        side = Side(row, draw=draw if row.needs_rng else None, sign_draw=draw if row.needs_sign_rng else None)
        side = side._replace(amax=one.quantize_side(x, side).amax)
        return lambda: _bytes([one.quantize_side(x, side)])
    sides = both_sides(row, col, draw=draw, transient=transient)
    sides = _with_amaxes(sides, both.quantize_row_col(x, *sides))
    return lambda: _bytes(both.quantize_row_col(x, *sides))


def _with_amaxes(sides: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    return [side._replace(amax=blocks.amax) for side, blocks in zip(sides, made, strict=True)]


def _bytes(made: Sequence[Blocks | None]) -> list[Tensor]:
    tensors = [tensor for blocks in made if blocks is not None for tensor in (blocks.qdata, blocks.block_scale)]
    return [tensor for tensor in tensors if tensor.numel()]


def differing(work: Sequence[Quantize], options: Mapping[str, Any]) -> int:
    """Return how many bytes of the first matrix are others under these options."""
    expected = work[0]()
    with asked(options):
        actual = work[0]()
    pairs = zip(actual, expected, strict=True)
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)


def microseconds(work: Sequence[Quantize], tried: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return what a call takes under each of these options, the median of rounds in turn."""
    graphs = []
    for options in tried:
        with asked(options):
            graphs.append(one_group.captured(lambda: [call() for call in work]))
    rounds = [[one_group.microseconds(graph) for graph in graphs] for _ in range(one_group.PAIRS)]
    return [statistics.median(own) / len(work) for own in zip(*rounds, strict=True)]


def count(cases: Sequence[str], tried: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what the compiler makes of each."""
    names = ["", "options", "registers", "spilled", "instructions an element", "in one bank"]
    lines = []
    for case in cases:
        for options in tried:
            for made in instructions.counted(instructions.CASES[case], options):
                figures = (f"{made.instructions:.1f}", f"{made.conflicts:.1f}")
                lines.append([case, shown(options), str(made.registers), str(made.spilled), *figures])
    return rows(names, lines)


def measure(
    cases: Sequence[str], tried: Sequence[Mapping[str, Any]], shapes: Sequence[tuple[int, int]], device: torch.device
) -> str:
    """Return a table of what each takes, in microseconds."""
    lines = []
    for case in cases:
        for shape in shapes if case in instructions.DENSE else shapes[:1]:
            for kind in KINDS:
                work = calls(case, shape, kind, device)
                wrong = [differing(work, options) for options in tried]
                found = microseconds(work, tried)
                size = "its own" if case in instructions.GROUPED else "x".join(map(str, shape))
                for options, us, others in zip(tried, found, wrong, strict=True):
                    verdict = "equal" if not others else f"{others} bytes differ"
                    lines.append([case, size, kind, shown(options), f"{us:.1f}", f"{us / found[0]:.3f}", verdict])
    return rows(["", "shape", "values", "options", "µs", "of the first", "bytes"], lines)


def shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "as chosen"


def main(arguments: Sequence[str]) -> int:
    """Count or time cases and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.options", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="+", help="parts of names of cases of bench.instructions")
    parser.add_argument("--try", dest="tried", nargs="+", default=[], help="options, as in maxnreg=80,ptx_options=-O1")
    parser.add_argument("--shape", nargs="+", default=["8192x8192"], help="of dense matrices")
    parser.add_argument("--count", action="store_true", help="compile for sm_90 and count; needs no GPU")
    options = parser.parse_args(arguments)
    try:
        tried: list[Mapping[str, Any]] = [{}, *map(parsed, options.tried)]
        shapes = [(int(rows), int(cols)) for rows, _, cols in (text.partition("x") for text in options.shape)]
    except ValueError as error:
        parser.error(str(error))
    cases = [name for name in instructions.CASES if any(part in name for part in options.cases)]
    if not cases:
        parser.error(f"{options.cases}: no case; there are {', '.join(instructions.CASES)}")
    if options.count:
        print(count(cases, tried))
        return 0
    if not torch.cuda.is_available():
        parser.error("no GPU: with --count they are compiled and counted without one")
    print(", ".join(f"{name} {value}" for name, value in facts(torch.device("cuda")).items()), "\n")
    print(measure(cases, tried, shapes, torch.device("cuda")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
