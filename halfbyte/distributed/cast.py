"""The cast of a list of weights from pieces of their masters: its stages and what ranks exchange between them.

1. Every rank finds the amaxes of its pieces; one all-reduce (maximum) completes them. Two elements that share a byte
   and lie on different ranks travel in the same message, so that each of the two writes the whole byte.
2. With candidate scales, a tile is judged by one who has all of its elements: tile rows within one piece by their rank,
   tile rows that a border cuts by every rank, after one all-reduce (sum) in which each contributes its elements.
3. Every rank writes the codes of its pieces.

A word of the first message says whether some rank came with other shares than those that the messages were made for: it
takes part in them (`decline`), since the others cannot know, and all of them start again with a cast that fits.

Buffers and tables are made once; a run launches a fixed number of kernels, and waits for the device only to read that
word, with the kernels that follow already launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed.agree import WeakGroup
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.ops.primary import primary_stages
from halfbyte.pieces import CastTarget, Piece, cut_tile_rows


class Share(NamedTuple):
    """What one rank has of one weight: element numbers start to stop - 1."""

    start: int
    stop: int


class CastLayout(NamedTuple):
    """The weights of a cast and who has what of them, the same on every rank.

    targets: this rank's weights; pitches: element numbers to a row of each.
    shares: for each weight, the share of every rank; None where a rank has nothing.
    slots: how many amaxes the weights have.
    """

    targets: Sequence[CastTarget]
    pitches: Sequence[int]
    shares: Sequence[Sequence[Share | None]]
    slots: int

    @property
    def tiles(self) -> int:
        return sum(target.tile_count for target in self.targets)

    def borders(self, index: int) -> list[int]:
        """Return the element numbers where a share of weight `index` starts or ends."""
        return sorted({border for share in self.shares[index] if share is not None for border in share})


class Cast:
    """A prepared cast.

    Args:
        layout: of the weights.
        pieces: this rank's, at most one for each weight.
        group: the ranks of the shares; None for one process alone.
        local_scales: True leaves every rank the scales of the tiles that it has elements of, and only those: the caller
            gathers the others. False completes the scales of all weights on every rank.
        device: of everything.
        backend: None chooses one.
    """

    def __init__(
        self,
        layout: CastLayout,
        pieces: Sequence[Piece],
        group: dist.ProcessGroup | None,
        *,
        local_scales: bool,
        device: torch.device,
        backend: str | None = None,
    ) -> None:
        self._ranks, self._layout = WeakGroup.of(group), layout
        self.is_alone = group is None
        self._expands = not local_scales
        tiles = layout.tiles
        halves = [] if self.is_alone else _cut_bytes(layout)
        count = tiles + layout.slots
        self._maxima = torch.zeros(count + 2 * len(halves) + 1, dtype=torch.float32, device=device)
        self.amaxes = self._maxima[:count]
        self._halves = self._maxima[count:-1]
        self._declined = None if self.is_alone or local_scales else Word(self._maxima[-1:])
        self._half_copies = _half_copies(layout, pieces, halves, self._halves)
        stripes = [] if self.is_alone else _cut_stripes(layout)
        words = -(-tiles // 4) * 4
        sizes = [_stripe_size(layout, *stripe) for stripe in stripes]
        self._message = torch.zeros(words // 4 + sum(sizes), dtype=torch.int32, device=device)
        self.scales = self._message[: words // 4].view(torch.uint8)[:tiles]
        self._elements = self._message[words // 4 :].view(torch.float32)
        stripe_pieces = _stripe_pieces(layout, stripes, self._elements)
        self._stripe_copies = _stripe_copies(pieces, stripe_pieces)
        self._chooses = any(target.spec.tries_candidates for target in layout.targets)
        self._sent = self._elements if local_scales else self._message
        self._index = _shared_amaxes(layout, device) if local_scales and not self.is_alone else None
        make = primary_stages
        self._caster, self.finisher = make(pieces, layout.targets, tiles, device, backend)
        edges = _edge_pieces(layout, pieces, halves, self._halves)
        self._edge_caster = make(edges, (), tiles, device, backend)[0] if edges else None
        self._stripe_caster = make(stripe_pieces, (), tiles, device, backend)[0] if stripe_pieces else None

    def run(self) -> bool:
        """Complete amaxes and scales and write the codes of this rank's pieces; without local_scales, expand them.

        Returns:
            Whether all ranks ran it. If one declined, what was written is void, if anything was.
        """
        self.agree()
        if self._declined is not None and self._declined.is_on_host and self._declined.is_set():
            return False
        self.scale()
        self.write()
        return self._declined is None or not self._declined.is_set()

    def decline(self) -> None:
        """Take part in the messages of the others' `run` and tell them that it is void."""
        assert self._declined is not None, "nobody waits"
        self._maxima.zero_()
        self._declined.set()
        dist.all_reduce(self._maxima, dist.ReduceOp.MAX, group=self._ranks.group)
        if self._chooses and self._sent.numel():
            self._message.zero_()
            dist.all_reduce(self._sent.view(torch.int32), group=self._ranks.group)

    def agree(self) -> None:
        """First part of `run`: everything that ranks tell each other."""
        self._maxima.zero_()
        self._caster.amax(self.amaxes)
        self._reduce_amaxes()
        if self._chooses:
            self._choose()

    def scale(self) -> None:
        """Second part of `run`: scales."""
        self.finisher.scale(self.amaxes, self.scales, expand=self._expands)

    def write(self) -> None:
        """Third part of `run`: codes."""
        self._caster.cast(self.amaxes, self.scales)
        if self._edge_caster is not None:
            self._edge_caster.cast(self.amaxes, self.scales)

    def _reduce_amaxes(self) -> None:
        if self.is_alone:
            return
        if self._half_copies[0]:
            self._halves.fill_(-torch.inf)
            torch._foreach_copy_(*self._half_copies)
        elif self._halves.numel():
            self._halves.fill_(-torch.inf)
        if self._index is None:
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX, group=self._ranks.group)
            if self._declined is not None:
                self._declined.read()
        else:
            part = self.amaxes.index_select(0, self._index)
            dist.all_reduce(part, dist.ReduceOp.MAX, group=self._ranks.group)
            self.amaxes.index_copy_(0, self._index, part)

    def _choose(self) -> None:
        self._message.zero_()
        self._caster.choose(self.amaxes, self.scales)
        if self.is_alone:
            return
        if self._stripe_copies[0]:
            torch._foreach_copy_(*self._stripe_copies)
        if self._sent.numel():
            # Each word has one contributor and zeros from the others: the sum is exact, NaN and all.
            dist.all_reduce(self._sent.view(torch.int32), group=self._ranks.group)
        if self._stripe_caster is not None:
            self._stripe_caster.choose(self.amaxes, self.scales)


