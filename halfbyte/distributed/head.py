"""Heads of which every rank keeps some rows: ranks exchange activations, and none has all logits of a token.

FSDP2 gathers the rows of a head for the tokens of one rank. Here every rank is sent the activations of all ranks and
multiplies them by the rows that it keeps: as many products, and activations are fewer bytes than rows where the
vocabulary is large. The cross entropy is taken of logits where they are. Its sum over the vocabulary is one of
integers, so that no bit of a loss depends on how many ranks share the rows, or on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.distributed.scales import all_gather
from halfbyte.formats import NVFP4_BLOCK
from halfbyte.functional.autocast import autocast_dtype
from halfbyte.functional.split import summed_block
from halfbyte.layout import ceil_div, row_bytes
from halfbyte.nn.linear import Linear, LinearLayer
from halfbyte.spec import Recipe

TARGET_BYTES = 4
STATISTIC_BYTES = 4 + 8 + 8
"""Of a token: its greatest logit, the sum of exponentials, the logit of its target; each is reduced over the ranks."""
SUM_BITS = 62


class LogitShards(NamedTuple):
    """What a head returns whose rows ranks share: of the tokens of all ranks, the logits of this rank's rows.

    logits: [tokens of all ranks, rows here]; the backward of `cross_entropy` writes its gradient into them.
    shards: who has which rows.
    """

    logits: Tensor
    shards: HeadShards

    def cross_entropy(self, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the mean cross entropy of this rank's tokens, fp32 []; every rank must call it.

        Args:
            targets: integers [...], one for each of this rank's tokens.
            ignore_index: the target of tokens that do not count.

        Raises:
            ValueError: there are more or fewer targets than tokens.
            TypeError: targets are no integers.
            IndexError: a target names no row, on a CPU; on a GPU the device reports it.
        """
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            return eagerly(shared_cross_entropy, (self, targets, ignore_index), {})
        return shared_cross_entropy(self, targets, ignore_index)


class HeadShards:
    """The rows of a head [rows, dim] as the ranks of a mesh keep them, those that FSDP2 would leave them.

    Args:
        weight: a DTensor in parts along its rows.
        mesh: of one dimension, or two of HSDP.
        gradients: dtype in which gradients are added up.
    """

    def __init__(self, weight: Any, mesh: Any, gradients: torch.dtype) -> None:
        self.rows, self._mesh, self._gradients = weight.shape[0], mesh, gradients
        self.sends_gradients = True
        self.traffic = {"activations": 0}
        self._kept: Tensor | None = None
        self._line: Any = None

    @property
    def keeps(self) -> bool:
        """Whether gradients wait for a backward that sends them."""
        return self._kept is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the rows."""
        return self._mesh.get_group(self._mesh.ndim - 1)

    @property
    def line(self) -> Any:
        """Their mesh, of one dimension."""
        if self._mesh.ndim == 1:
            return self._mesh
        if self._line is None:
            self._line = dist.DeviceMesh.from_group(self.group, self._mesh.device_type)
        return self._line

    @property
    def world(self) -> int:
        """How many ranks share the rows."""
        return self._mesh.size(self._mesh.ndim - 1)

    @property
    def first(self) -> int:
        """The first row of this rank, or how many rows there are."""
        return min(self.rows, dist.get_rank(self.group) * ceil_div(self.rows, self.world))

    def count(self, each: int) -> None:
        """Note that every rank got so many bytes of each other."""
        self.traffic["activations"] += (self.world - 1) * each

    def averaged(self, local: Tensor) -> Tensor:
        """Return this rank's rows; their gradient, a sum over the tokens of all ranks, is divided by the ranks."""
        return _Averaged.apply(self, local)

    def reduced(self, dw: Tensor) -> Tensor:
        """Return the mean over the ranks of what was kept and is given; zeros, and it is kept, until it is to be sent.

        Args:
            dw: summed over the tokens of all ranks that share the rows.
        """
        given, dw = dw, dw.to(self._gradients)
        if self._kept is not None:
            dw = self._kept + dw
        self._kept = None if self.sends_gradients else dw
        if not self.sends_gradients:
            return torch.zeros_like(dw)
        dw = dw.clone() if dw is given else dw  # what is summed and divided in place is nobody else's
        if self._mesh.ndim > 1:
            dist.all_reduce(dw, group=self._mesh.get_group(0))
        return dw.div_(self._mesh.size())

    def __reduce__(self) -> tuple:
        """Leave copies of the model without it: a process group cannot be copied."""
        return type(None), ()


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: HeadShards, local: Tensor) -> Tensor:
        ctx.shards, ctx.dtype = shards, local.dtype
        return local.view_as(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dw: Tensor) -> tuple[None, Tensor]:
        return None, ctx.shards.reduced(dw).to(ctx.dtype)


