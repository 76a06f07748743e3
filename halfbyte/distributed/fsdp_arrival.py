"""The weights that one all-gather of FSDP2 brings as NVFP4: their messages, their memory, and what is made on arrival.

The first of them sends and receives for all, since FSDP2 takes the host longer for each of its parameters and messages
than the GPU for the bytes. Codes arrive as the operand of forward. Scales arrive one for a tile, in one message, and
one gather of rows writes them beside the codes, one for each row. The operand of backward, the other orientation of all
tiles, is made by one launch when the first layer asks for it: a forward after which FSDP2 frees the weights never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import Blocks, round_up
from halfbyte.ops.primary import turner
from halfbyte.pieces import CastTarget

if TYPE_CHECKING:
    from halfbyte.distributed.fsdp_weight import GatheredWeight, RowShards

preserve_versions: Any = torch.autograd._unsafe_preserve_version_counter
ALIGNMENT = 16
"""Of what kernels read by words."""

Orders = dict[tuple, Tensor]
"""Where scales lie in the messages of all ranks, by the shapes of the weights: equal blocks of a model share one."""


class ScaleRoom(NamedTuple):
    """How the scales of tiles of several weights lie in a message and where they arrive, in units of `width` bytes.

    width: the greatest that divides every weight's row of scales.
    sent: the first unit of each weight in a message, then their number.
    arrived: the same of the rows that arrive, each weight's start aligned.
    """

    width: int
    sent: tuple[int, ...]
    arrived: tuple[int, ...]

    @classmethod
    def of(cls, shards: Sequence[RowShards]) -> ScaleRoom:
        """Return that of weights in tiles, whose rows are split so."""
        width = gcd(*(own.tiles[1] for own in shards))
        step = ALIGNMENT // gcd(ALIGNMENT, width)
        units = [own.tiles[1] // width for own in shards]
        sent = [own.sent_tile_rows * unit for own, unit in zip(shards, units, strict=True)]
        arrived = [round_up(own.rows * unit, step) for own, unit in zip(shards, units, strict=True)]
        return cls(width, tuple(accumulate(sent, initial=0)), tuple(accumulate(arrived, initial=0)))

    def order(self, shards: Sequence[RowShards]) -> Tensor:
        """Return int32 or int64 [units that arrive]: which unit of all ranks' messages each is; of padding, any."""
        parts = []
        for own, sent, start, stop in zip(shards, self.sent, self.arrived, self.arrived[1:], strict=False):
            unit = own.tiles[1] // self.width
            # Tile rows of all ranks, one after another, are numbered as if every rank sent nothing else.
            tile = torch.tensor(own.order(), dtype=torch.int64)
            first = tile // own.sent_tile_rows * self.sent[-1] + sent + tile % own.sent_tile_rows * unit
            order = (first.view(-1, 1) + torch.arange(unit)).flatten()
            parts.append(torch.nn.functional.pad(order, (0, stop - start - order.numel())))
        order = torch.cat(parts)
        is_small = shards[0].world * self.sent[-1] < 1 << 31
        return order.to(torch.int32) if is_small else order


class Words(NamedTuple):
    """Scales as they were received, and in the widest words that they fill, as they lie there and as they arrive."""

    received: Tensor
    sent: Tensor
    arrived: Tensor


