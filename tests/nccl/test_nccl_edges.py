"""Over NCCL too, ranks that share embedding and head learn what they learn of gathered ones, and no host waits."""

import embedding_checks
import head_checks
import pytest
import test_head
from jobs import asks, job

WORLDS = (2, 4)
NAMES = ["fp32", "bf16 gathers, fp32 sums", "few rows, named often", "a rank that keeps none", "synchronized once"]
WAYS = embedding_checks.WAYS


@asks(*[job(2, embedding_checks.compared, list(embedding_checks.CASES), way, name=way) for way in WAYS])
def test_two_ranks_have_every_bit_of_a_gathered_embedding(found):
    for rank in found:
        assert {name: case["differs"] for name, case in rank.items()} == {name: [] for name in rank}
        assert all(case["moved"] for case in rank.values())


@asks(*[job(4, embedding_checks.compared, [*NAMES, "HSDP"], way, True, name=way) for way in WAYS])
def test_more_ranks_differ_by_the_order_of_a_sum_alone(found):
    for rank in found:
        assert {name: case["differs"] for name, case in rank.items()} == {name: [] for name in rank}


@asks(*[job(world, head_checks.losses) for world in WORLDS])
def test_a_loss_is_that_of_64_bits(found):
    alone = test_head.in_64_bits()
    for rank, cases in enumerate(found):
        for (kind, _), (loss, gradient), (expected, exact) in zip(head_checks.KINDS, cases, alone[rank], strict=True):
            said = f"{kind} on rank {rank}: "
            test_head.close_to(loss, expected, rtol=3e-7, atol=0.0, said=said)
            test_head.close_to(gradient, exact * (rank + 2), rtol=2e-5, atol=1e-6, said=said)


@asks(*[job(world, head_checks.unwaited, 90 * world) for world in WORLDS])
def test_hosts_wait_for_nothing(found):
    """An error on a GPU, where one does."""
    row, tokens = 4 * head_checks.DIM, 16 * (len(found) - 1)
    for losses, traffic in found:
        assert losses == [pytest.approx(losses[0], rel=0.2)] * 4
        assert traffic["rows"] == 4 * tokens * (8 + row) and traffic["gradients"] == 4 * tokens * row
