"""What stands in the place of an embedding of which every rank keeps some rows: how these reach tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from halfbyte.distributed.fixed_rows import ID_BYTES, WRONG, FixedRows, raise_out_of_range, refuse_wrong
from halfbyte.distributed.scales import all_gather
from halfbyte.functional.foreign import is_sharded
from halfbyte.layout import ceil_div

CALL = "shard_embedding_"
INTEGERS = frozenset(
    (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)
OPTIONS = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
"""What of torch.nn.Embedding changes rows or gradients: where one is set, FSDP2 gathers the embedding."""

SUMS_IN_WEIGHTS_DTYPE = TorchVersion(torch.__version__) >= "2.15"
"""Whether FSDP2 reduces gradients in the dtype of weights where a policy has no reduce_dtype, and not in param_dtype.

Of torch 2.15: `torch.distributed.fsdp.MixedPrecisionPolicy`.
"""


def _problem_of(ids: Any, device: torch.device) -> TypeError | ValueError | None:
    """Return why ids cannot name rows that lie on a device, None if they can."""
    if not isinstance(ids, Tensor):
        return TypeError(f"ids={ids!r}: give an int64 tensor")
    if is_sharded(ids):
        return TypeError("ids is a DTensor: give the tokens of this rank, ids.to_local()")
    if ids.is_nested or ids.layout != torch.strided:
        return TypeError(f"ids.layout={ids.layout}: give a dense tensor")
    if ids.dtype not in INTEGERS:  # floats would be rounded to the row of another
        return TypeError(f"ids.dtype={ids.dtype}: rows are named by integers; give int64")
    if ids.device != device:
        return ValueError(f"ids.device={ids.device}: rows lie on {device}; move ids there")
    return None


def _count(ids: Any) -> int:
    """Return for how many tokens the others have room in their messages, if they are given as many as this rank."""
    if not isinstance(ids, Tensor):
        try:
            ids = torch.as_tensor(ids)
        except Exception:  # whatever it is, the others are told
            return 0
    return ids.numel()


class RowPrecision(NamedTuple):
    """What rows travel in, and what their gradients are summed in: both as FSDP2 has them under a policy."""

    rows: torch.dtype
    gradients: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, policy: Any) -> RowPrecision:
        rows = getattr(policy, "param_dtype", None) or weight.dtype
        unset = weight.dtype if SUMS_IN_WEIGHTS_DTYPE else rows
        return cls(rows, getattr(policy, "reduce_dtype", None) or unset)

    def size_of(self, weight: Tensor) -> int:
        """Return the bytes of a weight's gather and of the reduction of its gradient."""
        return weight.numel() * (self.rows.itemsize + self.gradients.itemsize)


def has_own_dtype(weight: Any, policy: Any) -> bool:
    """Whether FSDP2 gathers a weight, or keeps its gradients, in a dtype apart from a policy's, as torch 2.15 can."""
    choose = getattr(policy, "param_dtype_override_fn", None)
    own = None if choose is None else choose(weight)
    return (
        own not in (None, policy and policy.param_dtype) or getattr(weight, "grad_dtype", weight.dtype) != weight.dtype
    )


