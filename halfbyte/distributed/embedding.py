"""Embeddings of which every rank keeps some rows: ranks exchange the rows that their tokens name, and their gradients.

FSDP2 gathers all rows for the few thousand that a batch names, and reduces a gradient that is zero elsewhere. Of a
model with a large vocabulary that is most of what travels. Here ranks exchange the rows of tokens: in messages of one
size for all (`fixed_rows`), for which no host waits, where that is fewer bytes than a gather. On many ranks a rank asks
the owners for the rows that it needs, each once, and sends them the sums of their gradients, which takes fewer bytes,
and hosts wait for how many. Gradients are made as `torch.nn.Embedding` makes them, so that on two ranks nothing differs
from a gathered embedding by a bit; on more, only the order of the ranks' sum. Where the batch names more rows than
there are, or others read the whole weight, FSDP2 goes on gathering it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from halfbyte.distributed.embedding_rows import CALL, RowPrecision, ShardedEmbedding, has_own_dtype
from halfbyte.distributed.fixed_rows import row_bytes_exchanged
from halfbyte.distributed.head import HeadShards, exchanged_bytes, head_problem, shard_head
from halfbyte.distributed.replacing import names_of_modules, replaced_problem
from halfbyte.distributed.same import agree_on_parameters
from halfbyte.nn.linear import Linear
from halfbyte.notebook import ShowsText

OWN_DTYPE = "it or its gradients have a dtype of their own (param_dtype_override_fn, grad_dtype)"


@dataclass(frozen=True, kw_only=True)
class EmbeddingRow:
    """One embedding or head: what of it travels in a micro-batch, in bytes that reach every rank.

    name: of the weight.
    reason: why it is gathered; "" if rows or activations are exchanged.
    gathered: bytes of its gather and of the reduction of its gradient; of a head tied to an embedding the same ones.
    exchanged: bytes of rows and their gradients, with counts at most, if every token were another; of a head, of
        activations.
    what: is exchanged, "rows" or "activations".
    is_fixed: rows of all tokens travel, in messages of one size, and no host waits; else each once, after counts.
    """

    name: str
    reason: str
    gathered: int
    exchanged: int
    what: str = "rows"
    is_fixed: bool = False

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: gathered, {self.gathered:,} bytes a micro-batch: {self.reason}"
        how = ""
        if self.what == "rows":
            how = " in messages of one size" if self.is_fixed else ", each once after counts"
        most = "at most " if self.what == "rows" and not self.is_fixed else ""
        return (
            f"{self.name}: {self.what} exchanged{how}, {most}{self.exchanged:,} bytes a micro-batch; gathered "
            f"{self.gathered:,}"
        )


class RowExchange(ShowsText):
    """What `shard_embedding_` arranged.

    rows: one for each embedding of the model, and one for its head if it was named.
    params: weights of which rows or activations are exchanged, for `fully_shard(…, ignored_params=params)`.
    """

    def __init__(self, rows: list[EmbeddingRow], modules: list[ShardedEmbedding], head: _Head | None = None) -> None:
        self.rows, self._modules, self._head = tuple(rows), modules, head

    @property
    def params(self) -> set[nn.Parameter]:
        """The weights as they are now."""
        heads = [] if self._head is None else [self._head.module]
        return {module.weight for module in (*self._modules, *heads)}  # type: ignore[misc]

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that have reached this rank so far: ids and rows in forward, gradients in backward; exchanges.

        activations: those of a head, its targets and the parts of its loss, and gradients of activations.
        """
        counted = [module.traffic for module in self._modules]
        found = {key: sum(one[key] for one in counted) for key in ("rows", "gradients", "exchanges")}
        return found | ({"activations": 0} if self._head is None else self._head.shards.traffic)

    def set_requires_gradient_sync(self, is_last: bool) -> None:
        """Let the next backward send gradients, or keep them for the one that does, as FSDP2 does with others.

        Raises:
            RuntimeError: what micro-batches of the step before kept was never sent.
        """
        modules: list[Any] = [*self._modules, *([] if self._head is None else [self._head.shards])]
        if not is_last and any(module.sends_gradients and module.keeps for module in modules):
            raise RuntimeError(
                "gradients that micro-batches of the step before kept were never sent: its last one, which sends "
                "them, did not go through every embedding and head whose rows ranks keep; let it, or gather these"
            )
        for module in modules:
            module.sends_gradients = is_last

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))


