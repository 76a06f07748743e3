"""What dense calls would cost as grouped ones with a single group: `python -m bench.one_group` on a GPU.

A family of kernels is worth merging where its grouped kernels take a dense tensor at no cost. Each pair is timed in
turn as CUDA graphs; the spread is that of the dense call's rounds. Codes of the two are compared first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.measure import random_matrix
from halfbyte import ops
from halfbyte.layout import Blocks
from halfbyte.rng import Philox
from halfbyte.sides import both_sides
from halfbyte.spec import NVFP4, Hadamard, Spec

PAIRS, ROUNDS, CALLS = 5, 7, 20
MATRICES = ((8192, 8192), (16384, 2880), (32768, 768), (512, 768))
PRODUCTS = ((8192, 4096, 4096), (16384, 2880, 2880), (32768, 768, 2048), (512, 768, 768))
"""M, N, K."""

SR, NEAREST, TILE = NVFP4(rounding="stochastic"), NVFP4(), NVFP4(block=(16, 16))
QUANTIZED: dict[str, tuple[Spec | None, Spec | None]] = {
    "both: 1x16 and rotated transpose": (NEAREST, NVFP4(rotation=Hadamard())),
    "both: stochastic and rotated": (SR, NVFP4(rounding="stochastic", rotation=Hadamard())),
    "wide: rotated by 128": (None, NVFP4(rotation=Hadamard(size=128))),
    "lines: 1x16": (NEAREST, None),
    "experts: 16x16 and transpose": (TILE, TILE),
}


class Pair(NamedTuple):
    """One call in two ways; `bits` are what must be equal."""

    family: str
    shape: tuple[int, ...]
    dense: Callable[[], object]
    grouped: Callable[[], object]
    bits: Callable[[object], list[Tensor]]


def main() -> None:
    """Print a line of each pair, as docs/internals/kernels.md shows them."""
    device = torch.device("cuda")
    print("| family | shape | dense, µs | one group, µs | ratio | spread | a merge |\n|---|---|---|---|---|---|---|")
    for pair in (*quantizations(device), *products(device)):
        print(sentence(measured(pair)), flush=True)


def measured(pair: Pair) -> dict:
    """Return what both ways take, in microseconds, and their ratio over the pairs."""
    for one, other in zip(pair.bits(pair.dense()), pair.bits(pair.grouped()), strict=True):
        if not torch.equal(one, other[:, : one.shape[1]]):  # groups along the contraction have room behind them
            raise AssertionError(f"{pair.family} {pair.shape}: one group has other bytes")
    graphs = [captured(call) for call in (pair.dense, pair.grouped)]
    dense, grouped, ratios = [], [], []
    for _ in range(PAIRS):
        mine, theirs = (microseconds(graph) for graph in graphs)
        dense.append(mine), grouped.append(theirs), ratios.append(theirs / mine)
    middle = statistics.median(dense)
    spread = (max(dense) - min(dense)) / middle
    return {
        "family": pair.family,
        "shape": "x".join(map(str, pair.shape)),
        "dense_us": middle,
        "grouped_us": statistics.median(grouped),
        "ratio": statistics.median(ratios),
        "spread": spread,
        "costs": statistics.median(ratios) > 1 + 2 * spread,
    }


def sentence(line: dict) -> str:
    """Return a line of the table in docs/internals/kernels.md."""
    verdict = "costs" if line["costs"] else "free"
    times = f"{line['dense_us']:.1f} | {line['grouped_us']:.1f} | {line['ratio']:.3f}"
    return f"| {line['family']} | {line['shape']} | {times} | {line['spread']:.1%} | {verdict} |"


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(times)


def quantizations(device: torch.device) -> Iterator[Pair]:
    """Yield every family of casts with amaxes given, then with the amaxes to be found."""
    for shape in MATRICES:
        x = random_matrix(shape, device, 1)
        whole = torch.tensor([shape[0]], dtype=torch.int32, device=device)
        for family, specs in QUANTIZED.items():
            sides = partial(both_sides, *specs, draw=Philox(7, 11).on(device))
            row, col = ops.quantize_row_col(x, *sides())
            amaxes = [None if blocks is None else blocks.amax for blocks in (row, col)]
            is_tiles = specs[0] is TILE
            tensor, offsets = (x[None], None) if is_tiles else (x, whole)
            for title, known in (("", amaxes), (", amax too", [None, None])):
                given = sides(row_amax=known[0], col_amax=None if is_tiles else known[1])
                each = [None if amax is None else amax.reshape(1) for amax in known]
                one_group = sides(row_amax=each[0], col_amax=None if is_tiles else each[1])
                dense = partial(ops.quantize_row_col, x, *given)
                grouped = partial(ops.grouped_quantize_row_col, tensor, offsets, *one_group)
                yield Pair(family + title, shape, dense, grouped, _codes)


def _codes(both: object) -> list[Tensor]:
    assert isinstance(both, tuple)
    found = [blocks for blocks in both if isinstance(blocks, Blocks)]
    return [blocks.qdata.flatten(0, -2) for blocks in found]


def products(device: torch.device) -> Iterator[Pair]:
    """Yield GEMMs of codes, then of operands decoded before."""
    for M, N, K in PRODUCTS:
        x, w = random_matrix((M, K), device, 1), random_matrix((N, K), device, 2)
        whole = torch.tensor([M], dtype=torch.int32, device=device)
        for title, decoded in (("GEMM of codes", False), ("GEMM of values", True)):
            sides = [partial(both_sides, spec, None, transient=(decoded, False)) for spec in (NEAREST, TILE)]
            a, b = (ops.quantize_row_col(t, *side())[0] for t, side in zip((x, w), sides, strict=True))
            a_group = ops.grouped_quantize_row_col(x, whole, *sides[0]())[0]
            b_group = ops.grouped_quantize_row_col(w[None], None, *sides[1]())[0]
            dense = _operand(a, NEAREST, K), _operand(b, TILE, K)
            own = _operand(a_group, NEAREST, K), _operand(b_group, TILE, K)
            yield Pair(
                title,
                (M, N, K),
                partial(ops.gemm_nt, dense[0], dense[1]),
                partial(ops.grouped_gemm_nt, own[0], own[1], whole),
                lambda y: [],
            )


def _operand(blocks: Blocks | None, spec: Spec, cols: int) -> ops.Operand:
    assert blocks is not None, "the orientation has a spec"
    return ops.Operand(blocks, spec, cols)


if __name__ == "__main__":
    main()
