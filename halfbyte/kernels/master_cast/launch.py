"""The stages of a cast of primary weights, each in a fixed number of launches for any number of weights.

Tables of addresses and sizes are made once, when a list of pieces or weights is first seen; a stage then launches one
kernel for each kind of piece there is: by dtype, by whether its blocks are whole and aligned, by candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.kernels.device import scales as sc
from halfbyte.kernels.device.decode import INTERPRETED
from halfbyte.kernels.master_cast import kernels as pk
from halfbyte.kernels.unpack.transpose import TILE_ROWS, TILE_WORDS
from halfbyte.layout import ceil_div
from halfbyte.pieces import CastTarget, Piece

BLOCKS = 16  # blocks of a program along a row; 64 in the interpreter, which pays by the operation
SCALE_TILES = 256
NUM_WARPS = 4
TRANSPOSE_WARPS = 8
TABLES = 16
"""Of places that a Turner knows: an allocator gives steps that are alike the same ones again, a few in turn."""

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ROUNDINGS = {torch.float32: pk.NO_ROUNDING, torch.bfloat16: pk.TO_BF16, torch.float16: pk.TO_FP16}


class _Kind(NamedTuple):
    """What pieces of one launch have in common."""

    dtype: torch.dtype
    rounded: torch.dtype
    aligned: bool
    rule: sc.Rule | None = None


class _Launch(NamedTuple):
    """One launch: its kind, the tables on the device, and how many programs it has."""

    kind: _Kind
    table: Tensor
    constants: Tensor
    programs: Tensor
    grid: tuple[int]

    @property
    def options(self) -> dict:
        kind = self.kind
        exact = kind.rounded in (kind.dtype, torch.float32)
        rounding = pk.NO_ROUNDING if exact else _ROUNDINGS[kind.rounded]
        return {
            "DTYPE": _TRITON_DTYPES[kind.dtype],
            "ROUND": rounding,
            "ALIGNED": kind.aligned,
            "N": _blocks(),
            "num_warps": NUM_WARPS,
            "enable_fp_fusion": False,
        }


def _blocks() -> int:
    return 64 if INTERPRETED.value else BLOCKS


class Caster:
    """The stages that read masters; the same bytes as `halfbyte.reference.primary.Caster`.

    Args:
        pieces: of one or many weights, disjoint, all on one device.
        tiles: of all weights together.
    """

    def __init__(self, pieces: Sequence[Piece], tiles: int) -> None:
        self._tiles = tiles
        pieces = [piece for piece in pieces if piece.values.numel()]
        self._pieces = pieces  # keeps alive what the tables point to
        self._launches = _group(pieces, [_kind(piece) for piece in pieces])
        chosen = [piece for piece in pieces if piece.target.spec.tries_candidates]
        chosen = [piece for piece in chosen if piece.whole_tile_rows()[0] < piece.whole_tile_rows()[1]]
        kinds = [_kind(piece)._replace(rule=sc.rule_of(piece.target.spec, hardware=False)) for piece in chosen]
        self._chooses = _group(chosen, kinds, whole=True)

    def amax(self, amaxes: Tensor) -> None:
        """See the reference; `amaxes` must be zeros before."""
        for launch in self._launches:
            pk.amax_kernel[launch.grid](launch.table, launch.programs, amaxes, self._tiles, **launch.options)

    def choose(self, amaxes: Tensor, scales: Tensor) -> None:
        """See the reference."""
        for launch in self._chooses:
            tables = launch.table, launch.constants, launch.programs
            pk.choose_kernel[launch.grid](*tables, amaxes, scales, self._tiles, RULE=launch.kind.rule, **launch.options)

    def cast(self, amaxes: Tensor, scales: Tensor) -> None:
        """See the reference."""
        for launch in self._launches:
            tables = launch.table, launch.constants, launch.programs
            pk.cast_kernel[launch.grid](*tables, amaxes, scales, self._tiles, **launch.options)


def _kind(piece: Piece) -> _Kind:
    """Whole blocks at aligned addresses are read by vectors and written by words."""
    target = piece.target
    whole = piece.pitch == target.cols and not any(
        n % NVFP4_BLOCK for n in (target.cols, piece.start, piece.values.numel())
    )
    at = piece.values.data_ptr() % 16 == 0 and (piece.codes.data_ptr() - piece.first_byte) % 8 == 0
    return _Kind(piece.values.dtype, target.dtype, whole and at)


def _group(pieces: Sequence[Piece], kinds: Sequence[_Kind], whole: bool = False) -> list[_Launch]:
    """Return a launch for every kind; `whole`: over the tile rows that lie in their piece entirely."""
    launches = []
    for kind in dict.fromkeys(kinds):
        rows, constants, counts = [], [], []
        for piece, own in zip(pieces, kinds, strict=True):
            if own == kind:
                row, count = _row(piece, sum(counts), whole)
                rows.append(row)
                counts.append(count)
                constants.append(tuple(sc.constants_of(piece.target.spec)))
        device = pieces[0].values.device
        table = torch.tensor(rows, dtype=torch.int64).to(device)
        values = torch.tensor(constants, dtype=torch.float32).to(device)
        launches.append(_Launch(kind, table, values, _owners(counts).to(device), (sum(counts),)))
    return launches


def _row(piece: Piece, first_program: int, whole: bool) -> tuple[tuple[int, ...], int]:
    """Return a piece's row of the table and how many programs it takes."""
    target, stripe = piece.target, NVFP4_BLOCK * piece.pitch
    first, last = piece.whole_tile_rows() if whole else (piece.start // stripe, ceil_div(piece.stop, stripe))
    chunks = ceil_div(target.tiles[1], _blocks())
    codes = piece.codes.data_ptr() - piece.first_byte
    sizes = (piece.start, piece.stop, target.rows, target.cols, piece.pitch, target.tiles[1])
    place = (target.first_tile, target.slot, first_program, first, chunks)
    return (piece.values.data_ptr(), codes, *sizes, *place), (last - first) * chunks


def _owners(counts: Sequence[int]) -> Tensor:
    """Return int32 [programs]: whose row of the table each program works on."""
    return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts, dtype=torch.int64))