def shard_embedding_(
    model: nn.Module, mesh: Any, *, tokens: int, policy: Any = None, head: str | None = None
) -> RowExchange:
    """Let every rank keep some rows of each embedding, in place, and exchange rows where that is fewer bytes.

    Call it before `torch.distributed.fsdp.fully_shard`, on every rank, with equal weights, and hand `params` of what it
    returns to `fully_shard(…, ignored_params=)` of the module that holds the embedding. Parameters keep their names and
    become DTensors, sharded by rows as FSDP2's, whose gradients are averaged over the ranks.

    Of a head that is named, tied to an embedding or not, ranks then exchange activations where that is fewer bytes. It
    returns `LogitShards`, whose `cross_entropy(targets)` stands for that of logits; all ranks must have as many tokens.

    Args:
        model: whose torch.nn.Embedding are looked at.
        mesh: of FSDP2: one dimension, or two of HSDP.
        tokens: of a rank in a micro-batch, by which rows or a gather are chosen. Ranks may have fewer, each another
            number; if one has more, all must have as many.
        policy: FSDP2's MixedPrecisionPolicy; None if there is none.
        head: the name of the layer that makes logits, such as "lm_head". None: FSDP2 gathers it.

    Returns:
        A handle with `params`, the choice of every embedding in `rows`, and the `traffic`.

    Raises:
        ValueError: tokens is not positive, the mesh has more than two dimensions, a weight is sharded already, the
            model has no such head, or, on every rank, ranks differ in shapes or tokens.
        RuntimeError: some rank of the mesh does not make the call within `agree.AGREE_TIMEOUT`.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens={tokens!r}: give how many tokens a rank has in a micro-batch, at least 1")
    if mesh.ndim > 2:
        raise ValueError(f"mesh has the dimensions {mesh.mesh_dim_names}: give that of fully_shard, one or two")
    named = dict(model.named_modules())
    if head is not None and (not head or not isinstance(getattr(named.get(head), "weight", None), Tensor)):
        raise ValueError(f"head={head!r}: the model has no such layer with a weight; name the one that makes logits")
    places = names_of_modules(model)
    making = _Head.of(head, named[head], mesh, policy, tokens) if head else None
    if making is not None:
        making.problem = replaced_problem(making.module, places)
    embeddings = {name: module for name, module in named.items() if isinstance(module, nn.Embedding)}
    rows = _choices(named, embeddings, (policy, tokens, mesh.size(mesh.ndim - 1)), making, places)
    agree_on_parameters(CALL, mesh.mesh.flatten().tolist(), None, [(row.name, str(row)) for row in rows])
    making = None if making is None or rows[-1].reason else making
    sharded: list[ShardedEmbedding] = []
    weights: dict[int, nn.Parameter] = {}
    for row, (name, module) in zip(rows, embeddings.items(), strict=False):  # behind them may be the head's
        if not row.reason:
            weight = _sharded(module.weight, mesh, weights)
            precision = RowPrecision.of(module.weight, policy)
            sharded.append(ShardedEmbedding(module, weight, mesh, precision, tokens if row.is_fixed else None))
            _put(model, name, sharded[-1])
    if making is not None:
        making.shard_(model, _sharded(making.module.weight, mesh, weights))
    return RowExchange(rows, sharded, making)


def _choices(
    named: dict[str, nn.Module],
    embeddings: dict[str, nn.Embedding],
    options: tuple[Any, int, int],
    head: _Head | None,
    places: Mapping[int, int],
) -> list[EmbeddingRow]:
    """Return the choice of every embedding, and behind them that of the head.

    Args:
        named: all modules of the model.
        embeddings: those among them.
        options: policy, tokens, and how many ranks share rows.
        head: that was named.
        places: how many names the model has for a module, by its id.
    """
    holders: dict[int, list[nn.Module]] = {}
    for module in named.values():
        for param in module._parameters.values():
            holders.setdefault(id(param), []).append(module)
    rows = [
        _choose(
            f"{name}.weight".lstrip("."),
            module,
            options,
            holders[id(module.weight)],
            head,
            replaced_problem(module, places),
        )
        for name, module in embeddings.items()
    ]
    if head is None:
        return rows
    others = [m for m in holders[id(head.module.weight)] if m is not head.module]
    tied = [row for row, module in zip(rows, embeddings.values(), strict=True) if module in others]
    return [*rows, head.row(tied, len(others))]


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _sharded(whole: Any, mesh: Any, made: dict[int, nn.Parameter]) -> nn.Parameter:
    """Return a parameter of which this rank keeps the rows that FSDP2 would leave it; made: those of before."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if id(whole) not in made:
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        # Every rank has the whole weight: none sends it.
        weight = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
        made[id(whole)] = nn.Parameter(weight, requires_grad=whole.requires_grad)
    return made[id(whole)]


