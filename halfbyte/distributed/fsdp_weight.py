"""One weight that FSDP2 gathers as NVFP4: what its ranks hold and send, and the operand that arrives.

FSDP2 splits a weight [N, K] along its rows: rank r of n holds the rows from r * ceil(N / n) on, the last ranks fewer or
none. What it sends are the codes of these rows and one scale byte for each 16x16 tile that begins in them, or for each
1x16 block, both padded to the size of rank 0, since an all-gather takes messages of one size. FSDP2 asks a sharded
tensor for its message (`fsdp_pre_all_gather`) and for the weight that the messages make (`fsdp_post_all_gather`):
attributes of that tensor, which is why whatever replaces the tensor loses them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed.fsdp_arrival import Arrival
from halfbyte.distributed.fsdp_columns import Columns
from halfbyte.distributed.fsdp_phase import BACKWARD, FORWARD
from halfbyte.distributed.fsdp_reading import Reading, reading_of
from halfbyte.distributed.fsdp_shards import RowShards
from halfbyte.distributed.scales import all_gather
from halfbyte.layout import Blocks, Operand
from halfbyte.nn.grouped import GroupedLinear
from halfbyte.nn.linear import LinearLayer
from halfbyte.spec import Recipe
from halfbyte.tensor.primary import PrimaryWeight


class ShardState(NamedTuple):
    """Which memory a shard is, and how often it was written: all that tells a change.

    Operators of the DTensor count in its own version alone, those of its local tensor in that one's.
    """

    param: Any
    local: Tensor
    versions: tuple[int, int]
    memory: tuple[int, torch.dtype, torch.device]

    @classmethod
    def of(cls, param: Any) -> ShardState:
        """Return that of a DTensor as it is now."""
        local = param._local_tensor
        return cls(param, local, _versions(param, local), (local.data_ptr(), local.dtype, local.device))

    def is_that_of(self, param: Any) -> bool:
        """Whether nothing has happened to the shard since."""
        own, local, versions, memory = self
        if param is not own or param._local_tensor is not local or _versions(param, local) != versions:
            return False
        return (local.data_ptr(), local.dtype, local.device) == memory


def _versions(param: Any, local: Tensor) -> tuple[int, int]:
    try:  # of every weight in every gather: asking each whether it has one takes as long
        return param._version, local._version
    except RuntimeError:  # made in inference mode
        own = 0 if param.is_inference() else param._version
        return own, 0 if local.is_inference() else local._version


class Precision(NamedTuple):
    """What values of a weight are rounded to; None where nothing says it.

    gathered: param_dtype of FSDP2's MixedPrecisionPolicy, that values are gathered in. None: the dtype of the shards.
    computed: what forwards compute in, under autocast for instance. None: what values are gathered in.
    """

    gathered: torch.dtype | None
    computed: torch.dtype | None


class GatheredWeight:
    """A weight whose codes travel.

    Args:
        name: of the parameter.
        layer: whose `weight` it is.
        reading: in which forms forward and backward read it.
        shards: of its rows, a RowShards; of experts, ExpertShards.
        precision: what its values are rounded to.
        slot: which amax is its own; weights that share an amax have the same.
        refresh: casts all weights anew, on every rank.
    """

    def __init__(
        self,
        name: str,
        layer: LinearLayer | GroupedLinear,
        reading: Reading,
        shards: Any,
        precision: Precision,
        slot: int,
        refresh: Callable[[], None],
    ) -> None:
        self.name, self.layer, self.shards, self.slot = name, layer, shards, slot
        self.reading, self.spec = reading, reading.spec
        is_matrix = isinstance(shards, RowShards)  # experts have no blocks that lie on two ranks
        self.columns = Columns.of(reading.columns, shards) if reading.columns is not None and is_matrix else None
        self._precision, self._refresh = precision, refresh
        self.param: Any = None
        self.is_dirty = True
        self.bytes_gathered = self.bytes_of_values = self.gathers = 0
        self._seen: ShardState | None = None
        self._received: dict[tuple[frozenset[str], torch.dtype], int] = {}
        self._reads_codes: Recipe | None = None
        self.arrival: Arrival
        self.arrived: PrimaryWeight | None = None
        self._send, self._receive = _Send(self), _Receive(self)
        self.codes = self.scales = self.amax = self.column_codes = self.column_scales = torch.empty(
            0, dtype=torch.float32
        )
        self.ready: Any = None

    # The shard

    @property
    def is_tiled(self) -> bool:
        """Whether it is a matrix in 16x16 tiles, of which one scale for each travels."""
        return self.spec.is_tile

    @property
    def why_eager(self) -> str:
        """Why compiled code leaves its graph for the layer, "" if it does not."""
        return "" if self.reading.is_one else "its backward reads it in another form than its forward"

    @property
    def tail(self) -> tuple[int, ...]:
        """The shape of what lies in each of the rows that are split."""
        return (self.shards.cols,)

    @property
    def local(self) -> Tensor:
        """This rank's rows, as they were when they were last looked at."""
        assert self._seen is not None, "nobody has looked yet"
        return self._seen.local

    @property
    def memory(self) -> tuple[int, torch.dtype, torch.device]:
        """Where this rank's rows were when they were last looked at, and in which dtype."""
        assert self._seen is not None, "nobody has looked yet"
        return self._seen.memory

    @property
    def is_absent(self) -> bool:
        """Whether its shard is on meta, without values."""
        return self.param is None or self.param._local_tensor.is_meta

    @property
    def dtype(self) -> torch.dtype:
        """What the shards are rounded to before they are quantized."""
        return self._precision.computed or self._nominal(self.local)

    def _nominal(self, local: Tensor) -> torch.dtype:
        return self._precision.gathered or local.dtype

    def look(self) -> bool:
        """Find the shard as it is now, let FSDP2 ask this weight for its message; return whether codes are stale."""
        param: Any = self.layer._parameters.get("weight")
        is_whole = isinstance(param, PrimaryWeight)
        param = self.param if is_whole else param
        local = getattr(param, "_local_tensor", None)
        if local is None:
            raise ValueError(
                f"{self.name} is a {type(param).__name__}, no shard of FSDP2's and not gathered as NVFP4: something "
                "replaced it, or unshard() was called after something had replaced its shard; call reshard() on the "
                "module that fully_shard wrapped, or build and wrap the model anew"
            )
        if local.is_meta:  # FSDP2 refuses the forward and says why
            return False
        if self._seen is None or not self._seen.is_that_of(param):
            self._check(local)
            self.is_dirty = True
        if is_whole and self.is_dirty:
            raise ValueError(
                f"{self.name} was changed while its gathered codes were in use, which FSDP2 would go on using: call "
                "reshard() on the module that fully_shard wrapped before changing its parameters"
            )
        self.param = param
        # What replaces the tensor loses its attributes: they are set wherever a forward begins.
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._send, self._receive
        if "__getstate__" not in vars(local):
            apart = _Apart(local)
            local.__getstate__, local.__deepcopy__ = apart.state, apart.copy
        return self.is_dirty

    def _check(self, local: Tensor) -> None:
        first, last = self.shards.rows_of(self.shards.rank)
        shape = (last - first, *self.tail)
        if tuple(local.shape) != shape or not local.is_contiguous():
            raise ValueError(
                f"{self.name}: this rank holds {list(local.shape)}, and its shard was {list(shape)}, contiguous: build "
                "and wrap the model anew"
            )
        dtype = self._nominal(local)
        arrived = self.arrived
        if arrived is not None and (arrived.dtype, arrived.device) != (dtype, local.device):
            raise ValueError(
                f"{self.name} is {dtype} on {local.device}, and FSDP2 has gathered it as {arrived.dtype} on "
                f"{arrived.device}: change dtype or device before the first forward, or build and wrap the model anew"
            )

    def prepare(self, amax: Tensor) -> None:
        """Make the memory of what is sent; amax: fp32 [], that the cast writes."""
        shards, device = self.shards, self.local.device
        self.amax = amax
        self.codes = torch.zeros(shards.chunk, shards.row_bytes, dtype=torch.uint8, device=device)
        self.scales = self.arrival.scale_room(self, device)
        if self.columns is not None:
            shapes = self.columns.shapes
            self.column_codes, self.column_scales = (torch.zeros(s, dtype=torch.uint8, device=device) for s in shapes)

    def has_cast(self, ready: Any) -> None:
        """Note that codes and scales are those of the shard noted; ready: a CUDA event, or None."""
        self.ready, self.is_dirty = ready, False

    def note(self) -> None:
        """Note the shard that a cast is about to read."""
        self._seen = ShardState.of(self.param)

    # What FSDP2 asks for

    def before_sending(self, wanted: frozenset[str]) -> None:
        """Let codes and scales be those of the shard as it is, and count what is sent.

        Args:
            wanted: what the gather is for.
        """
        if self.look():  # of unshard() without a forward
            self._refresh()
        key = wanted, self.local.dtype  # in which values are gathered, where nothing else says it
        if key not in self._received:
            self._received[key] = self.message_bytes(wanted) * self.shards.world
        self.bytes_gathered += self._received[key]
        self.gathers += 1

    def message_bytes(self, wanted: frozenset[str]) -> int:
        """Return what every rank sends for a forward, a backward or both."""
        if self.reading.is_one:
            return self.shards.message_bytes
        back = self.backward_bytes() if BACKWARD in wanted else 0
        return (self.shards.message_bytes if FORWARD in wanted else 0) + back

    def backward_bytes(self) -> int:
        """Return what every rank sends for a backward that reads another form than the forward."""
        values = self.shards.chunk * prod(self.tail) * self.values_dtype.itemsize
        return values if self.columns is None else self.columns.message_bytes

    @property
    def values_dtype(self) -> torch.dtype:
        """What a backward in high precision computes in."""
        return self._precision.computed or self._precision.gathered or self.layer.weight.dtype

    @property
    def forward_parts(self) -> tuple[str, ...]:
        """What a forward is sent of it alone, codes first; scales of tiles come with those of others."""
        return ("codes",) if self.is_tiled else ("codes", "scales")

    @property
    def joined(self) -> dict[str, tuple[int, int]]:
        """The shapes of parts that do not lie as they arrive, in bytes; `join` writes them."""
        return {} if self.columns is None else dict(zip(self.backward_parts, self.columns.whole(), strict=True))

    def join(self, what: str, received: Tensor, out: Tensor) -> None:
        """Write a part that does not lie as it arrived; received: uint8 [world * rows, bytes]."""
        assert self.columns is not None, "nothing else is joined"
        self.columns.join(received, out)

    @property
    def backward_parts(self) -> tuple[str, ...]:
        """What a backward is sent, where that is not what the forward is sent."""
        if self.reading.is_one:
            return ()
        return ("values",) if self.columns is None else ("column codes", "column scales")

    def part(self, what: str) -> Tensor:
        """Return a message: "codes" or "scales", or one of `backward_parts`."""
        return self._sent_values(self.values_dtype) if what == "values" else getattr(self, what.replace(" ", "_"))

    def arrive_as(
        self, forward: Sequence[Tensor], backward: Sequence[Tensor], turn: Callable[[], None] | None
    ) -> PrimaryWeight:
        """Return the weight in 1x16 blocks whose parts arrive there; turn: lets those of the backward be there."""
        rows, dgrad = self.shards.rows, None
        if not self.reading.is_one:
            columns = self.columns
            dgrad = backward[0][:rows].mT if columns is None else columns.operand(backward[0], backward[1], self.amax)
        return self.arrive((forward[0][:rows], forward[1][:rows]), None, turn, dgrad)

    def arrive(
        self,
        row: tuple[Tensor, Tensor],
        turned: Blocks | None,
        turn: Callable[[], None] | None,
        dgrad: Operand | Tensor | None = None,
    ) -> PrimaryWeight:
        """Return the weight that lies in memory which its arrival fills again and again.

        Args:
            row: codes, uint8 [N, row bytes], and scales, uint8 [N, blocks].
            turned: of the other orientation; None of 1x16 blocks.
            turn: fills that, or `dgrad`.
            dgrad: its operand, where that is not the other orientation.
        """
        options = {"shape": (self.shards.rows, self.shards.cols), "dtype": self._nominal(self.local)}
        weight = PrimaryWeight(Blocks(*row, self.amax), self.spec, **options)
        weight.turned, weight.turn, weight.rounded, weight.dgrad = turned, turn, self.dtype, dgrad
        weight.codes_suffice = not self.why_eager
        self.arrived = weight
        return weight

    # What the layer asks for

    def to_read(self, layer: LinearLayer | GroupedLinear, weight: Any) -> Any:
        """Return what a layer multiplies by: its gathered codes, or in high precision the values, gathered for this.

        Args:
            layer: whose forward it is.
            weight: what it has as its weight.

        Raises:
            ValueError: no codes have arrived, or they are not what the layer would make of its weight.
        """
        if not isinstance(weight, PrimaryWeight):
            raise ValueError(
                f"{layer.title}: its weight was to arrive as NVFP4 codes and arrived as {type(weight).__name__}, since "
                "something replaced its shard between FSDP2's hooks: call the model through the module given to "
                "fsdp_gather_nvfp4_ or one that fully_shard wrapped"
            )
        if not layer.recipe.specs or (self.tail[1:] and layer.instead is not None):  # experts that are being looked at
            from halfbyte.functional.eager import eagerly

            return eagerly(_Values.apply, (self, weight), {})  # a frame behind a graph break may be compiled by itself
        self.arrival.need_forward()
        if layer.recipe is self._reads_codes:
            return weight
        if reading_of(layer.recipe) != self.reading:
            raise ValueError(
                f"{layer.title}: its weight is gathered as {self.spec.key}, and its recipe now reads it in another "
                "form: keep the recipe that it had when fsdp_gather_nvfp4_ was called, or one without any quantization"
            )
        self._reads_codes = layer.recipe
        return weight

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the whole weight in its own values, as FSDP2 gathers them without codes; every rank must call it."""
        shards = self.shards
        sent = self._sent_values(self._nominal(self.local))
        whole = torch.empty(shards.world * shards.chunk, *self.tail, dtype=sent.dtype, device=sent.device)
        if shards.world > 1:
            all_gather(whole, sent, group=self.group)
        else:
            whole.copy_(sent)
        self.bytes_of_values += whole.nbytes
        return whole[: shards.rows]

    def _sent_values(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows in a dtype, with zeros where rank 0 has more."""
        local = self.local.detach()
        if len(local) == self.shards.chunk:
            return local.to(dtype)
        sent = torch.zeros(self.shards.chunk, *self.tail, dtype=dtype, device=local.device)
        sent[: len(local)].copy_(local)
        return sent

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold its rows."""
        mesh = self.param.device_mesh
        return mesh.get_group(mesh.ndim - 1)


class _Values(torch.autograd.Function):
    """The values of a weight that arrived as codes; their gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, gathered: GatheredWeight, weight: PrimaryWeight) -> Tensor:
        return gathered.values()

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[None, Tensor]:
        return None, dw