class Finisher:
    """The stages that work on whole weights; the same bytes as `halfbyte.reference.primary.Finisher`.

    table: on the device, where the memory of each weight was when it was looked up; None where there is none.

    Args:
        targets: the weights, all on one device.
        tiles: of all weights together.
    """

    def __init__(self, targets: Sequence[CastTarget], tiles: int) -> None:
        self._tiles, self._targets = tiles, list(targets)
        targets = [target for target in targets if target.tile_count]
        self._empty = [target for target in self._targets if not target.tile_count]
        if not targets:
            self.table: Tensor | None = None
            return
        device = targets[0].blocks.qdata.device
        scale_counts = [target.tiles[0] * ceil_div(target.tiles[1], SCALE_TILES) for target in targets]
        turns = [0 if t.turned is None else _turn_programs(t) for t in targets]
        firsts = [(sum(scale_counts[:i]), sum(turns[:i])) for i in range(len(targets))]
        self._rows = list(zip(targets, firsts, strict=True))
        self.look_up()
        constants = [tuple(sc.constants_of(target.spec)) for target in targets]
        self._constants = torch.tensor(constants, dtype=torch.float32).to(device)
        self._scale_programs = _owners(scale_counts).to(device)
        self._turn_programs = _owners(turns).to(device)
        turned = [target for target in targets if target.turned is not None]
        self._wide = all(_is_wide(target) for target in turned)
        self._turns_swizzled = any(target.swizzled for target in turned)

    def look_up(self) -> None:
        """Find where the memory of all weights is now; the host does not wait for the device."""
        table = torch.tensor([_weight_row(target, *first) for target, first in self._rows], dtype=torch.int64)
        device = self._rows[0][0].blocks.qdata.device
        self.table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)

    def scale(self, amaxes: Tensor, scales: Tensor, expand: bool = False) -> None:
        """See the reference."""
        self._launch_scales(amaxes, scales, compute=True, expand=expand)

    def expand(self, amaxes: Tensor, scales: Tensor) -> None:
        """See the reference."""
        self._launch_scales(amaxes, scales, compute=False, expand=True)

    def _launch_scales(self, amaxes: Tensor, scales: Tensor, *, compute: bool, expand: bool) -> None:
        if expand:
            for target in self._empty:
                target.blocks.amax.copy_(amaxes[self._tiles + target.slot])
        if self.table is None:
            return
        pk.scale_kernel[(self._scale_programs.numel(),)](
            self.table,
            self._constants,
            self._scale_programs,
            amaxes,
            scales,
            self._tiles,
            COMPUTE=compute,
            EXPAND=expand,
            N=SCALE_TILES,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )

    def transpose(self) -> None:
        """See the reference."""
        if self.table is None or not self._turn_programs.numel():
            return
        pk.transpose_weights_kernel[(self._turn_programs.numel(),)](
            self.table,
            self._turn_programs,
            WIDE=self._wide,
            TILE_ROWS=TILE_ROWS,
            TILE_WORDS=TILE_WORDS,
            num_warps=TRANSPOSE_WARPS,
        )
        if self._turns_swizzled:
            grid = (self._scale_programs.numel(),)
            pk.turn_swizzled_kernel[grid](self.table, self._scale_programs, N=SCALE_TILES, num_warps=NUM_WARPS)


