"""The cast of primary weights from flat pieces of their masters, in plain torch (docs/numerics.md section 9).

A cast runs in stages, between which the caller exchanges small buffers with the other ranks: tile amaxes, scales,
codes, then the other orientation. `amaxes` is fp32 [tiles + slots]: of every tile, Inf where an element is not finite,
and of every weight (slot) over its finite elements; both are maxima, so ranks combine them by a maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import E4M3_NAN, NVFP4_BLOCK
from halfbyte.layout import ceil_div, swizzle, unswizzle
from halfbyte.pieces import CastTarget, Piece
from halfbyte.reference.cast import e2m1_nearest
from halfbyte.reference.nvfp4 import quantize, transpose
from halfbyte.reference.scale import block_scale, encode_scale, scale_bytes, tensor_factors

CHUNK = 1 << 18


class _Chunk(NamedTuple):
    """Some elements of a piece: values after rounding to the weight's dtype, fp32; int64 row, column and tile."""

    x: Tensor
    row: Tensor
    col: Tensor
    tile: Tensor


def _chunks(piece: Piece) -> Iterator[_Chunk]:
    """Yield the elements of a piece without its padding."""
    target = piece.target
    for begin in range(0, piece.values.numel(), CHUNK):
        x = piece.values[begin : begin + CHUNK].to(target.dtype).float()
        element = torch.arange(piece.start + begin, piece.start + begin + x.numel(), device=x.device)
        row, col = element // piece.pitch, element % piece.pitch
        if piece.pitch > target.cols:
            inside = col < target.cols
            x, row, col = x[inside], row[inside], col[inside]
        tile = target.first_tile + row // NVFP4_BLOCK * target.tiles[1] + col // NVFP4_BLOCK
        yield _Chunk(x, row, col, tile)


class Caster:
    """The stages that read masters.

    Args:
        pieces: of one or many weights, disjoint.
        tiles: of all weights together.
    """

    def __init__(self, pieces: Sequence[Piece], tiles: int) -> None:
        self._pieces, self._tiles = [piece for piece in pieces if piece.values.numel()], tiles

    def amax(self, amaxes: Tensor) -> None:
        """Raise the amaxes of tiles and weights to those of the pieces.

        Args:
            amaxes: fp32 [tiles + slots], changed in place.
        """
        for piece in self._pieces:
            slot = amaxes[self._tiles + piece.target.slot]
            for chunk in _chunks(piece):
                a = chunk.x.abs()
                finite = a.isfinite()
                amaxes.scatter_reduce_(0, chunk.tile, torch.where(finite, a, torch.inf), "amax")
                if a.numel():
                    slot.copy_(torch.maximum(slot, torch.where(finite, a, 0.0).amax()))

    def choose(self, amaxes: Tensor, scales: Tensor) -> None:
        """Choose the scales of whole tile rows of weights with candidates: the other weights stay as they are.

        Args:
            amaxes: fp32 [tiles + slots], complete.
            scales: uint8 [tiles], changed in place.
        """
        for piece in self._pieces:
            target = piece.target
            if not target.spec.tries_candidates:
                continue
            row, x = piece.from_whole_tiles()
            if x.numel():
                chosen = quantize(x.to(target.dtype), target.spec, amax=amaxes[self._tiles + target.slot])
                chosen = chosen.block_scale[::NVFP4_BLOCK].flatten()
                first = target.first_tile + row // NVFP4_BLOCK * target.tiles[1]
                scales[first : first + chosen.numel()] = chosen

    def cast(self, amaxes: Tensor, scales: Tensor) -> None:
        """Write the codes of every piece: its own nibbles and no others.

        Args:
            amaxes: fp32 [tiles + slots], those of slots complete.
            scales: uint8 [tiles], complete where a piece has elements.
        """
        for piece in self._pieces:
            target = piece.target
            factors = tensor_factors(amaxes[self._tiles + target.slot], target.spec)
            row_bytes = target.tiles[1] * NVFP4_BLOCK // 2
            for chunk in _chunks(piece):
                code = scales[chunk.tile]
                poison = code == E4M3_NAN
                scale = torch.where(poison, 0, code).view(torch.float8_e4m3fn).float()
                v = torch.where(poison, 0.0, chunk.x) * encode_scale(scale, factors)
                codes = e2m1_nearest(v)[0].masked_fill(poison, 0)
                byte = chunk.row * row_bytes + chunk.col // 2 - piece.first_byte
                for odd, keep in ((0, 0xF0), (1, 0x0F)):
                    mine = chunk.col % 2 == odd
                    at = byte[mine]
                    piece.codes[at] = (piece.codes[at] & keep) | (codes[mine] << (4 * odd))


class Finisher:
    """The stages that work on whole weights.

    Args:
        targets: the weights.
        tiles: of all weights together.
    """

    def __init__(self, targets: Sequence[CastTarget], tiles: int) -> None:
        self._targets, self._tiles = [target for target in targets if target.tile_count], tiles
        self._all = list(targets)

    def scale(self, amaxes: Tensor, scales: Tensor, expand: bool = False) -> None:
        """Compute the scale of every tile of weights without candidates.

        Args:
            amaxes: fp32 [tiles + slots].
            scales: uint8 [tiles], changed in place.
            expand: also do what `expand` does.
        """
        for target in self._targets:
            if target.spec.tries_candidates:
                continue
            own = slice(target.first_tile, target.first_tile + target.tile_count)
            poison = amaxes[own].isinf()
            factors = tensor_factors(amaxes[self._tiles + target.slot], target.spec)
            codes = scale_bytes(block_scale(torch.where(poison, 0.0, amaxes[own]), factors))
            scales[own] = codes.masked_fill(poison, E4M3_NAN)
        if expand:
            self.expand(amaxes, scales)

    def expand(self, amaxes: Tensor, scales: Tensor) -> None:
        """Give every weight its block scales, one for each row of a tile, and its amax.

        Args:
            amaxes: fp32 [tiles + slots].
            scales: uint8 [tiles].
        """
        for target in self._all:
            target.blocks.amax.copy_(amaxes[self._tiles + target.slot])
            own = scales[target.first_tile : target.first_tile + target.tile_count].view(target.tiles)
            linear = own.repeat_interleave(NVFP4_BLOCK, dim=0)[: target.rows]
            target.blocks.block_scale.copy_(swizzle(linear) if target.swizzled else linear)

    def transpose(self) -> None:
        """Fill the other orientation of every weight that has one."""
        for target in self._targets:
            if target.turned is None:
                continue
            scale = target.blocks.block_scale
            if target.swizzled:
                scale = unswizzle(scale, target.rows, ceil_div(target.cols, NVFP4_BLOCK))
            qdata, scale = transpose(target.blocks.qdata, scale, target.rows, target.cols)
            target.turned.qdata.copy_(qdata)
            target.turned.block_scale.copy_(scale)