def event_of(tensor: Tensor) -> Any:
    """Return when what was launched will be done: FSDP2 copies messages on a stream of its own."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


class _Apart:
    """How a shard is pickled and copied: without what FSDP2 asks it, which is of this model alone."""

    names = ("fsdp_pre_all_gather", "fsdp_post_all_gather", "__getstate__", "__deepcopy__")

    def __init__(self, local: Tensor) -> None:
        self._local = weakref.ref(local)  # these are attributes of it

    def state(self) -> dict[str, Any]:
        """Return the attributes that are pickled."""
        return {name: value for name, value in vars(self._local()).items() if name not in self.names}

    def copy(self, memo: dict[int, Any]) -> Tensor:
        """Return what copy.deepcopy does."""
        local = self._local()
        assert local is not None, "it is being copied"
        copied = Tensor.__deepcopy__(local, memo)
        for name in self.names:
            vars(copied).pop(name, None)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> _Apart:
        return self  # until `copy` takes it away


class _Hook:
    """A callable that FSDP2 finds on a shard."""

    def __init__(self, weight: GatheredWeight) -> None:
        self.weight = weight

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self  # until `_Apart.copy` takes it away


class _Send(_Hook):
    """fsdp_pre_all_gather. With one parameter: of hooks with five, FSDP2 wants messages of the shard's padded shape."""

    # FSDP2 asks for the signature in every gather; worked out anew it takes longer than all that the hook does.
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __call__(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return self.weight.arrival.message(self.weight), None


class _Receive(_Hook):
    """fsdp_post_all_gather."""

    def __call__(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        return self.weight.arrival.receive(self.weight, outputs, is_first=out is None)