class ShardedEmbedding(nn.Module):
    """An embedding of which this rank keeps the rows that FSDP2 would leave it.

    It has the attributes of `torch.nn.Embedding`, of which options that change rows or gradients stay unset.

    sends_gradients: whether the next backward sends gradients to their owners, with those that were kept before.

    Args:
        whole: what stood in its place.
        weight: its weight as a DTensor parameter.
        mesh: of one dimension, or two of HSDP.
        precision: of rows and gradients.
        tokens: of a rank, for which messages of one size have room; None where ranks count first.

    Raises:
        ValueError: such an option is set later.
    """

    padding_idx: int | None
    max_norm: float | None
    scale_grad_by_freq: bool
    sparse: bool

    def __init__(
        self, whole: nn.Embedding, weight: nn.Parameter, mesh: Any, precision: RowPrecision, tokens: int | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.norm_type = whole.norm_type  # which code that reads max_norm reads too
        for name in OPTIONS:
            setattr(self, name, getattr(whole, name))
        self.weight = weight
        self.train(whole.training)
        self._mesh, self.precision, self._tokens = mesh, precision, tokens
        self.sends_gradients = True
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.traffic = {"rows": 0, "gradients": 0, "exchanges": 0}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS and value != OPTIONS[name]:
            raise ValueError(f"{name}={value!r}: ranks look rows up without it; set it before {CALL}")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return what nn.Embedding shows, and who keeps what."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows of {self._mesh.size(self._mesh.ndim - 1)} ranks"

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows [..., dim] of int64 ids [...]; every rank must call it.

        Raises:
            TypeError: ids are no integers.
            IndexError: an id names no row, on a CPU; on a GPU the device reports it, where messages have one size.

        Where ids of one rank alone are wrong, the others raise an IndexError that names it, or their devices report it.
        """
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            return eagerly(self._rows_of, (ids,), {})
        return self._rows_of(ids)

    def _rows_of(self, ids: Tensor) -> Tensor:
        weight: Any = self.weight
        local = weight.to_local()
        problem = _problem_of(ids, local.device)
        if problem is not None:
            self.tell_of_failure(_count(ids))
            raise problem
        kind = _Rows if self._tokens is None else FixedRows
        return kind.apply(self, ids.reshape(-1).long(), local).view(*ids.shape, self.embedding_dim)

    def room(self, tokens: int) -> int:
        """Return for how many tokens a message of one size has room, if this rank has so many now."""
        assert self._tokens is not None, "messages have the size of what is counted"
        return max(1, ceil_div(tokens, self._tokens)) * self._tokens

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the rows."""
        return self._mesh.get_group(self._mesh.ndim - 1)

    @torch.no_grad()
    def tell_of_failure(self, tokens: int) -> None:
        """Let the other ranks raise that would wait for this one, which has no ids for them."""
        local: Any = self.weight
        world, device = dist.get_world_size(self.group), local.to_local().device
        if self._tokens is None:
            counts = torch.full((world,), WRONG, device=device, dtype=torch.int64)
            dist.all_to_all_single(torch.empty_like(counts), counts, group=self.group)
        else:
            own = torch.full((self.room(tokens),), WRONG, device=device, dtype=torch.int64)
            all_gather(own.new_empty(world * len(own)), own, group=self.group)

    @torch.no_grad()
    def ask(self, named: Tensor) -> _Asked:
        """Tell the owners of distinct rows, ascending, that this rank needs them."""
        group, world = self.group, dist.get_world_size(self.group)
        chunk = ceil_div(self.num_embeddings, world)
        rows = named.clamp(0, self.num_embeddings - 1)
        counts = torch.bincount(rows // chunk, minlength=world).where((rows == named).all(), WRONG)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        needs, gives = torch.stack((counts, theirs)).tolist()
        if WRONG in needs:
            raise_out_of_range(named, self.num_embeddings)
        refuse_wrong([rank for rank, count in enumerate(gives) if count < 0])
        asked = named.new_empty(sum(gives))
        dist.all_to_all_single(asked, named, gives, needs, group=group)
        self.traffic["rows"] += self._foreign(gives, ID_BYTES)
        return _Asked(asked - chunk * dist.get_rank(group), gives, needs)

    def _foreign(self, counts: list[int], size: int) -> int:
        """Return the bytes of what others send, of so many things of everybody."""
        return (sum(counts) - counts[dist.get_rank(self.group)]) * size

    @torch.no_grad()
    def fetch(self, asked: _Asked, local: Tensor) -> Tensor:
        """Return the rows that this rank asked for, in its order."""
        own = local.index_select(0, asked.rows).to(self.precision.rows)
        found = own.new_empty(sum(asked.needs), self.embedding_dim)
        dist.all_to_all_single(found, own, asked.needs, asked.gives, group=self.group)
        self.traffic["rows"] += self._foreign(asked.needs, self.embedding_dim * own.element_size())
        self.traffic["exchanges"] += 1
        return found

    @torch.no_grad()
    def send(self, named: Tensor, gradients: Tensor, asked: _Asked, local: Tensor) -> Tensor:
        """Return the gradient of this rank's rows: the mean over the ranks of what they have kept and make now."""
        gradients = gradients.to(self.precision.gradients)
        if self.kept or not self.sends_gradients:
            self.kept.append((named, gradients))
        if not self.sends_gradients:
            return torch.zeros_like(local)
        if self.kept:  # summed as they came, as FSDP2 does
            named = torch.cat([ids for ids, _ in self.kept]).unique()
            total = gradients.new_zeros(len(named), self.embedding_dim)
            for ids, one in self.kept:
                total.index_add_(0, torch.searchsorted(named, ids), one)
            self.kept.clear()
            gradients, asked = total, self.ask(named)
        come = gradients.new_empty(sum(asked.gives), self.embedding_dim)
        dist.all_to_all_single(come, gradients.contiguous(), asked.gives, asked.needs, group=self.group)
        self.traffic["gradients"] += self._foreign(asked.gives, self.embedding_dim * come.element_size())
        total = come.new_zeros(local.shape)
        total.index_put_((asked.rows,), come, accumulate=True)  # sorted by row, in the order of ranks, on a GPU too
        return self.averaged(total, local)

    @property
    def keeps(self) -> bool:
        """Whether gradients wait for a backward that sends them."""
        return bool(self.kept)

    def averaged(self, total: Tensor, local: Tensor) -> Tensor:
        """Return the gradient of this rank's rows, of what is the sum over the ranks that share the rows."""
        if self._mesh.ndim > 1:
            dist.all_reduce(total, group=self._mesh.get_group(0))
        return total.div_(self._mesh.size()).to(local.dtype)


class _Asked(NamedTuple):
    """Rows of this rank that others need, and how many rows each of them needs of it and it of each."""

    rows: Tensor
    gives: list[int]
    needs: list[int]


class _Rows(torch.autograd.Function):
    """The rows [ids, dim] of a batch, int64 [ids]; their gradients reach those that keep them."""

    @staticmethod
    def forward(ctx: Any, embedding: ShardedEmbedding, ids: Tensor, local: Tensor) -> Tensor:
        named, place = torch.unique(ids, return_inverse=True)
        ctx.embedding, ctx.asked = embedding, embedding.ask(named)
        ctx.save_for_backward(named, place, local)
        return F.embedding(place, embedding.fetch(ctx.asked, local))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        named, place, local = ctx.saved_tensors
        # As torch.nn.Embedding makes them: every row sums its tokens in their order.
        gradients = torch.ops.aten.embedding_dense_backward(dy, place, len(named), -1, False)
        return None, None, ctx.embedding.send(named, gradients, ctx.asked, local)
