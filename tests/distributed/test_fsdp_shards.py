"""How FSDP2 splits a weight's rows, and the tiles that begin in each rank's: one message size, every row once."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from halfbyte.distributed.fsdp_columns import Columns
from halfbyte.distributed.fsdp_phase import EVERYTHING, Mode, Phase
from halfbyte.distributed.fsdp_shards import RowShards
from halfbyte.distributed.fsdp_weight import ShardState
from halfbyte.spec import MXFP8, NVFP4


@pytest.mark.parametrize("rows", [1, 3, 15, 16, 17, 37, 64, 83, 160, 1037])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 15, 17, 33, 61])
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


def test_the_message_of_many_ranks_is_that_of_the_one_that_sends_most():
    """Which is the first, whatever the rows: asking every rank took a plan of 1,000,000 GPUs 40 s."""
    for rows in range(1, 400, 7):
        for world in (*range(1, 70), 500):
            chunk = -(-rows // world)
            begun = Counter(row // chunk for row in range(0, rows, 16))
            assert RowShards(rows, 16, world, 0).sent_tile_rows == max(begun.values()), (rows, world)


def test_bytes_of_a_message():
    assert RowShards(4096, 4096, 8, 3).message_bytes == 512 * 2048 + 32 * 256
    assert RowShards(37, 40, 4, 0).message_bytes == 10 * 24 + 1 * 3  # 10 rows of 3 blocks, one row of tiles at most
    assert 8 * RowShards(4096, 4096, 8, 0).message_bytes <= 0.255 * 4096 * 4096 * 2


@pytest.mark.parametrize("spec", [NVFP4(), MXFP8()], ids=["NVFP4", "MXFP8"])
@pytest.mark.parametrize("rows", [1, 3, 15, 16, 17, 33, 37, 64, 83, 160])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_every_block_of_columns_is_whole_on_one_rank(spec, rows, world):
    length = spec.block_length
    ranks = [Columns.of(spec, RowShards(rows, 40, world, rank)) for rank in range(world)]
    held = [list(range(*one.shards.rows_of(one.shards.rank))) for one in ranks]
    leading = [one.leading(rank) for rank, one in enumerate(ranks)]
    complete = [own[count:] for own, count in zip(held, leading, strict=True)]
    for rank, (own, count) in enumerate(zip(held, leading, strict=True)):
        if count:
            complete[ranks[rank].owner(rank)] += own[:count]  # in the order of ranks, as they arrive
    begun = [[row for row in own if row % length == 0] for own in held]
    assert complete == [[r for b in own for r in range(b, min(b + length, rows))] for own in begun]
    assert {one.shapes for one in ranks} == {
        ((40, max(map(len, begun)) * spec.format.block_bytes), (40, max(map(len, begun))))
    }
    received = torch.full((world, 40, max(map(len, begun))), 255, dtype=torch.uint8)
    for rank, own in enumerate(begun):
        received[rank, :, : len(own)] = torch.tensor([row // length for row in own], dtype=torch.uint8)
    out = torch.empty(40, -(-rows // length), dtype=torch.uint8)
    ranks[0].join(received.view(world * 40, -1), out)
    assert out.tolist() == [list(range(-(-rows // length)))] * 40


def test_bytes_of_columns():
    shards = RowShards(4096, 4096, 8, 3)
    assert Columns.of(NVFP4(), shards).message_bytes == 4096 * (512 // 16) * 9 == 0.28125 * 512 * 4096 * 2
    assert Columns.of(MXFP8(), shards).message_bytes == 4096 * (512 // 32) * 33 == 0.515625 * 512 * 4096 * 2


class Sharded:
    """Stands for a DTensor."""

    def __init__(self, local):
        self._local_tensor, self._version = local, 0

    def is_inference(self):
        return False


@pytest.mark.parametrize("is_inference", (False, True))
def test_a_shard_is_known_until_its_memory_or_a_version_is_another(is_inference):
    with torch.inference_mode(is_inference):
        param, same = Sharded(torch.zeros(4)), torch.zeros(4)
    seen = ShardState.of(param)
    assert seen.is_that_of(param)
    param._version += 1
    assert not seen.is_that_of(param)
    seen = ShardState.of(param)
    param._local_tensor = same
    assert not seen.is_that_of(param)
    seen = ShardState.of(param)
    assert seen.is_that_of(param) and not seen.is_that_of(Sharded(same))
    if is_inference:  # such tensors count nothing
        return
    same.add_(1)
    assert not seen.is_that_of(param)
    seen = ShardState.of(param)
    same.data = torch.zeros(4)
    assert not seen.is_that_of(param)
    seen = ShardState.of(param)
    same.data = same.data.view(torch.int32)
    assert not seen.is_that_of(param)


class Gathers:
    """Stands for a group of FSDP2's parameters, of which one has the module and name `place`."""

    def __init__(self, place, reshards):
        module, name = place
        info = SimpleNamespace(module=module, param_name=name)
        self.fsdp_params, self._reshard_after_forward = [Parameter(_module_info=info)], reshards
        self._training_state = SimpleNamespace(name="PRE_BACKWARD")


class Parameter(SimpleNamespace):
    """One of them; a SimpleNamespace of types alone has no weak references."""


PLACE = object(), "weight"


@pytest.mark.parametrize(
    ("reshards", "has_gradients", "wanted"),
    [(True, True, {"forward"}), (True, False, {"forward"}), (False, True, EVERYTHING), (False, False, {"forward"})],
)
def test_a_forward_brings_the_backward_along_where_weights_stay_and_a_backward_comes(reshards, has_gradients, wanted):
    mode = Mode()
    mode.has_gradients = has_gradients
    group = Gathers(PLACE, reshards)
    assert Phase(group, PLACE, mode).wanted() == wanted
    assert Phase(None, PLACE, mode).wanted() == Phase(group, (PLACE[0], "bias"), mode).wanted() == EVERYTHING


@pytest.mark.parametrize(
    ("state", "runs_again", "wanted"),
    [("PRE_BACKWARD", False, {"backward"}), ("PRE_BACKWARD", True, EVERYTHING), ("FORWARD", False, EVERYTHING)],
)
def test_a_backward_brings_the_forward_along_where_it_runs_again(state, runs_again, wanted):
    """Autograd tells a backward; a forward within it is one that checkpointing repeats."""
    group, found = Gathers(PLACE, True), []
    phase = Phase(group, PLACE, Mode())
    group._training_state.name, phase.runs_again = state, runs_again
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda grad: found.append(phase.wanted()))
    (2 * x).sum().backward()
    assert found == [wanted]
