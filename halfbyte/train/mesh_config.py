"""How the processes of a run share it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from halfbyte.train.fields import check_positive


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the processes that torchrun started share a run. Batches, steps and learning rate are the same for any."""

    dp_shard: int = 1
    """Ranks that share every parameter, its gradient and its optimizer state (FSDP2). 1: each has them all (DDP)."""
    dp_replicate: int | None = None
    """Groups of such ranks, each with a whole model (HSDP where both are above 1). None: as many as there are."""
    tp: int = 1
    """Ranks that share every layer of a block, every expert too, and see the same tokens (tensor parallel)."""
    ep: int = 1
    """Ranks of dp_shard that share the experts of a mixture, to which tokens travel (expert parallel). Alone, dp_shard
    is as large."""
    dispatch: Literal["plain", "nvfp4"] = "plain"
    """How tokens travel to experts of other ranks: in their values, or as codes, each token with its own amax: other
    losses than those of "plain"."""
    capacity: int | None = None
    """Copies of tokens that one rank sends another for its experts in a forward of a layer. The host then never waits
    for counts; those beyond it get zeros, and the log counts them. None: all of them."""
    weights: Literal["plain", "nvfp4"] = "plain"
    """How weights travel: in fp32, as they are stored, or as the codes and scales that GEMMs read (no bit of a loss
    differs, but for what Inductor fuses otherwise). With dp_shard=1 every rank then holds those of quantized layers as
    codes alone (ZeroOptimizer)."""
    head: Literal["gathered", "shared"] = "gathered"
    """Whether lm_head is gathered, or its rows stay where they are and activations travel if that is fewer bytes. Last
    bits of losses differ. Rows of the embedding travel then, too."""

    def __post_init__(self) -> None:
        check_positive(self, "dp_shard", "tp", "ep")
        self._check_experts()
        if self.dp_replicate is not None:
            check_positive(self, "dp_replicate")
        if self.weights not in ("plain", "nvfp4"):
            raise ValueError(f"weights={self.weights!r}: give 'plain' or 'nvfp4'")
        if self.head not in ("gathered", "shared"):
            raise ValueError(f"head={self.head!r}: give 'gathered' or 'shared'")
        if self.head == "shared" and (self.dp_shard == 1 or self.tp > 1):
            raise ValueError(
                f"head='shared': dp_shard={self.dp_shard}, tp={self.tp}, and it is for ranks that share weights as "
                "FSDP2 does; give --dp-shard and no --tp, or leave --head out"
            )
        if self.weights == "nvfp4" and self.tp > 1:
            raise ValueError(
                f"weights='nvfp4': tp={self.tp}, and parts of tensor-parallel weights travel in their values; leave "
                "one of --weights and --tp out"
            )
        if self.tp > 1 and self.dp_shard == 1 and (self.dp_replicate or 1) > 1:
            raise ValueError(
                f"dp_replicate={self.dp_replicate}: tp={self.tp} goes with FSDP2, not with DDP; give --dp-shard"
            )

    def _check_experts(self) -> None:
        if self.dispatch not in ("plain", "nvfp4"):
            raise ValueError(f"dispatch={self.dispatch!r}: give 'plain' or 'nvfp4'")
        if self.ep == 1:
            if self.dispatch != "plain":
                raise ValueError(
                    f"dispatch={self.dispatch!r}: ep=1, so that no token travels; give --ep, or leave it out"
                )
            if self.capacity is not None:
                raise ValueError(
                    f"capacity={self.capacity}: ep=1, so that no token travels; give --ep, or leave it out"
                )
            return
        if self.capacity is not None:
            check_positive(self, "capacity")
        if self.dp_shard == 1:
            object.__setattr__(self, "dp_shard", self.ep)
        if self.dp_shard % self.ep:
            raise ValueError(
                f"ep={self.ep}: it does not divide dp_shard={self.dp_shard}, whose ranks share the experts"
            )
        if self.weights != "plain":
            raise ValueError(
                f"weights={self.weights!r} with ep={self.ep}: parts of experts travel in their values; leave one of "
                "--weights and --ep out"
            )
        if self.head != "gathered":
            raise ValueError(
                f"head={self.head!r} with ep={self.ep}: nobody has trained both at once; leave one of --head and --ep "
                "out"
            )

    @property
    def size(self) -> int:
        """Ranks of the mesh; those of one group of shards as long as the number of groups is open."""
        return self.parts * self.tp

    @property
    def parts(self) -> int:
        """In how many parts ranks share a batch."""
        return self.dp_shard * (self.dp_replicate or 1)

    def over(self, ranks: int) -> MeshConfig:
        """Return the mesh of so many ranks, with no number left open.

        Raises:
            ValueError: they do not fill it.
        """
        groups = 1 if self.tp > 1 and self.dp_shard == 1 else max(1, ranks // (self.dp_shard * self.tp))
        settled = replace(self, dp_replicate=self.dp_replicate or groups)
        if settled.size != ranks:
            asked = f"dp_shard={self.dp_shard}"
            asked += "" if self.dp_replicate is None else f", dp_replicate={self.dp_replicate}"
            asked += "" if self.tp == 1 else f", tp={self.tp}"
            raise ValueError(
                f"{asked}: the mesh has {settled.size} ranks, and {ranks} {'runs' if ranks == 1 else 'run'}; start "
                f"torchrun --nproc-per-node {settled.size} -m halfbyte …, or give numbers whose product is {ranks}"
            )
        if settled.weights == "nvfp4" and settled.parts == 1:
            raise ValueError(
                "weights='nvfp4': one process has whole weights, and none travel; start several with torchrun, leave "
                "--weights out, or train your own loop with hb.distributed.ZeroOptimizer (docs/primary_weights.md)"
            )
        return settled

    def in_words(self) -> str:
        """Return the mesh as a reader of a record needs it, "1 process" for one."""
        if self.size == 1:
            return "1 process"
        tp = "" if self.tp == 1 else f", tp={self.tp}"
        ep = "" if self.ep == 1 else f", ep={self.ep}"
        dispatch = "" if self.dispatch == "plain" else f", dispatch={self.dispatch}"
        room = "" if self.capacity is None else f", capacity={self.capacity}"
        return f"dp_replicate={self.dp_replicate}, dp_shard={self.dp_shard}{tp}{ep}{dispatch}{room}"