class Word:
    """A word of a message that the host reads: of a GPU's memory once the message has come, while kernels go on.

    Args:
        value: fp32 [1].
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._event: torch.cuda.Event | None = None
        options = {"dtype": torch.float32, "device": "cpu", "pin_memory": True}
        self._on_host = torch.zeros(1, **options) if value.is_cuda else value

    def set(self) -> None:
        """Let the word be 1."""
        self._value.fill_(1)

    def read(self) -> None:
        """Start to read; within the capture of a CUDA graph nothing is read, and nothing changes in its replays."""
        self._event = None
        if self._value.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._on_host.copy_(self._value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._value.device))

    @property
    def is_on_host(self) -> bool:
        """Whether the host reads it without waiting for a device."""
        return not self._value.is_cuda

    def is_set(self) -> bool:
        """Wait for what `read` has started, and return whether the word was set."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._on_host.item()) and (self.is_on_host or self._event is not None)


class _Half(NamedTuple):
    """Two elements of one byte on different ranks; `element` is the even column's."""

    weight: int
    element: int


def _cut_bytes(layout: CastLayout) -> list[_Half]:
    halves = []
    for index, (target, pitch) in enumerate(zip(layout.targets, layout.pitches, strict=True)):
        for border in layout.borders(index):
            col = border % pitch
            if col % 2 and col < target.cols and border < target.rows * pitch:
                halves.append(_Half(index, border - 1))
    return halves


