"""How FSDP2 splits a weight's rows, and the tiles that begin in each rank's: one message size, every row once."""

import pytest
import torch

from halfbyte.distributed.fsdp_weight import RowShards


@pytest.mark.parametrize("rows", [1, 3, 15, 16, 17, 37, 64, 83, 160])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_rows_and_rows_of_tiles(rows, world):
    shards = [RowShards(rows, 40, world, rank) for rank in range(world)]
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(world)]  # what FSDP2 calls
    assert [stop - start for start, stop in (s.rows_of(s.rank) for s in shards)] == chunks + [0] * (world - len(chunks))
    tiles = range(-(-rows // 16))
    begun = [sum(start <= 16 * tile < stop for tile in tiles) for start, stop in map(shards[0].rows_of, range(world))]
    assert [stop - start for start, stop in map(shards[0].tile_rows_of, range(world))] == begun
    assert {s.sent_tile_rows for s in shards} == {max(begun)}
    messages = torch.full((world, max(begun)), -1)
    for rank, (start, stop) in enumerate(map(shards[0].tile_rows_of, range(world))):
        messages[rank, : stop - start] = torch.arange(start, stop)
    assert messages.flatten()[shards[0].order()].tolist() == [row // 16 for row in range(rows)]


def test_bytes_of_a_message():
    assert RowShards(4096, 4096, 8, 3).message_bytes == 512 * 2048 + 32 * 256
    assert RowShards(37, 40, 4, 0).message_bytes == 10 * 24 + 1 * 3  # 10 rows of 3 blocks, one row of tiles at most
    assert 8 * RowShards(4096, 4096, 8, 0).message_bytes <= 0.255 * 4096 * 4096 * 2
