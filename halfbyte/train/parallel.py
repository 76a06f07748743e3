"""A model over several ranks on one DeviceMesh: DDP where each holds all of it, FSDP2 and HSDP where ranks share it.

Torch's own engine does the work. Blocks are the units of FSDP2: layers of a block share quantized inputs and amaxes, so
a block's weights are gathered together, and its forward sees plain ones.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.functional.foreign import is_sharded
from halfbyte.tensor.primary import PrimaryWeight
from halfbyte.train.mesh_config import MeshConfig

DIMS = ("dp_replicate", "dp_shard", "tp")
"""Of the mesh, as torchtitan calls them: ranks see other data along the first two, the same along the last."""

HEAD = "lm_head"


class Parallel:
    """How a model trains on the ranks of a mesh; with one rank, as if there were none.

    Args:
        config: the mesh, settled.
        device: of this rank.
    """

    def __init__(self, config: MeshConfig, device: torch.device) -> None:
        self.config = config
        self.rank = 0
        self.gather: Any = None
        """What lets weights travel as NVFP4; None if they travel in their dtype."""
        self.exchange: Any = None
        """What lets rows of the embedding and activations of the head travel; None if FSDP2 gathers them whole."""
        self.primary: Any = None
        """What keeps weights in NVFP4 on ranks that do not shard them; None if they are in fp32."""
        self._mesh: Any = None
        if config.size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            assert config.dp_replicate is not None, "the config is settled"
            sizes = config.dp_replicate, config.dp_shard, config.tp
            self._mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMS)
            if config.tp > 1 and config.dp_shard > 1 and config.dp_replicate == 1:
                self._mesh[DIMS[1:]]._flatten()  # norms of gradients are summed over both at once
        self._device = device

    @property
    def part(self) -> tuple[int, int]:
        """Which part of every batch is this rank's, of how many."""
        return self.rank, self.config.parts

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share parameters."""
        return self.config.dp_shard > 1 or self.config.tp > 1

    @property
    def keeps_nvfp4(self) -> bool:
        """Whether every rank holds all weights, those of quantized layers in NVFP4 alone."""
        return self.config.weights == "nvfp4" and not self.is_sharded

    def stepping(self, model: nn.Module, optimizer: Any, clip: float, dtype: torch.dtype) -> Any:
        """Return what steps a model that has been built and has resumed: its optimizer, or PrimaryTraining."""
        if not self.keeps_nvfp4:
            return optimizer
        from halfbyte.train.primary import PrimaryTraining

        self.primary = PrimaryTraining(model, optimizer, clip, dtype)
        if self.primary.coded == 0 and self.rank == 0:  # of a baseline in bf16, for one
            said = "the recipe reads no weight as one set of 16x16 tiles, forward and backward"
            print(f"weights='nvfp4': they travel in their dtype; {said}", file=sys.stderr, flush=True)
        return self.primary

    def step(self, model: nn.Module, optimizer: Any, clip: float) -> Tensor:
        """Make an optimizer step; return the norm of the gradient before clipping."""
        if self.primary is not None:
            return self.primary.step()
        norm = self._clip(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def state(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """Return the states of model and optimizer that a checkpoint holds; all ranks must call it."""
        states = (model.state_dict(), optimizer.state_dict()) if self.primary is None else self.primary.state()
        return dict(zip(("model", "optimizer"), states, strict=True))

    def trained(self, model: nn.Module) -> Iterable[Tensor]:
        """Return the tensors that steps change, as far as this rank holds them."""
        return model.parameters() if self.primary is None else self.primary.masters()

    def place_(self, state: hb.RunState) -> None:
        """Let this rank draw random bits of its own; all ranks must call it."""
        if self._mesh is not None:
            self.rank = hb.distributed.place_ranks_(state, self._mesh)

    def wrap(self, model: nn.Module, blocks: nn.ModuleList, dtype: torch.dtype, tokens: int) -> nn.Module:
        """Return what is called to train `model`; sharded, `model` itself, whose parameters are DTensors from now on.

        Args:
            model: converted, with equal weights on all ranks.
            blocks: of it, each gathered as one.
            dtype: of the GEMMs.
            tokens: of a micro-batch, of all ranks.

        Raises:
            ValueError: weights cannot travel as the mesh asks.
        """
        if self._mesh is None:
            return model
        if self.config.tp > 1:
            from halfbyte.train.tensor_parallel import share_  # torch's styles take a while to import

            share_(model, self._mesh["tp"])
            if self.config.dp_shard == 1:
                return model.to(self._device)
        if self.keeps_nvfp4:
            return model
        if not self.is_sharded:
            ddp = nn.parallel.DistributedDataParallel
            named = inspect.signature(ddp).parameters
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in named else "broadcast_buffers"  # before 2.13
            options: dict[str, Any] = {buffers: False}  # they are equal everywhere
            return ddp(model, gradient_as_bucket_view=True, **options)
        from torch.distributed.fsdp import fully_shard

        # What experts, DTensors and a shared head hand out is a view, and nothing is changed in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        if self.config.ep > 1:
            from halfbyte.train.expert_parallel import share_experts_

            share_experts_(blocks, self.config, self._device)
        # A mesh of two dimensions is HSDP: shards along the second, copies of them along the first.
        mesh = self._mesh[DIMS[:2]] if self.config.dp_replicate != 1 else self._mesh[DIMS[1]]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        if self.config.weights == "nvfp4" or self.config.head == "shared":
            each, head = max(1, tokens // self.config.size), HEAD if self.config.head == "shared" else None
            self.exchange = hb.distributed.shard_embedding_(model, mesh, tokens=each, head=head)
        fully_shard(model, mesh=mesh, ignored_params=None if self.exchange is None else self.exchange.params)
        prefetch_(blocks)
        if self.config.weights == "nvfp4":
            self._gather_nvfp4(model, dtype)
        return model

    def compile_(self, blocks: nn.ModuleList, most: int) -> None:
        """Compile every block into one graph, which serves them all; say why not where codes keep them from one.

        Args:
            most: graphs that torch keeps of a block.
        """
        reason = "" if self.gather is None else self.gather.why_eager
        if reason:
            if self.rank == 0:
                print(f"compile: off with weights='nvfp4'; {reason}", file=sys.stderr, flush=True)
            return
        torch._dynamo.config.recompile_limit = most
        for block in blocks:
            block.compile(fullgraph=True)

    def _gather_nvfp4(self, model: nn.Module, dtype: torch.dtype) -> None:
        from halfbyte.distributed.fsdp import reason_for_values

        reason = reason_for_values(model)  # of a baseline in bf16, for one
        if reason is not None:
            print(f"weights='nvfp4': they travel in their dtype; {reason}", file=sys.stderr, flush=True)
            return
        self.gather = hb.distributed.fsdp_gather_nvfp4_(model, dtype=dtype)

    def let_go(self, model: nn.Module) -> None:
        """Free the weights that a forward without a backward has left whole."""
        if self.primary is not None:
            self.primary.forget_values()
        for module in model.modules() if self.is_sharded else ():
            if is_gathered(module):
                module.reshard()  # type: ignore[operator]

    def log_dropped(self, model: nn.Module, log: Any, step: int, ranks: Any) -> None:
        """Log how many copies of tokens a capacity has left out since the last time; nothing without one."""
        if self.config.capacity is not None:
            from halfbyte.train.expert_parallel import log_dropped

            log_dropped(model, log, step, ranks, self.config.tp)

    @property
    def travels(self) -> str:
        """What of the weights travels how, as a table; "" if all of them travel in their dtype."""
        if self.primary is not None:
            return self.primary.travels
        parts = [str(self.gather.report)] if self.gather is not None else []
        return "\n".join([*parts, *([str(self.exchange)] if self.exchange is not None else [])])

    def _clip(self, model: nn.Module, limit: float) -> Tensor:
        """Scale gradients down to a norm of `limit` over all of them, in place; return the norm that they had."""
        if self.config.ep == 1:
            return whole(nn.utils.clip_grad_norm_(model.parameters(), limit))
        from halfbyte.train.expert_parallel import clip_by_mesh_

        return clip_by_mesh_(model.parameters(), limit)

    @contextlib.contextmanager
    def reducing(self, trained: nn.Module, is_last: bool) -> Iterator[None]:
        """Let the backward in the block sum gradients over the ranks if it is the last of a step."""
        if self.primary is not None:
            with self.primary.reducing(is_last):
                yield
        elif self._mesh is None or (self.config.dp_shard == 1 and self.config.tp > 1):
            yield
        elif self.is_sharded:
            trained.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            if self.exchange is not None:
                self.exchange.set_requires_gradient_sync(is_last)
            yield
        else:
            with contextlib.nullcontext() if is_last else trained.no_sync():  # type: ignore[operator]
                yield


def prefetch_(blocks: Iterable[nn.Module], ahead: int = 1) -> None:
    """Let FSDP2 gather blocks before it launches the forward of the one before them, and not after.

    By itself it does so in backward alone; in forward a gather is hidden as far as the host is ahead of the device.

    Args:
        blocks: wrapped by `fully_shard`, in their order.
        ahead: how many at once.
    """
    units: list[Any] = list(blocks)
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])


def is_gathered(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers the module's parameters for its forward."""
    return hasattr(module, "set_requires_gradient_sync") and hasattr(module, "unshard")


def cross_entropy(logits_BTV: Any, targets_BT: Tensor) -> Tensor:
    """Return the mean loss of this rank's tokens, of logits or of the parts of them that ranks share."""
    if isinstance(logits_BTV, Tensor):
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())
    return logits_BTV.cross_entropy(targets_BT)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: all of a plain one."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def parts(tensor: Tensor) -> Iterable[Tensor]:
    """Return the plain tensors that this rank holds a tensor in: several of a weight that arrived as NVFP4."""
    if not isinstance(tensor, PrimaryWeight):
        return (local(tensor),)
    return (*tensor.blocks, *(tensor.turned or ()))


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks, which must call this together; a plain one is whole."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded_like(tensor: Any, like: Tensor) -> Any:
    """Return the part of a whole tensor that this rank holds of `like`; anything for a plain one stays as it is."""
    if not is_sharded(like) or not isinstance(tensor, Tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    target: Any = like
    # Every rank has read the whole tensor: none sends it.
    return distribute_tensor(tensor.to(like.device), target.device_mesh, target.placements, src_data_rank=None)
