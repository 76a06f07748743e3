"""What the cast of a ZeroOptimizer fills of one parameter: a matrix, or the experts of a weight [E, N, K] one by one.

In a bucket experts lie as one matrix [E * N, K]. Each has an amax of its own, and where N is a multiple of 16 its tiles
are those of that matrix: so it is a weight of its own to the cast, whose elements are a part of the parameter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfbyte.distributed.buckets import Fragment
from halfbyte.distributed.cast import Share
from halfbyte.distributed.partial_cast import cast_target_of
from halfbyte.distributed.plan import BucketPlace
from halfbyte.layout import Blocks
from halfbyte.pieces import CastTarget, Piece
from halfbyte.spec import NVFP4
from halfbyte.tensor.primary import PrimaryWeight


class StoredPart(NamedTuple):
    """A weight of the cast, and which elements of its parameter are its own.

    target: the weight.
    pitch: elements to a row.
    first: its first element, of those of the parameter with padding.
    """

    target: CastTarget
    pitch: int
    first: int

    @property
    def stop(self) -> int:
        """The element behind its last."""
        return self.first + self.target.rows * self.pitch

    def share(self, whole: Share | None) -> Share | None:
        """Return what of it a rank has that has these elements of the parameter; None for none."""
        if whole is None:
            return None
        start, stop = max(whole.start, self.first), min(whole.stop, self.stop)
        return Share(start - self.first, stop - self.first) if start < stop else None

    def piece(self, fragment: Fragment) -> Piece | None:
        """Return the run of its elements in what this rank has of the parameter; None for none."""
        own = self.share(Share(fragment.start, fragment.start + fragment.master.numel()))
        if own is None:
            return None
        begin = self.first + own.start - fragment.start
        values = fragment.master.detach()[begin : begin + own.stop - own.start]
        return Piece(self.target, values, own.start, self.pitch, self.target.blocks.qdata.view(-1))


def stored_parts(weight: PrimaryWeight, place: BucketPlace, first_tile: int, slots: dict[int, int]) -> list[StoredPart]:
    """Return what the cast fills of a parameter.

    Args:
        weight: [N, K], or [E, N, K] of experts.
        place: where it lies.
        first_tile: of its bucket.
        slots: of amaxes, by their addresses; filled as they are met.
    """

    def slot_of(blocks: Blocks) -> int:
        return slots.setdefault(blocks.amax.data_ptr(), len(slots))

    first_tile += place.first_tile
    if weight.dim() == 2:
        target = cast_target_of(weight, first_tile, slot_of(weight.blocks), turned=weight.allocate_turned())
        return [StoredPart(target, place.pitch, 0)]
    spec = weight.spec
    assert isinstance(spec, NVFP4), "only NVFP4 is cast from masters"
    experts, rows, cols = weight.shape
    found: list[StoredPart] = []
    for own in _matrices(weight.blocks, experts):
        target = CastTarget(rows, cols, spec, weight.dtype, own, False, first_tile, slot_of(own))
        found.append(StoredPart(target, place.pitch, len(found) * rows * place.pitch))
        first_tile += target.tile_count
    return found


def _matrices(blocks: Blocks, experts: int) -> Sequence[Blocks]:
    codes, scales = (t.unflatten(0, (experts, -1)) for t in blocks[:2])
    return [Blocks(*one) for one in zip(codes, scales, blocks.amax, strict=True)]