def _half_copies(
    layout: CastLayout, pieces: Sequence[Piece], halves: list[_Half], buffer: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return where this rank's elements of cut bytes go in the message, and where they come from."""
    own = {id(piece.target): piece for piece in pieces}
    to, from_ = [], []
    for i, half in enumerate(halves):
        piece = own.get(id(layout.targets[half.weight]))
        for odd in (0, 1):
            at = half.element + odd
            if piece is not None and piece.start <= at < piece.stop:
                to.append(buffer[2 * i + odd : 2 * i + odd + 1])
                from_.append(piece.values[at - piece.start : at - piece.start + 1])
    return to, from_


def _edge_pieces(layout: CastLayout, pieces: Sequence[Piece], halves: list[_Half], buffer: Tensor) -> list[Piece]:
    """Return one piece of two elements for every cut byte that this rank has a half of."""
    own = {id(piece.target): piece for piece in pieces}
    out = []
    for i, half in enumerate(halves):
        piece = own.get(id(layout.targets[half.weight]))
        if piece is not None and piece.start <= half.element + 1 and piece.stop > half.element:
            out.append(piece._replace(values=buffer[2 * i : 2 * i + 2], start=half.element))
    return out


def _cut_stripes(layout: CastLayout) -> list[tuple[int, int]]:
    """Return (weight, row of tiles) of everything that candidates need and a border cuts."""
    return [
        (index, row)
        for index, target in enumerate(layout.targets)
        if target.spec.tries_candidates
        for row in cut_tile_rows(layout.pitches[index], target.rows, layout.borders(index))
    ]


def _stripe_size(layout: CastLayout, index: int, row: int) -> int:
    rows = min(NVFP4_BLOCK, layout.targets[index].rows - row * NVFP4_BLOCK)
    return rows * layout.pitches[index]


def _stripe_pieces(layout: CastLayout, stripes: list[tuple[int, int]], buffer: Tensor) -> list[Piece]:
    out, begin = [], 0
    for index, row in stripes:
        size, target, pitch = _stripe_size(layout, index, row), layout.targets[index], layout.pitches[index]
        codes = target.blocks.qdata.view(-1)
        out.append(Piece(target, buffer[begin : begin + size], row * NVFP4_BLOCK * pitch, pitch, codes))
        begin += size
    return out


def _stripe_copies(pieces: Sequence[Piece], stripes: Sequence[Piece]) -> tuple[list[Tensor], list[Tensor]]:
    own = {id(piece.target): piece for piece in pieces}
    to, from_ = [], []
    for stripe in stripes:
        piece = own.get(id(stripe.target))
        if piece is None:
            continue
        start, stop = max(piece.start, stripe.start), min(piece.stop, stripe.stop)
        if start < stop:
            to.append(stripe.values[start - stripe.start : stop - stripe.start])
            from_.append(piece.values[start - piece.start : stop - piece.start])
    return to, from_


def _shared_amaxes(layout: CastLayout, device: torch.device) -> Tensor:
    """Return where in `amaxes` no rank alone knows the maximum: tiles that a border cuts, and all slots."""
    places: list[int] = []
    for index, target in enumerate(layout.targets):
        cols = target.tiles[1]
        for row in cut_tile_rows(layout.pitches[index], target.rows, layout.borders(index)):
            first = target.first_tile + row * cols
            places.extend(range(first, first + cols))
    places.extend(range(layout.tiles, layout.tiles + layout.slots))
    return torch.tensor(places, dtype=torch.int64, device=device)
