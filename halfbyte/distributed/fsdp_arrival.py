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

from halfbyte.distributed.fsdp_phase import BACKWARD, EVERYTHING, FORWARD, Phase
from halfbyte.distributed.scales import all_gather
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.layout import Blocks, round_up
from halfbyte.ops.primary import turner
from halfbyte.pieces import CastTarget

if TYPE_CHECKING:
    from halfbyte.distributed.fsdp_shards import RowShards
    from halfbyte.distributed.fsdp_weight import GatheredWeight

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


class Message(NamedTuple):
    """What FSDP2 sends in one message.

    weight: whose it is; None for the scales of all weights in tiles.
    what: "codes" or "scales" of its rows; "column codes", "column scales" or "values" for a backward that reads these.
    """

    weight: GatheredWeight | None
    what: str


class Arrival:
    """What arrives together.

    Args:
        weights: in the order of FSDP2's group; of one group of ranks and on one device.
        orders: those of the whole model.
        phase: when FSDP2 gathers them, and for what.
    """

    def __init__(self, weights: Sequence[GatheredWeight], orders: Orders, phase: Phase) -> None:
        self.weights, self.leader = list(weights), weights[0]
        self._tiles = [weight for weight in weights if weight.is_tiled]
        self._apart = [weight for weight in weights if not weight.reading.is_one]
        self._phase = phase
        self._is_alone = weights[0].shards.world == 1
        self._is_split = bool(self._apart) and phase.is_known and not self._is_alone
        shards = [weight.shards for weight in self._tiles]
        self._room = ScaleRoom.of(shards) if shards else None
        self._orders = orders
        self._sent = self._scales = self._turned = torch.empty(0, dtype=torch.float32)
        self._order = torch.empty(0, dtype=torch.float32)
        self._messages: dict[Message, Tensor] = {}
        self._joined: dict[Message, Tensor] = {}
        self._known_parts: dict[frozenset[str], tuple[Message, ...]] = {}
        self._held = self._wanted = EVERYTHING
        self._words: Words | None = None
        self._inner: list[Tensor] = []
        self._turned_blocks: list[Blocks] = []
        self._is_turned = False
        self._turner: Any = None
        for weight in weights:
            weight.arrival = self

    # What is sent

    def scale_room(self, weight: GatheredWeight, device: torch.device) -> Tensor:
        """Return memory for the scales that a weight sends, uint8 [tile rows, tile columns], zeros where none are."""
        shape = weight.shards.sent_tile_rows, weight.shards.tiles[1]
        if not weight.is_tiled:
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
        if weight is self.leader:
            self._wanted = self._phase.wanted() if self._apart else EVERYTHING
            self._held = EVERYTHING if self._is_alone else self._wanted
        if self._is_alone:
            self._prepare_to_send([weight])
            return (weight.codes,)
        if weight is not self.leader:
            return ()
        self._prepare_to_send(self.weights)
        parts = self._parts(self._held)
        messages = tuple([self._of(part) for part in parts])
        if self._is_split:
            self._phase.receive_into([self._memory(part).view(-1) for part in parts])
            self._inner[:] = [*self._always(), *self._joined_now()]
        return messages

    def _parts(self, wanted: frozenset[str]) -> tuple[Message, ...]:
        """Return what is sent where `wanted` is needed: by the forward, by the backward."""
        if wanted not in self._known_parts:
            self._known_parts[wanted] = self._parts_for(wanted)
        return self._known_parts[wanted]

    def _parts_for(self, wanted: frozenset[str]) -> tuple[Message, ...]:
        own = [weight for weight in self.weights if weight.reading.is_one or FORWARD in wanted]
        parts = [Message(weight, "codes") for weight in own]
        parts += [Message(weight, what) for weight in own for what in weight.forward_parts[1:]]
        for weight in self._apart if BACKWARD in wanted else ():
            parts += [Message(weight, what) for what in weight.backward_parts]
        return (*parts, *([Message(None, "scales")] if self._tiles else []))

    def _of(self, part: Message) -> Tensor:
        return self._sent if part.weight is None else part.weight.part(part.what)

    def _prepare_to_send(self, weights: Sequence[GatheredWeight]) -> None:
        for weight in weights:
            weight.before_sending(self._wanted)
        if self._is_turned:  # FSDP2 allocates what is in there as soon as the messages have come
            self._inner.pop()
            self._is_turned = False
        for weight in {id(weight.ready): weight for weight in self.weights}.values():  # each kind is cast at once
            if weight.ready is not None:
                torch.cuda.current_stream(weight.codes.device).wait_event(weight.ready)

    # What arrives

    def receive(self, weight: GatheredWeight, outputs: tuple[Tensor, ...], *, is_first: bool) -> Any:
        """Complete what has come; at first return the weight and the tensors that FSDP2 frees and allocates.

        Args:
            outputs: [world * chunk, …] of each message, memory that FSDP2 frees and allocates.
        """
        if weight is self.leader:
            if is_first:
                self._allocate(outputs)
            self._complete()
        own = self._inner if weight is self.leader else []
        if self._is_alone and not weight.is_tiled:  # what is sent is the memory of a cast, that may move
            for what in (*weight.forward_parts[1:], *weight.backward_parts):
                to = _allocated(self._memory(Message(weight, what)))
                own += [to] if is_first else []
                with preserve_versions((to,)):
                    to.copy_(self._of(Message(weight, what)))
            self._join([weight])
        return (self._weight_of(weight, outputs), own) if is_first else None

    def _allocate(self, outputs: tuple[Tensor, ...]) -> None:
        """Make the memory of scales and of the other orientation, and find where scales come from."""
        device = outputs[0].device
        if not self._is_split and not self._is_alone:  # else gathers bring now these, now those
            self._messages = dict(zip(self._parts(EVERYTHING), outputs, strict=True))
        for weight in self.weights:
            for what, shape in weight.joined.items():
                self._joined[Message(weight, what)] = _emptied(torch.empty(shape, dtype=torch.uint8, device=device))
        if self._room is not None:
            self._allocate_tiles(self._room, device)
        for tensor in self._joined_now():
            _allocated(tensor)
        self._inner[:] = [*self._always(), *self._joined_now()]

    def _allocate_tiles(self, room: ScaleRoom, device: torch.device) -> None:
        shards = [weight.shards for weight in self._tiles]
        key = tuple(shards), device
        if key not in self._orders:
            self._orders[key] = room.order(shards).to(device)
        self._order = self._orders[key]
        empty = {"dtype": torch.uint8, "device": device}
        self._scales = torch.empty(room.arrived[-1], room.width, **empty)
        self._turned = torch.empty(sum(sum(_turned_sizes(own)) for own in shards), **empty)
        self._turned_blocks = [self._turned_of(i, weight) for i, weight in enumerate(self._tiles)]
        self._turned.untyped_storage().resize_(0)

    def _always(self) -> list[Tensor]:
        """Return what FSDP2 frees and allocates beside messages, whatever came."""
        return [self._scales] if self._tiles else []

    def _joined_now(self) -> list[Tensor]:
        return [self._joined[part] for part in self._parts(self._held) if part in self._joined]

    def _complete(self) -> None:
        """Write the scales of all rows of tiles, and the columns of all ranks beside each other."""
        if self._tiles:
            received = self._sent if self._is_alone else self._messages[Message(None, "scales")]
            if self._words is None or self._words.received is not received:
                word = next(dtype for size, dtype in _WORDS if received.shape[1] % size == 0)
                self._words = Words(received, received.view(word), self._scales.view(word))
            with preserve_versions((self._scales,)):  # autograd saved them in forward: the bytes are the same
                torch.index_select(self._words.sent, 0, self._order, out=self._words.arrived)
        if self._joined and not self._is_alone:
            self._join(self.weights)

    def _join(self, weights: Sequence[GatheredWeight]) -> None:
        here = self._parts(self._held)
        for part, out in self._joined.items():
            weight, received = part.weight, self._messages.get(part)
            if weight is None or weight not in weights or part not in here or received is None:
                continue
            if received.untyped_storage().size():
                with preserve_versions((out,)):
                    weight.join(part.what, received, out)
                _emptied(received)

    @torch.no_grad()
    def _weight_of(self, weight: GatheredWeight, outputs: tuple[Tensor, ...]) -> Tensor:
        shards = weight.shards
        codes = outputs[0] if self._is_alone else self._messages[Message(weight, "codes")]
        if not weight.is_tiled:
            forward = [codes, *(self._whole(Message(weight, what)) for what in weight.forward_parts[1:])]
            backward = [self._whole(Message(weight, what)) for what in weight.backward_parts]
            absent = [t for t in (*forward, *backward) if not t.untyped_storage().size()]
            turn = None if weight.reading.is_one else self.need_backward
            whole = weight.arrive_as(forward, list(map(_allocated, backward)), turn)  # no memory has no views
            for part in absent:
                _emptied(part)
            return whole
        index = self._tiles.index(weight)
        assert self._room is not None, "there are tiles"
        first, stop = (self._room.arrived[index + i] * self._room.width for i in (0, 1))
        own = self._scales.view(-1)[first:stop][: shards.rows * shards.tiles[1]]
        scales = own.view(shards.rows, shards.tiles[1])
        return weight.arrive((codes[: shards.rows], scales), self._turned_blocks[index], self.turn)

    def _whole(self, part: Message) -> Tensor:
        """Return where a part lies once it has come."""
        return self._joined[part] if part in self._joined else self._memory(part)

    def _memory(self, part: Message) -> Tensor:
        """Return where FSDP2 copies a message of all ranks, which it frees and allocates."""
        if part not in self._messages:
            sent = self._of(part)
            self._messages[part] = _emptied(sent.new_empty(self.leader.shards.world * len(sent), *sent.shape[1:]))
        return self._messages[part]

    def _turned_of(self, index: int, weight: GatheredWeight) -> Blocks:
        first = sum(sum(_turned_sizes(one.shards)) for one in self._tiles[:index])
        (tile_rows, _), cols = weight.shards.tiles, weight.shards.cols
        second, width = first + _turned_sizes(weight.shards)[0], tile_rows * NVFP4_BLOCK // 2
        codes = self._turned[first : first + cols * width].view(cols, width)
        return Blocks(codes, self._turned[second : second + cols * tile_rows].view(cols, tile_rows), weight.amax)

    # What did not come, since nobody knew that it was needed

    def need_forward(self) -> None:
        """Let the operands of the forward be there, from now on in every backward too: it runs the forward again."""
        if self._apart and FORWARD not in self._held:
            self._phase.runs_again = True
            self._bring(FORWARD)

    def need_backward(self) -> None:
        """Let the operands of the backward be there.

        Raises:
            RuntimeError: FSDP2 has freed the weights.
        """
        parts = [part for part in self._parts(self._held) if part not in self._joined]
        held = [self._messages.get(part) for part in parts] + self._joined_now()
        if not any(one is not None and one.untyped_storage().size() for one in held):
            raise self._freed()
        if BACKWARD not in self._held:
            self._bring(BACKWARD)

    @torch.no_grad()
    def _bring(self, what: str) -> None:
        here = self._parts(self._held)
        parts = [part for part in self._parts(frozenset((what,))) if part not in here]
        for weight in self._apart:
            weight.before_sending(frozenset((what,)))
        sent = [self._of(part).reshape(-1).view(torch.uint8) for part in parts]
        shards = self.leader.shards
        received = torch.empty(shards.world, sum(map(len, sent)), dtype=torch.uint8, device=sent[0].device)
        all_gather(received.view(-1), torch.cat(sent), group=self.leader.group)
        for part, bytes_of_part in zip(parts, received.split(list(map(len, sent)), 1), strict=True):
            to = _allocated(self._memory(part))
            with preserve_versions((to,)):
                to.view(shards.world, -1).view(torch.uint8).copy_(bytes_of_part)
            self._inner.append(to)  # FSDP2 frees it with the weights
        self._held |= {what}
        self._inner += [_allocated(self._joined[part]) for part in parts if part in self._joined]
        self._join(self.weights)

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
            raise self._freed()
        if self._turner is None:
            self._turner = turner([_target(one) for one in self._tiles], self._scales.device)
        self._turned.untyped_storage().resize_(self._turned.numel())
        self._inner.append(self._turned)  # FSDP2 frees it with the weights
        with preserve_versions((self._turned,)):
            self._turner.transpose()
        self._is_turned = True

    def _freed(self) -> RuntimeError:
        return RuntimeError(
            f"{self.leader.name} was freed by FSDP2 before the backward read it: call the backward through the "
            "module that fully_shard wrapped, or unshard() it before"
        )


_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def _emptied(t: Tensor) -> Tensor:
    t.untyped_storage().resize_(0)
    return t


def _allocated(t: Tensor) -> Tensor:
    if not t.untyped_storage().size():
        t.untyped_storage().resize_(t.nbytes)
    return t


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
