"""Embedding and head whose rows stay with their ranks: what travels instead, by the rule of `shard_embedding_`."""

from __future__ import annotations

from typing import NamedTuple

from halfbyte.distributed.fixed_rows import row_bytes_exchanged
from halfbyte.distributed.head import exchanged_bytes
from halfbyte.plan.job import Job


class SharedEdges(NamedTuple):
    """Which of both ranks share.

    is_fixed: rows of all ranks' tokens travel, in messages of one size; else each once, after counts.
    """

    embedding: bool
    head: bool
    is_fixed: bool

    def gathered(self, job: Job) -> tuple[int, int]:
        """Return how many parameters of embedding and head FSDP2 gathers and reduces, and how many it leaves."""
        config = job.architecture.config
        each = config.vocab_size * config.dim
        copies = (self.head,) if config.tie_embeddings else (self.embedding, self.head)
        return each * (len(copies) - sum(copies)), each * sum(copies)


def shared_edges(job: Job) -> SharedEdges:
    """Return what ranks share: what takes fewer bytes of exchanges than of gathers; of one weight for both, both."""
    if job.head != "shared":
        return SharedEdges(False, False, False)
    config = job.architecture.config
    sizes = job.value_bytes, job.reduced_bytes
    gathered = config.vocab_size * config.dim * sum(sizes)
    shape = job.tokens, job.mesh.dp_shard, config.dim, sizes
    rows, fixed = row_bytes_exchanged(*shape)
    activations = exchanged_bytes(job.tokens, job.mesh.dp_shard, config.dim, (job.value_bytes, job.value_bytes))
    if config.tie_embeddings:
        is_less = rows + activations < gathered
        return SharedEdges(is_less, is_less, is_less and fixed + activations < gathered)
    return SharedEdges(rows < gathered, activations < gathered, rows < gathered and fixed < gathered)
