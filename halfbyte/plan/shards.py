"""What FSDP2 splits over its ranks: each parameter by its first dimension, and messages have room for whoever has most.

So 8,192 rows over 3,000 ranks travel as 9,000: the padding is counted as what it is, bytes on the wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

from halfbyte.distributed.fsdp_columns import Columns
from halfbyte.distributed.fsdp_experts import ExpertShards
from halfbyte.distributed.fsdp_reading import Reading
from halfbyte.distributed.fsdp_shards import RowShards
from halfbyte.layout import ceil_div
from halfbyte.plan.architecture import Architecture, Kind, Matrix
from halfbyte.plan.mesh import Mesh
from halfbyte.train.model import ModelConfig

SPLIT_BY_COLUMNS = ("o_proj", "down_proj")
"""Layers whose input features tensor parallelism splits, RowwiseParallel in torch's words; all others by output."""


def splitting_ranks(mesh: Mesh, is_expert: bool) -> int:
    """Return how many ranks split a parameter."""
    return mesh.dp_shard // mesh.ep if is_expert else mesh.dp_shard


def filled(shape: Sequence[int], ranks: int) -> int:
    """Return the elements of a parameter with those that fill the shares of its last ranks."""
    return ceil_div(shape[0], ranks) * ranks * prod(shape[1:]) if shape else 1


def local_shape(mesh: Mesh, matrix: Matrix) -> tuple[int, int, int]:
    """Return experts, rows and columns of what `tp` and `ep` leave of a weight, of the rank that has most."""
    by_columns = matrix.name.rpartition(".")[2] in SPLIT_BY_COLUMNS
    rows, cols = (1, mesh.tp) if by_columns else (mesh.tp, 1)
    experts = ceil_div(matrix.experts, mesh.ep) if matrix.experts > 1 else 1
    return experts, ceil_div(matrix.rows, rows), ceil_div(matrix.cols, cols)


def values_gathered(mesh: Mesh, matrix: Matrix) -> int:
    """Return the elements that a gather of a weight in its values brings."""
    experts, rows, cols = local_shape(mesh, matrix)
    is_expert = matrix.experts > 1
    return filled((experts, rows, cols) if is_expert else (rows, cols), splitting_ranks(mesh, is_expert))


def table_gathered(mesh: Mesh, config: ModelConfig) -> int:
    """Return the elements that a gather of an embedding or a head brings, of the words that `tp` leaves."""
    return filled((ceil_div(config.vocab_size, mesh.tp), config.dim), mesh.dp_shard)


def small_gathered(mesh: Mesh, architecture: Architecture, kind: Kind) -> int:
    """Return the elements that a gather of a block's norms and routers brings."""
    return sum(filled(shape, mesh.dp_shard) for shape in architecture.small_shapes(kind))


def blocks_gathered(mesh: Mesh, architecture: Architecture) -> tuple[int, int]:
    """Return the elements that gathers of all blocks in their values bring, and those of experts."""
    others = experts = 0
    for kind in architecture.kinds:
        each = {m: values_gathered(mesh, m) for m in architecture.matrices(kind)}
        experts += kind.count * sum(numel for m, numel in each.items() if m.experts > 1)
        own = sum(numel for m, numel in each.items() if m.experts == 1)
        others += kind.count * (own + small_gathered(mesh, architecture, kind))
    return others, experts


@cache
def codes_gathered(mesh: Mesh, matrix: Matrix, reading: Reading, is_backward: bool) -> int:
    """Return the bytes that a gather of a weight's codes, scales and amaxes of experts brings.

    Args:
        mesh, matrix: of the weight.
        reading: the forms in which forward and backward read it, neither of them its values.
        is_backward: of the form that the backward reads.
    """
    experts, rows, cols = local_shape(mesh, matrix)
    columns, ranks = reading.columns if is_backward else None, splitting_ranks(mesh, matrix.experts > 1)
    if matrix.experts > 1:
        shards = ExpertShards(experts, (rows, cols), ranks, 0, reading.spec.block[0])
        sizes = shards.shapes if columns is None else shards.column_shapes(columns)
        return ranks * sum(map(prod, sizes.values()))
    matrix_shards = RowShards(rows, cols, ranks, 0, reading.spec.block[0])
    return ranks * (matrix_shards if columns is None else Columns.of(columns, matrix_shards)).message_bytes