class _Head:
    """A head that was named, and what its activations take.

    name: of the layer.
    module: it; once sharded, what stands in its place.
    """

    def __init__(self, name: str, module: nn.Module, precision: RowPrecision, policy: Any, exchanged: int) -> None:
        self.name, self.module, self._precision = name, module, precision
        self._policy, self._exchanged = policy, exchanged
        self.shards: Any = None
        self.problem = ""  # why no other module can stand in its place; one that is quantized stays
        self._mesh: Any = None

    @classmethod
    def of(cls, name: str, module: Any, mesh: Any, policy: Any, tokens: int) -> _Head:
        """Return that of a layer before it is sharded."""
        precision = RowPrecision.of(module.weight, policy)
        sizes = precision.rows.itemsize, precision.rows.itemsize
        exchanged = exchanged_bytes(tokens, mesh.size(mesh.ndim - 1), module.weight.shape[-1], sizes)
        found = cls(name, module, precision, policy, exchanged)
        found._mesh = mesh
        return found

    @property
    def exchanged(self) -> int:
        """Bytes of activations and their gradients."""
        return self._exchanged

    @property
    def reason(self) -> str:
        """Why its activations cannot be exchanged, whatever that takes; "" if they can."""
        stays = isinstance(self.module, Linear)
        return head_problem(self.module, self._mesh.size(self._mesh.ndim - 1)) or ("" if stays else self.problem)

    def row(self, tied: list[EmbeddingRow], others: int) -> EmbeddingRow:
        """Return the choice.

        Args:
            tied: embeddings that have the weight too, as they were chosen.
            others: how many modules have it too.
        """
        weight: Any = self.module.weight
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"{self.name}.weight is a DTensor: call {CALL} before fully_shard, on whole weights")
        gathered = self._precision.size_of(weight)
        reason = self.reason or (OWN_DTYPE if has_own_dtype(weight, self._policy) else "")
        if not reason and others > len(tied):
            reason = "other modules have it too"
        if not reason:
            reason = next((row.reason for row in tied if row.reason), "")
        if not reason and not tied and self._exchanged >= gathered:
            reason = f"activations of all ranks are as many bytes as its {weight.shape[0]:,} rows"
        name = f"{self.name}.weight"
        exchanged = self._exchanged
        return EmbeddingRow(name=name, reason=reason, gathered=gathered, exchanged=exchanged, what="activations")

    def shard_(self, model: nn.Module, weight: nn.Parameter) -> None:
        """Let ranks exchange its activations."""
        self.shards = HeadShards(weight, self._mesh, self._precision.gradients)
        head: Any = self.module
        self.module = shard_head(head, weight, self.shards, getattr(self._policy, "param_dtype", None))
        if self.module is not head:
            _put(model, self.name, self.module)


def _choose(
    name: str,
    module: nn.Embedding,
    options: tuple[Any, int, int],
    holders: list[nn.Module],
    head: _Head | None,
    problem: str,
) -> EmbeddingRow:
    """Return the choice for one embedding.

    Args:
        name: of its weight.
        options: policy, tokens, and how many ranks share rows.
        holders: modules that have its weight.
        head: that was named, which may be one of them.
        problem: why no other module can stand in its place.
    """
    policy, tokens, world = options
    if hasattr(module.weight, "device_mesh"):
        raise ValueError(f"{name} is a DTensor: call {CALL} before fully_shard, on weights that every rank holds")
    precision = RowPrecision.of(module.weight, policy)
    sizes = precision.rows.itemsize, precision.gradients.itemsize
    gathered = precision.size_of(module.weight)
    exchanged, fixed = row_bytes_exchanged(tokens, world, module.embedding_dim, sizes)
    others = [holder for holder in holders if holder is not module]
    is_tied = head is not None and len(others) == 1 and others[0] is head.module
    of_head = head.exchanged if is_tied and head is not None else 0
    both = exchanged + of_head
    checks = (
        (type(module) is not nn.Embedding, f"it is a {type(module).__name__}, no torch.nn.Embedding"),
        (bool(problem), problem),
        (bool(others) and not is_tied, "other modules have it too, such as a head tied to it"),
        (is_tied and head is not None and bool(head.reason), f"of the head tied to it: {head and head.reason}"),
        (module.max_norm is not None, "max_norm changes rows in forward"),
        (module.padding_idx is not None, "padding_idx leaves a row without a gradient"),
        (module.scale_grad_by_freq or module.sparse, "its gradients are scaled by frequency, or sparse"),
        (has_own_dtype(module.weight, policy), OWN_DTYPE),
        (module.weight.is_meta, "it is on the meta device, without values"),
        (exchanged >= gathered, f"{tokens:,} tokens may name as many bytes as its {module.num_embeddings:,} rows have"),
        (both >= gathered, "rows and the activations of the head tied to it are as many bytes as its rows"),
    )
    reason = next((text for applies, text in checks if applies), "")
    is_fixed = not reason and fixed + of_head < gathered
    bytes_ = fixed if is_fixed else exchanged
    return EmbeddingRow(name=name, reason=reason, gathered=gathered, exchanged=bytes_, is_fixed=is_fixed)
