"""Rows of an embedding that ranks exchange are those of one that FSDP2 gathers, to the bit on two ranks."""

import embedding_checks
import pytest
import ranks


@pytest.mark.parametrize("way", embedding_checks.WAYS)
def test_two_ranks_have_every_bit_of_a_gathered_embedding(way):
    first, second = ranks.run(2, embedding_checks.compared, list(embedding_checks.CASES), way, seconds=200)
    for name in embedding_checks.CASES:
        for case in (first[name], second[name]):
            assert case["differs"] == [] and case["moved"], name
            assert case["exchanges"] == (9 if name == "synchronized once" else 3), name
        assert (first[name]["gradients"] + second[name]["gradients"] == 0) == (name == "frozen"), name


@pytest.mark.parametrize("way", embedding_checks.WAYS)
@pytest.mark.parametrize("world, names", [(3, ["fp32", "synchronized once"]), (4, ["HSDP", "a rank that keeps none"])])
def test_more_ranks_differ_by_the_order_of_a_sum_alone(world, names, way):
    for rank in ranks.run(world, embedding_checks.compared, names, way, True):
        assert {name: case["differs"] for name, case in rank.items()} == {name: [] for name in names}


@pytest.mark.parametrize("way", embedding_checks.WAYS)
def test_bytes_are_those_of_rows_of_others(way):
    """Rank 0 needs row 20 of rank 1, which is asked for it; rank 1 needs none of rank 0. Or 5 ids, rows, gradients."""
    first, second = ranks.run(2, embedding_checks.counted, way)
    row = 4 * embedding_checks.DIM
    if way == "counts":
        assert (first["rows"], first["gradients"]) == (row, 0)
        assert (second["rows"], second["gradients"]) == (8, row)
    else:
        assert {(rank["rows"], rank["gradients"]) for rank in (first, second)} == {(5 * (8 + row), 5 * row)}
    for rank in (first, second):
        assert rank["equal"] and rank["gradient"] == [0, 1, 2, 20, 21, 22]
        assert rank["twice"] == 1.0, "two tokens, the mean of two ranks"


def test_a_host_waits_for_counts_and_for_nothing_in_messages_of_one_size():
    for rank in ranks.run(2, embedding_checks.waits, "one size"):
        assert rank == []
    for rank in ranks.run(2, embedding_checks.waits, "counts"):
        assert {"_unique2", "bincount"} <= set(rank)


def test_ranks_may_have_fewer_tokens_than_messages_have_room_for():
    row = 4 * embedding_checks.DIM
    for rank in ranks.run(3, embedding_checks.uneven):
        assert rank["rows"] and rank["gradients"]
        assert rank["traffic"] == {"rows": 28 * (8 + row), "gradients": 28 * row, "exchanges": 2, "activations": 0}


@pytest.mark.parametrize("way", embedding_checks.WAYS)
def test_gradients_of_ranks_are_added_up_in_their_order(way):
    """In another order the 1 would be lost beside 2^30."""
    assert ranks.run(3, embedding_checks.in_order, way) == [pytest.approx(1.0)] * 3


def test_counts_are_chosen_where_messages_of_one_size_are_more_bytes_than_a_gather():
    """Of 40 rows, four ranks: 3 * 12 tokens are fewer bytes, 3 * 13 are not, and 13 are."""
    row, gathered = 2 * 4 * embedding_checks.DIM, 40 * 2 * 4 * embedding_checks.DIM
    for rank in ranks.run(4, embedding_checks.ways, [12, 13, 38, 39]):
        fixed, counts, most, gather = rank
        assert fixed[:3] == ("", True, 36 * (row + 8)) and counts[:3] == ("", False, 13 * (row + 8))
        assert most[:2] == ("", False) and gather[0] == "39 tokens may name as many bytes as its 40 rows have"
        said = f"bytes a micro-batch; gathered {gathered:,}"
        assert fixed[3] == f"0.weight: rows exchanged in messages of one size, 7,200 {said}"
        assert counts[3] == f"0.weight: rows exchanged, each once after counts, at most 2,600 {said}"


def test_what_a_head_tied_to_it_exchanges_counts_beside_rows():
    """Of 68 rows, four ranks: 13,056 bytes gathered; a token takes 708 of activations, and 600 of rows or 200 at most.

    So 9 tokens of a rank travel in messages of one size, up to 14 after counts, and 15 are as many bytes as a gather.
    """
    for rank in ranks.run(4, embedding_checks.tied_ways):
        assert rank == [(False, True), (False, False), (False, False), (True, False)]


