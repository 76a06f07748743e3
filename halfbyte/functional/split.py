"""Linear layers whose tensors lie in parts on several ranks: every operand has the bytes of the whole one.

A rank holds a part of one of the three dimensions M, N, K and all of the two others. Of the three GEMMs, that which
sums over the dimension in parts gives partial sums; the other two give parts of their result. What a part has to know
of the others is little:

- the amax of a tensor is the greatest of its parts': one all-reduce of one number (of one per row where rows are in
  parts and have an amax each);
- random bits are drawn at the place of the element in the whole operand, so a part says where it begins;
- blocks, tiles and rotations must not cross borders. Where they do, the tensor is gathered whole, quantized, and cut
  again: rows as the ranks hold them, the dimension of the sum at the next whole block, for both operands alike.

Shape suffixes: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.functional.group import all_max, gathered
from halfbyte.functional.operands import Place, both
from halfbyte.layout import Blocks, ceil_div, round_up
from halfbyte.ops.backends import warn_once
from halfbyte.rng import Draw
from halfbyte.sides import Side, share_tiles
from halfbyte.spec import Recipe, Spec

NAMES = {"M": "tokens", "N": "out_features", "K": "in_features"}


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """How the ranks of a group share one linear layer.

    dim: "M", "N" or "K": the dimension that lies in parts.
    borders: rank r of the group holds it from borders[r] to borders[r + 1].
    cuts: likewise, what rank r adds up in the GEMM that sums over it: the borders, moved to whole blocks.
    rank, group: of this process, and the name of the process group.
    """

    dim: str
    borders: tuple[int, ...]
    cuts: tuple[int, ...]
    rank: int
    group: str

    @staticmethod
    def of(dim: str, borders: tuple[int, ...], rank: int, group: str, recipe: Recipe) -> LayerSplit:
        """Return how ranks with these borders share a layer of `recipe`."""
        block = summed_block(recipe, dim)
        cuts = tuple([min(round_up(border, block), borders[-1]) for border in borders])
        return LayerSplit(dim=dim, borders=borders, cuts=cuts, rank=rank, group=group)


def summed_block(recipe: Recipe, dim: str) -> int:
    """Return how many values along `dim` the GEMM that sums over it scales or rotates together; 1 in high precision."""
    gemm = {"M": recipe.wgrad, "N": recipe.dgrad, "K": recipe.fprop}[dim]
    specs = () if gemm is None else (gemm.a, gemm.b)
    return max([1, *[spec.alignment for spec in specs if spec is not None]])


class Part(NamedTuple):
    """A matrix of which ranks hold parts of rows (axis 0) or columns (axis 1), by `held`."""

    split: LayerSplit
    axis: int
    held: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, int]:
        return self.held[self.split.rank], self.held[self.split.rank + 1]

    def is_summed(self, side: int) -> bool:
        """Whether the row (0) or column (1) operand is summed over what lies in parts."""
        return self.axis != side

    def wanted(self, side: int) -> tuple[int, ...]:
        """Return in which parts a GEMM reads an operand."""
        return self.split.cuts if self.is_summed(side) else self.split.borders

    def is_local(self, side: int, spec: Spec | None) -> bool:
        """Whether an operand can be made of the part that is here."""
        if self.held != self.wanted(side):
            return False
        is_cut = spec is not None and spec.is_tile and not self.is_summed(side)
        return not is_cut or all(border % NVFP4_BLOCK == 0 for border in self.held[:-1])


Make = Callable[..., tuple[Any, Any]]
"""How a tensor becomes operands: `operands.both` or what has its head."""


def maker(split: LayerSplit | None, letters: str, moved: bool = False) -> Make:
    """Return what makes both operands of a tensor.

    Args:
        split: of the layer, None for whole tensors.
        letters: "MK" of x, "NK" of w, "MN" of dy.
        moved: whether the tensor has the parts of an operand, not those in which the ranks hold it.
    """
    if split is None or split.dim not in letters:
        return both
    held = split.cuts if moved else split.borders
    return partial(_both_of_part, Part(split, letters.index(split.dim), held))


def _both_of_part(
    part: Part, t: Tensor, row_spec: Spec | None, col_spec: Spec | None, place: Place, amaxes: ops.Amaxes
) -> tuple[ops.Operand | Tensor, ops.Operand | Tensor]:
    """Return t and t.mT as GEMM operands with the bytes that they have as parts of the whole operands."""
    if part.is_local(0, row_spec) and part.is_local(1, col_spec):
        return both(t, row_spec, col_spec, place, amaxes, partial(quantize_share, part))
    report(part, row_spec, col_spec)
    whole = gathered(t, part.axis, part.held, part.split.group)
    made = both(whole, row_spec, col_spec, place, amaxes)
    row, col = (cut(operand, part, side) for side, operand in enumerate(made))
    return row, col


def report(part: Part, row_spec: Spec | None, col_spec: Spec | None) -> None:
    """Warn, once for such a part, that it cuts blocks."""
    if torch.compiler.is_compiling():
        return
    block = max([NVFP4_BLOCK, *[spec.alignment for spec in (row_spec, col_spec) if spec is not None]])
    what, held = NAMES[part.split.dim], part.held
    warn_once(
        f"{held[-1]} {what} in parts at {', '.join(map(str, held[1:-1]))} cut blocks of {block} values: such tensors "
        f"are gathered whole before they are quantized, which is exact and slower; give each rank a multiple of {block}"
    )


def quantize_share(part: Part, t: Tensor, row: Side | None, col: Side | None) -> tuple[Blocks | None, Blocks | None]:
    """Quantize the part of a matrix that is here, whose borders cut no block."""
    row, col = with_whole_amaxes(part, t, row, col)
    draws = [side is not None and side.spec.needs_rng for side in (row, col)]
    if not any(draws):
        return ops.quantize_row_col(t, row, col)
    if row is not None and col is not None and share_tiles(row.spec, col.spec):
        tiles, _ = ops.quantize_row_col(t, _placed(part, t, 0, row._replace(transient=False)), None)
        assert tiles is not None, "a row was asked for"
        return tiles, Blocks(*ops.transpose(tiles.qdata, tiles.block_scale, t.shape[0], t.shape[1]), tiles.amax)
    of_row = of_col = None
    if row is not None:
        of_row, _ = ops.quantize_row_col(t, _placed(part, t, 0, row), None)
    if col is not None:
        of_col, _ = ops.quantize_row_col(t.mT, _placed(part, t, 1, col), None)
    return of_row, of_col


def with_whole_amaxes(part: Part, t: Tensor, row: Side | None, col: Side | None) -> tuple[Side | None, Side | None]:
    """Return what is asked for with the amaxes of the whole operands, where other parts have a say in them."""
    specs: list[Spec | None] = [None, None]
    for i, side in enumerate((row, col)):
        if side is not None and side.amax is None and side.spec.format.has_amax:
            specs[i] = side.spec if side.spec.has_tensor_amax or part.is_summed(i) else None
    if share_tiles(*specs):
        specs[1] = None
    if specs == [None, None]:
        return row, col
    sign_draw = next((side.sign_draw for side in (row, col) if side is not None and side.sign_draw is not None), None)
    own = ops.row_col_amax(t, specs[0], specs[1], sign_draw)
    found = all_max(torch.cat([amax.reshape(-1) for amax in own]), part.split.group)
    sizes = [amax.numel() for amax in own]
    amaxes = [one.view(amax.shape) for one, amax in zip(found.split(sizes), own, strict=True)]
    made = [
        side if side is None or spec is None else side._replace(amax=amax)
        for side, spec, amax in zip((row, col), specs, amaxes, strict=True)
    ]
    return made[0], made[1]


def _placed(part: Part, t: Tensor, side: int, asked: Side) -> Side:
    """Return what is asked for, drawing where the part lies in the whole operand (docs/numerics.md section 4)."""
    draw, spec = asked.draw, asked.spec
    if draw is None or not spec.needs_rng:
        return asked
    return asked._replace(draw=_shard_draw(part, draw, side, spec, t.shape[1 - side]))


def _shard_draw(part: Part, draw: Draw, side: int, spec: Spec, summed: int) -> Draw:
    start, _ = part.bounds
    if part.is_summed(side):
        blocks = ceil_div(round_up(part.held[-1], spec.alignment), NVFP4_BLOCK)
        return draw._replace(first_block=start // NVFP4_BLOCK, blocks_per_row=blocks)
    return draw._replace(first_block=start * ceil_div(round_up(summed, spec.alignment), NVFP4_BLOCK))


def cut(operand: ops.Operand | Tensor, part: Part, side: int) -> ops.Operand | Tensor:
    """Return this rank's part of a whole operand of a matrix, or of one matrix per expert, as its GEMM reads it."""
    start, stop = part.wanted(side)[part.split.rank : part.split.rank + 2]
    if not isinstance(operand, ops.Operand):
        return operand.narrow(-1 if part.is_summed(side) else -2, start, stop - start)
    blocks, spec, cols, scale_layout = operand
    if not part.is_summed(side):
        has_rows = spec.format.has_amax and spec.has_row_amax and blocks.amax.numel() > 0
        amax = blocks.amax[..., start:stop].contiguous() if has_rows else blocks.amax
        scale = blocks.block_scale[..., start:stop, :] if blocks.block_scale.numel() else blocks.block_scale
        return ops.Operand(Blocks(blocks.qdata[..., start:stop, :], scale, amax), spec, cols, scale_layout)
    padded = round_up(cols, spec.alignment)
    start, stop = (start, stop) if start < stop else (0, 0)

    def columns(stored: Tensor) -> Tensor:
        if not stored.numel():
            return stored
        each = padded // stored.shape[-1] if stored.shape[-1] <= padded else 1
        end = stored.shape[-1] if start < stop == cols else stop // each  # the last part has the padding
        return stored[..., start // each : end].contiguous()

    bytes_ = Blocks(columns(blocks.qdata), columns(blocks.block_scale), blocks.amax)
    return ops.Operand(bytes_, spec, stop - start, scale_layout)


@lru_cache(maxsize=1024)
def chunks(size: int, world: int, times: int = 1) -> tuple[int, ...]:
    """Return the borders of the parts in which torch.distributed.tensor shards a dimension, each `times` larger."""
    each = ceil_div(size, world)
    return tuple([min(rank * each, size) * times for rank in range(world)] + [size * times])
