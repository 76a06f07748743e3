"""Rows of an embedding that ranks exchange are those of one that FSDP2 gathers, to the bit on two ranks."""

import embedding_checks
import pytest
import ranks


def test_two_ranks_have_every_bit_of_a_gathered_embedding():
    first, second = ranks.run(2, embedding_checks.compared, list(embedding_checks.CASES), seconds=200)
    for name in embedding_checks.CASES:
        for case in (first[name], second[name]):
            assert case["differs"] == [] and case["moved"], name
            assert case["exchanges"] == (9 if name == "synchronized once" else 3), name
        assert (first[name]["gradients"] + second[name]["gradients"] == 0) == (name == "frozen"), name


@pytest.mark.parametrize("world, names", [(3, ["fp32", "synchronized once"]), (4, ["HSDP", "a rank that keeps none"])])
def test_more_ranks_differ_by_the_order_of_a_sum_alone(world, names):
    for rank in ranks.run(world, embedding_checks.compared, names, True):
        assert {name: case["differs"] for name, case in rank.items()} == {name: [] for name in names}


def test_bytes_are_those_of_rows_of_others():
    """Rank 0 needs row 20 of rank 1, which is asked for it; rank 1 needs none of rank 0."""
    first, second = ranks.run(2, embedding_checks.counted)
    row = 4 * embedding_checks.DIM
    assert (first["rows"], first["gradients"]) == (row, 0)
    assert (second["rows"], second["gradients"]) == (8, row)
    for rank in (first, second):
        assert rank["equal"] and rank["gradient"] == [0, 1, 2, 20, 21, 22]
        assert rank["twice"] == 1.0, "two tokens, the mean of two ranks"


def test_a_gather_is_chosen_where_it_is_fewer_bytes_or_others_read_the_weight():
    for rank in ranks.run(2, embedding_checks.choices):
        tied, padded, scaled, small = rank
        assert tied.startswith("other modules have it too") and padded.startswith("padding_idx")
        assert scaled.startswith("max_norm") and small == "8 tokens may name as many bytes as its 6 rows have"


def test_what_cannot_be_is_refused():
    for rank in ranks.run(2, embedding_checks.refusals):
        assert rank == [
            "ValueError: tokens=0: give how many tokens a rank has in a micro-batch, at least 1",
            "IndexError: ids: the embedding has 40 rows, and one of 40 is asked",
            "IndexError: ids: -1 names no row",
        ]