class _Everyones(torch.autograd.Function):
    """The activations [tokens of all ranks, dim] of ranks that have as many tokens each."""

    @staticmethod
    def forward(ctx: Any, shards: HeadShards, x: Tensor) -> Tensor:
        ctx.shards = shards
        every = x.new_empty(shards.world * x.shape[0], x.shape[1])
        all_gather(every, x.contiguous(), group=shards.group)
        shards.count(x.nbytes)
        return every

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor]:
        shards, dx = ctx.shards, dx.contiguous()
        parts = torch.empty_like(dx)
        dist.all_to_all_single(parts, dx, group=shards.group)
        shards.count(dx.nbytes // shards.world)
        # In fp32 and in the order of ranks: a reduce-scatter in bf16 would round once for every rank.
        return None, parts.view(shards.world, -1, dx.shape[1]).sum(0, dtype=torch.float32).to(dx.dtype)


class ShardedHead(nn.Module):
    """A head in high precision of which this rank keeps some rows.

    Args:
        whole: a torch.nn.Linear without bias.
        weight: its weight as a DTensor parameter.
        shards: of its rows.
        dtype: what activations and rows are rounded to before they are multiplied; None for their own.
    """

    def __init__(self, whole: nn.Linear, weight: nn.Parameter, shards: HeadShards, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight, self.shards, self._dtype = weight, shards, dtype
        self.train(whole.training)

    def extra_repr(self) -> str:
        """Return what nn.Linear shows, and who keeps what."""
        return f"{self.in_features}, {self.out_features}, rows of {self.shards.world} ranks"

    def forward(self, x: Tensor) -> LogitShards:
        """Return the logits of this rank's rows for the tokens of all ranks, of which each has as many.

        Args:
            x: [..., in_features], this rank's.
        """
        if torch.compiler.is_compiling():
            from halfbyte.functional.eager import eagerly

            return eagerly(self._logits, (x,), {})
        return self._logits(x)

    def _logits(self, x: Tensor) -> LogitShards:
        local: Any = self.weight
        rows = self.shards.averaged(local.to_local())
        dtype = autocast_dtype(x.device) or self._dtype or x.dtype
        every = _Everyones.apply(self.shards, x.reshape(-1, x.shape[-1]).to(dtype))
        return LogitShards(F.linear(every, rows.to(dtype)), self.shards)


class HeadEntry:
    """What a quantized head runs in the place of its GEMMs: x travels as codes, and its rows are in parts.

    Every operand has the bytes of one process that has the tokens of all ranks.

    Args:
        shards: of its rows.
        dtype: what x and rows are rounded to before they are quantized; None for their own.
    """

    def __init__(self, shards: HeadShards, dtype: torch.dtype | None) -> None:
        self.shards, self._dtype = shards, dtype

    def read(self, layer: LinearLayer, weight: Any) -> Any:
        """Return the weight whose gradient is the mean over the ranks."""
        from torch.distributed.tensor import DTensor, Shard

        rows = self.shards.averaged(weight.to_local())
        rows = rows.to(self._dtype or rows.dtype)
        options: dict[str, Any] = {"run_check": False, "shape": weight.shape, "stride": (weight.shape[1], 1)}
        return DTensor.from_local(rows, self.shards.line, (Shard(0),), **options)

    def outputs(self, x: Tensor, layers: Sequence[LinearLayer], call: int) -> tuple[Any, ...]:
        """Return `LogitShards` of the one layer; see `nn.linear.run_shared`."""
        from halfbyte.distributed.tp_styles import _Entry

        entry = _Entry(self.shards.line, 0, None, True)
        tokens = x.reshape(-1, x.shape[-1])
        tokens = tokens.to(self._dtype or tokens.dtype)
        dtype = autocast_dtype(x.device) or tokens.dtype
        self.shards.count(_sent_bytes(tokens.numel(), dtype, layers[0].recipe))
        if tokens.requires_grad:
            tokens.register_hook(lambda gradient: self.shards.count(gradient.nbytes))
        (logits,) = entry.outputs(tokens, layers, call)
        return (LogitShards(logits, self.shards),)


def _sent_bytes(numel: int, dtype: torch.dtype, recipe: Recipe) -> int:
    """Return the bytes of x as it travels: the operands that two GEMMs read, values where one of them reads these."""
    sides = recipe.fprop.a if recipe.fprop else None, recipe.wgrad.b if recipe.wgrad else None
    specs = [spec for spec in sides if spec is not None]
    coded = [row_bytes(numel, spec) + numel // spec.block_length for spec in specs]
    return sum(coded) + (numel * dtype.itemsize if len(specs) < 2 else 0)


def shared_cross_entropy(given: LogitShards, targets: Tensor, ignore_index: int) -> Tensor:
    """See `LogitShards.cross_entropy`."""
    logits, shards = given
    if targets.dtype == torch.bool or targets.dtype.is_floating_point:
        raise TypeError(f"targets.dtype={targets.dtype}: rows are named by integers; give int64")
    targets = targets.reshape(-1).long()  # of narrower integers not every row is one, nor -1
    if targets.numel() * shards.world != logits.shape[0]:
        raise ValueError(
            f"targets: {targets.numel()}, and this rank has {logits.shape[0] // shards.world} tokens; give one for each"
        )
    ignored = targets == ignore_index
    known = (targets.clamp(0, shards.rows - 1) == targets).logical_or_(ignored)
    if targets.is_cuda:
        torch._assert_async(known.all())
    elif not bool(known.all()):
        raise IndexError(f"targets: {int(targets[~known][0])} names no row of a head of {shards.rows}")
    targets = targets.masked_fill(ignored, -1).to(torch.int32)
    return _CrossEntropy.apply(shards, targets, logits)


class _CrossEntropy(torch.autograd.Function):
    """The mean over this rank's tokens; the gradient of the logits is of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, shards: HeadShards, own: Tensor, logits: Tensor) -> Tensor:
        targets = own.new_empty(shards.world * own.numel())
        all_gather(targets, own, group=shards.group)
        statistics = _Statistics.of(logits, targets, shards)
        shards.count(own.nbytes + 2 * STATISTIC_BYTES * own.numel())
        rank = dist.get_rank(shards.group)
        mine = slice(rank * own.numel(), (rank + 1) * own.numel())
        counted = own >= 0
        losses = statistics.log_sum[mine] - statistics.target[mine]
        ctx.shards, ctx.statistics, ctx.targets = shards, statistics, targets
        ctx.tokens, ctx.is_used = counted.sum(), False
        ctx.save_for_backward(logits)
        return torch.where(counted, losses, 0.0).sum() / ctx.tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[None, None, Tensor]:
        if ctx.is_used:
            raise RuntimeError("cross_entropy: its logits were used up by a backward before; call it anew")
        (logits,), shards, targets = ctx.saved_tensors, ctx.shards, ctx.targets
        ctx.is_used = True
        each = (dloss.float() / ctx.tokens).reshape(1)
        scales = each.new_empty(shards.world)
        all_gather(scales, each, group=shards.group)
        counted = targets.view(shards.world, -1) >= 0
        scale = torch.where(counted, scales[:, None], 0.0).view(-1)
        ops.logit_gradient_(logits, ctx.statistics.log_sum, targets, scale, shards.first)
        torch.autograd.graph.increment_version((logits,))  # kernels do not: who saved logits would read a gradient
        return None, None, logits.detach()


class _Statistics(NamedTuple):
    """Of each token of all ranks, fp32: the logarithm of the sum of exponentials, and the logit of its target."""

    log_sum: Tensor
    target: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, shards: HeadShards) -> _Statistics:
        """Return those of logits [tokens, rows here]; docs/fsdp2.md, "The head", has the rule.

        Args:
            targets: int32 [tokens], -1 for none.
        """
        peak = ops.logit_peak(logits)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=shards.group)
        bits = SUM_BITS - max(1, shards.rows - 1).bit_length()
        message = ops.logit_sums(logits, peak, targets, shards.first, bits)
        # One rank has the target's bits, the others zero: sums of integers are exact in any order.
        dist.all_reduce(message, group=shards.group)
        log_sum = (peak.double() + (message[0].double() * 2.0**-bits).log()).float()
        log_sum = torch.where(peak.isfinite(), log_sum, torch.nan)
        return cls(log_sum, message[1].to(torch.int32).view(torch.float32))


def exchanged_bytes(tokens: int, world: int, dim: int, sizes: tuple[int, int]) -> int:
    """Return the bytes that reach a rank in a micro-batch.

    Args:
        tokens: of each rank.
        world: ranks that share the rows.
        dim: of an activation.
        sizes: bytes of an element of activations and of their gradients.
    """
    return (world - 1) * tokens * (dim * sum(sizes) + TARGET_BYTES + 2 * STATISTIC_BYTES)


def head_problem(head: nn.Module, world: int) -> str:
    """Return why activations of a head cannot be exchanged among so many ranks; "" if they can."""
    weight: Any = head.weight
    chunk = ceil_div(weight.shape[0], world)
    is_quantized = isinstance(head, LinearLayer) and bool(head.recipe.specs)
    block = max(NVFP4_BLOCK, summed_block(head.recipe, "N")) if isinstance(head, LinearLayer) else 1
    cut = f"its rows in parts of {chunk} cut blocks of {block}, whose gradients would be gathered whole"
    checks = (
        (weight.is_meta, "it is on the meta device, without values"),
        (type(head) not in (nn.Linear, Linear), f"it is a {type(head).__name__}"),
        (getattr(head, "bias", None) is not None, "it has a bias"),
        (getattr(head, "shared_input", None) is not None, "it shares its input in a fused module"),
        (bool(getattr(head, "amax_group", ())), "it shares its amax with other layers"),
        (is_quantized and world > 1 and chunk % block != 0, cut),
    )
    return next((text for applies, text in checks if applies), "")


def shard_head(head: nn.Linear, weight: nn.Parameter, shards: HeadShards, dtype: torch.dtype | None) -> nn.Module:
    """Return what stands in the place of a head: a quantized one stays, and takes the weight in.

    Args:
        head: whole.
        weight: its weight as a DTensor parameter.
        shards: of its rows.
        dtype: what activations and rows are rounded to; None for their own.
    """
    if isinstance(head, Linear):
        entry = HeadEntry(shards, dtype)
        head.weight, head.entry, head.weight_to_read = weight, entry, entry.read
        return head
    return ShardedHead(head, weight, shards, dtype)