class Arrival:
    """What arrives together.

    Args:
        weights: in the order of FSDP2's group; of one group of ranks and on one device.
        orders: those of the whole model.
    """

    def __init__(self, weights: Sequence[GatheredWeight], orders: Orders) -> None:
        self.weights, self.leader = list(weights), weights[0]
        self._tiles = [weight for weight in weights if weight.spec.is_tile]
        self._rows = [weight for weight in weights if not weight.spec.is_tile]
        self._is_alone = weights[0].shards.world == 1
        shards = [weight.shards for weight in self._tiles]
        self._room = ScaleRoom.of(shards) if shards else None
        self._orders = orders
        self._sent = self._received = self._scales = self._turned = torch.empty(0)
        self._order = torch.empty(0)
        self._outputs: tuple[Tensor, ...] = ()
        self._words: Words | None = None
        self._inner: list[Tensor] = []
        self._copies: dict[GatheredWeight, Tensor] = {}
        self._turned_blocks: list[Blocks] = []
        self._is_turned = False
        self._turner: Any = None
        for weight in weights:
            weight.arrival = self

    # What is sent

    def scale_room(self, weight: GatheredWeight, device: torch.device) -> Tensor:
        """Return memory for the scales that a weight sends, uint8 [tile rows, tile columns], zeros where none are."""
        shape = weight.shards.sent_tile_rows, weight.shards.tiles[1]
        if not weight.spec.is_tile:
            return torch.zeros(shape, dtype=torch.uint8, device=device)
        assert self._room is not None, "there are tiles"
        if self._sent.device != device or not self._sent.numel():
            self._sent = torch.zeros(self._room.sent[-1], self._room.width, dtype=torch.uint8, device=device)
        first, stop = (self._room.sent[self._tiles.index(weight) + i] for i in (0, 1))
        return self._sent[first:stop].view(shape)

    def message(self, weight: GatheredWeight) -> tuple[Tensor, ...]:
        """Return what FSDP2 sends of a weight: of the first what all send, of others nothing.

        Of one rank alone FSDP2 copies the first tensor of each.
        """
        if self._is_alone:
            self._prepare_to_send([weight])
            return (weight.codes,)
        if weight is not self.leader:
            return ()
        self._prepare_to_send(self.weights)
        codes = [one.codes for one in self.weights]
        scales = [one.scales for one in self._rows]
        return (*codes, *scales, self._sent) if self._tiles else (*codes, *scales)

    def _prepare_to_send(self, weights: Sequence[GatheredWeight]) -> None:
        for weight in weights:
            weight.before_sending()
        if self._is_turned:  # FSDP2 allocates what is in there as soon as the messages have come
            self._inner.pop()
            self._is_turned = False
        for kind in (self._tiles, self._rows):  # each is cast at once
            if kind and kind[0].ready is not None:
                torch.cuda.current_stream(kind[0].codes.device).wait_event(kind[0].ready)

    # What arrives

    def receive(self, weight: GatheredWeight, outputs: tuple[Tensor, ...], *, is_first: bool) -> Any:
        """Complete what has come; at first return the weight and the tensors that FSDP2 frees and allocates.

        Args:
            outputs: uint8 [world * chunk, …] of each message, memory that stays FSDP2's.
        """
        if weight is self.leader:
            if is_first:
                self._outputs = outputs
                self._allocate(outputs[0].device)
            assert outputs[0].data_ptr() == self._outputs[0].data_ptr(), "FSDP2 keeps its memory"
            self._complete()
        own = self._inner if weight is self.leader else []
        if self._is_alone and not weight.spec.is_tile:  # what is sent is the memory of a cast, that may move
            if is_first:
                self._copies[weight] = torch.empty_like(weight.scales)
                own.append(self._copies[weight])
            with preserve_versions((self._copies[weight],)):
                self._copies[weight].copy_(weight.scales)
        return (self._weight_of(weight, outputs), own) if is_first else None

    def _allocate(self, device: torch.device) -> None:
        """Make the memory of scales and of the other orientation, and find where scales come from."""
        if self._room is None:
            return
        shards = [weight.shards for weight in self._tiles]
        key = tuple(shards), device
        if key not in self._orders:
            self._orders[key] = self._room.order(shards).to(device)
        self._order = self._orders[key]
        empty = {"dtype": torch.uint8, "device": device}
        self._scales = torch.empty(self._room.arrived[-1], self._room.width, **empty)
        self._turned = torch.empty(sum(sum(_turned_sizes(own)) for own in shards), **empty)
        self._turned_blocks = [self._turned_of(i, weight) for i, weight in enumerate(self._tiles)]
        self._turned.untyped_storage().resize_(0)
        self._inner = [self._scales]

    def _complete(self) -> None:
        """Write the scales of all rows."""
        if not self._tiles:
            return
        received = self._sent if self._is_alone else self._outputs[-1]
        if self._words is None or self._words.received is not received:
            word = next(dtype for size, dtype in _WORDS if received.shape[1] % size == 0)
            self._words = Words(received, received.view(word), self._scales.view(word))
        with preserve_versions((self._scales,)):  # autograd saved them in forward: the bytes are the same
            torch.index_select(self._words.sent, 0, self._order, out=self._words.arrived)

    @torch.no_grad()
    def _weight_of(self, weight: GatheredWeight, outputs: tuple[Tensor, ...]) -> Tensor:
        shards, at = weight.shards, self.weights.index(weight)
        codes = outputs[0] if self._is_alone else self._outputs[at]
        if not weight.spec.is_tile:
            # Messages are rows in their order.
            at = len(self.weights) + self._rows.index(weight)
            scales = self._copies[weight] if self._is_alone else self._outputs[at]
            return weight.arrive(codes[: shards.rows], scales[: shards.rows], None, None)
        index = self._tiles.index(weight)
        assert self._room is not None, "there are tiles"
        first, stop = (self._room.arrived[index + i] * self._room.width for i in (0, 1))
        own = self._scales.view(-1)[first:stop][: shards.rows * shards.tiles[1]]
        scales = own.view(shards.rows, shards.tiles[1])
        return weight.arrive(codes[: shards.rows], scales, self._turned_blocks[index], self.turn)

    def _turned_of(self, index: int, weight: GatheredWeight) -> Blocks:
        first = sum(sum(_turned_sizes(one.shards)) for one in self._tiles[:index])
        (tile_rows, _), cols = weight.shards.tiles, weight.shards.cols
        second, width = first + _turned_sizes(weight.shards)[0], tile_rows * NVFP4_BLOCK // 2
        codes = self._turned[first : first + cols * width].view(cols, width)
        return Blocks(codes, self._turned[second : second + cols * tile_rows].view(cols, tile_rows), weight.amax)

    def turn(self) -> None:
        """Make the other orientation of all tiles, unless it is there.

        Raises:
            RuntimeError: FSDP2 has freed the weights.
        """
        if not self._is_turned:
            self.fill_turned()

    @torch.no_grad()
    def fill_turned(self) -> None:
        """Make the other orientation of all tiles."""
        if not self._scales.untyped_storage().size():
            raise RuntimeError(
                f"{self.leader.name} was freed by FSDP2 before the backward read it: call the backward through the "
                "module that fully_shard wrapped, or unshard() it before"
            )
        if self._turner is None:
            self._turner = turner([_target(one) for one in self._tiles], self._scales.device)
        self._turned.untyped_storage().resize_(self._turned.numel())
        self._inner.append(self._turned)  # FSDP2 frees it with the weights
        with preserve_versions((self._turned,)):
            self._turner.transpose()
        self._is_turned = True


_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def _turned_sizes(shards: RowShards) -> tuple[int, int]:
    """Return the bytes of codes and scales of the other orientation, each aligned."""
    count = shards.cols * shards.tiles[0]
    return round_up(count * NVFP4_BLOCK // 2, ALIGNMENT), round_up(count, ALIGNMENT)


def _target(weight: GatheredWeight) -> CastTarget:
    """Return a weight as what turns it sees it."""
    arrived = weight.arrived
    assert arrived is not None and arrived.turned is not None, "it has come"
    rows, cols = arrived.shape
    return CastTarget(rows, cols, weight.spec, arrived.dtype, arrived.blocks, False, 0, 0, arrived.turned)