class Turner:
    """The other orientation of weights, in one launch, wherever their memory is in each run.

    Args:
        targets: the weights, all on one device, whose scales are LINEAR.
    """

    def __init__(self, targets: Sequence[CastTarget]) -> None:
        self._targets = [target for target in targets if target.tile_count]
        self._moving = [tensor for target in self._targets for tensor in _turned_tensors(target)]
        self._tables: dict[tuple[int, ...], Tensor | None] = {}
        self._finisher: Finisher | None = None

    def transpose(self) -> None:
        """Fill the other orientation of every weight."""
        places = tuple([tensor.data_ptr() for tensor in self._moving])
        if not places:
            return
        if self._finisher is None:
            self._finisher = Finisher(self._targets, 0)
            self._remember(places)
        elif places in self._tables:
            self._finisher.table = self._tables[places]
        else:
            self._finisher.look_up()
            self._remember(places)
        self._finisher.transpose()

    def _remember(self, places: tuple[int, ...]) -> None:
        assert self._finisher is not None and self._finisher.table is not None, "there are weights"
        if self._finisher.table.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph fills it when it is replayed, and nobody else may read it
        if len(self._tables) == TABLES:
            self._tables.clear()
        self._tables[places] = self._finisher.table


def _turned_tensors(target: CastTarget) -> tuple[Tensor, ...]:
    assert target.turned is not None, "it is to be filled"
    return *target.blocks[:2], *target.turned[:2]


def _is_wide(target: CastTarget) -> bool:
    pointers = target.blocks.qdata.data_ptr(), target.turned.qdata.data_ptr()
    return not any(n % 2 for n in target.tiles) and not any(pointer % 16 for pointer in pointers)


def _turn_programs(target: CastTarget) -> int:
    tile_rows, tile_cols = target.tiles
    return ceil_div(tile_rows * 2, TILE_ROWS) * ceil_div(tile_cols * 2, TILE_WORDS)


def _weight_row(target: CastTarget, scale_program: int, turn_program: int) -> tuple[int, ...]:
    blocks, turned = target.blocks, target.turned
    addresses = [blocks.qdata, blocks.block_scale, blocks.amax]
    pointers = [t.data_ptr() for t in addresses]
    pointers += [0, 0] if turned is None else [turned.qdata.data_ptr(), turned.block_scale.data_ptr()]
    chosen = target.spec.tries_candidates
    sizes = (target.rows, target.cols, *target.tiles, target.first_tile, target.slot)
    return (*pointers, *sizes, target.swizzled, chosen, scale_program, turn_program)