def test_a_gather_is_chosen_where_it_is_fewer_bytes_or_others_read_the_weight():
    for rank in ranks.run(2, embedding_checks.choices):
        tied, padded, scaled, small, by_frequency, sparse, *apart = rank
        assert tied.startswith("other modules have it too") and padded.startswith("padding_idx")
        assert scaled.startswith("max_norm") and small == "8 tokens may name as many bytes as its 6 rows have"
        assert by_frequency == sparse == "its gradients are scaled by frequency, or sparse"
        own = "it or its gradients have a dtype of their own (param_dtype_override_fn, grad_dtype)"
        assert apart == [own, own, own, ""], "embedding and head, whose policy says so; an embedding alone"


def test_of_as_many_bytes_the_way_without_waiting_is_not_taken():
    """A row takes 192 bytes gathered, 200 of a token's row and id, 236 of a token's activations and their loss."""
    most, gathered = "24 tokens may name as many bytes as its 25 rows have", "activations of all ranks are as many"
    for rank in ranks.run(3, embedding_checks.as_many_bytes):
        assert rank[:4] == [("", False), ("", True), (most, False), ("", False)]
        assert rank[4:] == [(f"{gathered} bytes as its 59 rows", 11_328, 11_328), ("", 11_328, 11_520)]


def test_tokens_that_messages_have_no_room_for_travel_in_several():
    assert ranks.run(2, embedding_checks.more_than_one_message_holds) == [[True, True]] * 2


def test_gradients_that_were_kept_and_never_sent_are_no_part_of_a_later_step():
    for rank in ranks.run(2, embedding_checks.never_sent):
        assert len(rank) == 2 and all(said.startswith("gradients that micro-batches of the step") for said in rank)


def test_what_another_module_cannot_stand_for_is_gathered():
    """Under one of two names the old module would go on with a weight of its own; hooks would be lost."""
    names, hooks = "the model holds it under several names", "it has hooks, which a module in its place would not run"
    for rank in ranks.run(2, embedding_checks.replaced):
        assert rank == [
            f"two names: embed.weight: {names}",
            "two names: head.weight: ",
            f"a hook: embed.weight: {hooks}",
            "a hook: head.weight: ",
            "a hook of the head: embed.weight: ",
            f"a hook of the head: head.weight: {hooks}",
            "two names of the head: embed.weight: ",
            f"two names of the head: head.weight: {names}",
            f"a backward hook: embed.weight: {hooks}",
            "a backward hook: head.weight: ",
            "a hook before the backward: embed.weight: ",
            f"a hook before the backward: head.weight: {hooks}",
            "the model: weight: it is the model itself, and no module holds it",
        ]


def test_it_has_the_options_of_an_embedding_and_takes_no_others():
    options = ["padding_idx", "max_norm", "scale_grad_by_freq", "sparse"]
    for rank in ranks.run(2, embedding_checks.options):
        assert rank["same"] and {*options, "num_embeddings", "embedding_dim", "norm_type"} == {*rank["names"]}
        for name in options:
            assert rank[name].startswith(f"{name}=") and rank[name].endswith("set it before shard_embedding_")


def test_what_cannot_be_is_refused():
    for rank in ranks.run(2, embedding_checks.refusals):
        assert rank == [
            "ValueError: tokens=0: give how many tokens a rank has in a micro-batch, at least 1",
            "IndexError: ids: the embedding has 40 rows, and one of 40 is asked",
            "IndexError: ids: -1 names no row",
            "TypeError: ids.dtype=torch.float32: rows are named by integers; give int64",
        ]


def test_meshes_and_models_that_cannot_be_are_refused():
    for mesh, embedding, head, truths in ranks.run(2, embedding_checks.refused_models):
        assert mesh == (
            "ValueError: mesh has the dimensions ('pp', 'replicate', 'shard'): give that of fully_shard, one or two"
        )
        asked = "call shard_embedding_ before fully_shard, on"
        assert embedding == f"ValueError: 0.weight is a DTensor: {asked} weights that every rank holds"
        assert head == f"ValueError: 0.weight is a DTensor: {asked} whole weights"
        assert truths == "TypeError: ids.dtype=torch.bool: rows are named by integers; give int64"


@pytest.mark.parametrize("world", [2, 3])
def test_what_one_rank_asks_for_that_is_no_row_raises_on_every_rank(world):
    found = ranks.run(world, embedding_checks.wrong_on_one, seconds=60)
    own = ["ids: the embedding has 41 rows, and one of 41 is asked", "ids: -1 names no row"]
    kinds = ["IndexError", "IndexError", *["TypeError"] * 5, "ValueError", *["TypeError"] * 5]
    assert [text.partition(":")[0] for text in found[1]] == 2 * kinds
    assert [text.partition(": ")[2] for text in found[1][:2]] == own and found[1][13:] == found[1][:13]
    told = "IndexError: ids of rank 1 of those that share the embedding name no row; it says which"
    assert [said for rank, said in enumerate(found) if rank != 1] == [[told] * 26] * (world - 1)
