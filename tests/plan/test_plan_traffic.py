"""Bytes and seconds of collectives in `halfbyte plan`: ZeroOptimizer's own counts, and sums made by hand."""

import pytest

from bench.records import load
from halfbyte.plan import PlanRequest, plan
from halfbyte.plan.calibration import NETWORK_SHARE, NVLINK_SHARE
from halfbyte.plan.hardware import H200
from halfbyte.plan.traffic import Collective, Group

MEASURED = {
    (r.values["model"], r.values["world"], r.values.get("vocabulary", 32_000), r.values["weights"]): r
    for r in load()
    if r.values["case"] == "zero/step"
}


def sent(request: PlanRequest) -> dict[tuple[str, str], Collective]:
    return {(c.what, c.phase): c for c in plan(request).collectives}


@pytest.mark.parametrize("key", MEASURED, ids=lambda key: "-".join(map(str, key)))
def test_zero_gathers_and_reduces_the_bytes_that_it_counted(key):
    model, world, vocabulary, weights = key
    request = PlanRequest(
        model=model,
        gpus=world,
        mesh=f"dp_shard={world}",
        sharding="zero1",
        gather="nvfp4" if weights == "nvfp4" else "bf16",
        vocabulary=vocabulary,
        high_precision_blocks=0.0,
        sequence=128,
        kernels="eager",
    )
    found, values = sent(request), MEASURED[key].values
    assert found["weights", "forward"].message == values["gathered_bytes"]
    assert found["gradients", "backward"].message == pytest.approx(values["reduced_bytes"], rel=1e-6)


def test_sharded_weights_travel_as_codes_and_one_byte_a_tile():
    common = {
        "model": "llama3-8b",
        "gpus": 16,
        "mesh": "dp_replicate=2,dp_shard=8",
        "recipe": "nvfp4@all",
        "accumulate": 3,
    }
    coded, plain = (sent(PlanRequest(**common, gather=gather)) for gather in ("nvfp4", "bf16"))
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    edges, norms = 2 * 128_256 * 4096 + 4096, 32 * 2 * 4096
    assert plain["weights", "backward"].message == 3 * 2 * (32 * block + norms)
    assert plain["weights", "forward"].message == 3 * 2 * (32 * block + norms + edges)
    assert coded["weights", "backward"].message == 3 * (32 * block * (1 / 2 + 1 / 256) + 2 * norms)
    assert plain["gradients", "backward"].message == 3 * 2 * 8_030_261_248
    across = plain["gradients of shards", "backward"]
    assert (
        across.message == 2 * 8_030_261_248 / 8
        and across.verb == "all-reduce"
        and across.group == Group(size=2, stride=8)
    )
    assert across.wire == across.message  # twice, and half of it is the rank's own


def test_blocks_of_a_row_travel_as_codes_and_before_the_backward_as_it_reads_them():
    common = {"model": "llama3-8b", "gpus": 8, "mesh": "dp_shard=8"}
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    norms = 32 * 2 * 4096
    rows, values = 32 * block * (1 / 2 + 1 / 16) + 2 * norms, 2 * (32 * block + norms)
    bytes_of_mxfp8 = 32 * block * (1 + 1 / 32) + 2 * norms
    backward = {"rl": rows, "quartet2": rows, "naive_fp4": rows, "nvfp4_forward": values, "mxfp8": values}
    for recipe, expected in (backward | {"nvfp4_mxfp8_bwd": bytes_of_mxfp8}).items():
        found = sent(PlanRequest(**common, recipe=f"{recipe}@all"))
        assert found["weights", "backward"].message == expected, recipe
        each = 2 if recipe == "mxfp8" else 1 / 2 + 1 / 16
        edges = 128_256 * 4096 * (2 + each) + 2 * 4096  # the head follows the recipe
        assert found["weights", "forward"].message - edges == 32 * block * each + 2 * norms, recipe


def test_blocks_in_high_precision_travel_in_bf16():
    common = {"model": "llama3-8b", "gpus": 8, "mesh": "dp_shard=8"}
    some, every = (
        sent(PlanRequest(**common, recipe=recipe))["weights", "backward"].message for recipe in ("nvfp4", "nvfp4@all")
    )
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    assert some - every == 5 * block * (2 - 1 / 2 - 1 / 256)  # 15 % of 32 blocks, rounded up


def test_rows_that_ranks_do_not_divide_are_filled_up():
    """llama3-70b on 3,000 ranks: 8,192 rows are three of each, 1,024 are one, 28,672 ten, 128,256 words 43."""
    common = {"model": "llama3-70b", "gpus": 3000, "mesh": "dp_shard=3000", "recipe": "nvfp4@all"}
    coded, plain = (sent(PlanRequest(**common, gather=gather)) for gather in ("nvfp4", "bf16"))
    q, kv, gate, down = 9000 * 8192, 3000 * 8192, 30_000 * 8192, 9000 * 28_672  # and o as q, up as gate
    block, norms = 2 * q + 2 * kv + 2 * gate + down, 80 * 2 * 9000
    words = 3000 * 43 * 8192
    assert plain["weights", "backward"].message == 2 * (80 * block + norms)
    assert plain["weights", "forward"].message == 2 * (80 * block + norms + 2 * words + 9000)
    assert plain["gradients", "backward"].message == 2 * (80 * block + norms + 2 * words + 9000)
    # At most one row of tiles begins in up to 16 rows: every message has room for one.
    scales = 3000 * (2 * 512 + 2 * 512 + 2 * 512 + 1792)
    assert coded["weights", "backward"].message == 80 * (block / 2 + scales) + 2 * norms
    head = words / 2 + 3000 * 3 * 512  # 43 rows from a rank's first: three rows of tiles begin in some
    assert coded["weights", "forward"].message - coded["weights", "backward"].message == head + 2 * (words + 9000)


def test_words_are_filled_up_behind_those_that_tensor_parallelism_leaves():
    """128,256 words over 8 are 16,032 for each, over 128 ranks 126 of each."""
    common = {"model": "llama3-70b", "gpus": 1024, "mesh": "dp_shard=128,tp=8", "recipe": "bf16"}
    found = sent(PlanRequest(**common))
    edges = found["weights", "forward"].message - found["weights", "backward"].message
    assert edges == 2 * (2 * 126 * 128 * 8192 + 8192 / 8)


def test_words_that_tensor_parallelism_does_not_divide_are_those_of_the_rank_that_has_most():
    """1,001 words over 8 are 126 for some, over 5 ranks 26 of each; of 8,192 elements of a norm each has 1,639."""
    found = sent(PlanRequest(model="llama3-70b", gpus=40, mesh="dp_shard=5,tp=8", recipe="bf16", vocabulary=1001))
    edges = found["weights", "forward"].message - found["weights", "backward"].message
    assert edges == 2 * (2 * 26 * 5 * 8192 + 1639 * 5 / 8)


def test_parts_of_layers_are_of_the_side_that_tensor_parallelism_splits():
    """Rows that 3,000 ranks fill up tell it: 1,024 of q, 128 of k and v, 3,584 of gate and up; 8,192 of o and down."""
    found = sent(PlanRequest(model="llama3-70b", gpus=24_000, mesh="dp_shard=3000,tp=8", recipe="bf16"))
    by_rows = (3000 + 2 * 3000 + 2 * 6000) * 8192
    by_columns = 9000 * (8192 // 8 + 28_672 // 8)
    assert found["weights", "backward"].message == 2 * 80 * (by_rows + by_columns + 2 * 9000)


def test_experts_that_ranks_do_not_divide_are_filled_up():
    """What expert parallelism leaves is split by experts: of 128, each of 300 ranks has one or none."""
    found = sent(PlanRequest(model="deepseek-v3", gpus=600, mesh="dp_shard=600,ep=2", recipe="bf16"))
    each = 3 * 2048 * 7168
    assert found["weights of experts", "forward"].message == 58 * 2 * 300 * each
    assert found["gradients of experts", "backward"].message == 58 * 2 * 300 * each


def test_what_tensor_and_expert_parallelism_share_travels_in_values():
    """As `fsdp_gather_nvfp4_` leaves it: parts of weights, and experts that ranks share; other weights are codes."""
    common = {"model": "llama3-8b", "gpus": 8, "mesh": "dp_shard=4,tp=2"}
    by_itself, plain = (sent(PlanRequest(**common, gather=gather)) for gather in ("auto", "bf16"))
    assert by_itself == plain
    with pytest.raises(ValueError, match=r"gather='nvfp4' with tp=2: parts of tensor-parallel weights .* use gather="):
        plan(PlanRequest(**common, gather="nvfp4"))
    common = {"model": "deepseek-v3", "gpus": 64, "mesh": "dp_shard=64,ep=8", "recipe": "nvfp4@all"}
    coded, plain = (sent(PlanRequest(**common, gather=gather)) for gather in ("nvfp4", "bf16"))
    assert coded["weights of experts", "forward"] == plain["weights of experts", "forward"]
    assert coded["weights", "backward"].message < 0.3 * plain["weights", "backward"].message


def test_without_a_policy_what_is_no_code_travels_in_fp32():
    common = {"model": "llama3-8b", "gpus": 16, "mesh": "dp_replicate=2,dp_shard=8", "values": "fp32"}
    plain, coded = (sent(PlanRequest(**common, recipe=recipe)) for recipe in ("bf16", "nvfp4"))
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    edges, norms = 2 * 128_256 * 4096 + 4096, 32 * 2 * 4096
    assert plain["weights", "backward"].message == 4 * (32 * block + norms)
    assert plain["weights", "forward"].message == 4 * (32 * block + norms + edges)
    assert coded["weights", "backward"].message == 27 * block * (1 / 2 + 1 / 256) + 4 * (5 * block + norms)
    for found in (plain, coded):
        assert found["gradients", "backward"].message == 4 * 8_030_261_248
        assert found["gradients of shards", "backward"].message == 4 * 8_030_261_248 / 8


@pytest.mark.parametrize("gather", ["bf16", "nvfp4"])
def test_embedding_and_head_travel_once_in_each_forward(gather):
    head = 128_256 * 4096
    expected = {  # (recipe, tp): a head that follows no recipe travels in bf16
        ("nvfp4", 1): 2 * (2 * head + 4096),
        ("bf16", 2): 2 * (2 * head + 4096) / 2,
        ("nvfp4@all", 1): 2 * (head + 4096) + head * (2 if gather == "bf16" else 1 / 2 + 1 / 256),
    }
    for (recipe, tp), edges in expected.items():
        mesh = f"dp_shard={8 // tp},tp={tp}"
        how = gather if recipe != "bf16" else "bf16"
        found = sent(PlanRequest(model="llama3-8b", gpus=8, mesh=mesh, recipe=recipe, gather=how, accumulate=3))
        forward, backward = (found["weights", phase].message for phase in ("forward", "backward"))
        assert forward - backward == 3 * edges


SHAPES = {"1b": (16, 2048, 8192, 32), "3b": (28, 3072, 8192, 24), "8b": (32, 4096, 14_336, 32)}
"""Blocks, width, width of the MLP, heads, of which 8 are of keys and values; a vocabulary of 128,256."""


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("tokens", [8192, 16_384])
def test_of_a_whole_model_a_quarter_travels_where_ranks_share_embedding_and_head(model, tokens):
    blocks, dim, hidden, heads = SHAPES[model]
    matrices = blocks * (2 * dim**2 + 2 * dim * 8 * dim // heads + 3 * dim * hidden)
    norms, table = blocks * 2 * dim, 128_256 * dim
    common = {"model": model, "gpus": 4, "mesh": "dp_shard=4", "sequence": tokens, "recipe": "nvfp4@all"}
    coded, plain = sent(PlanRequest(**common, head="shared")), sent(PlanRequest(**common, gather="bf16"))
    gathered, values = (
        sum(found["weights", phase].message for phase in ("forward", "backward")) for found in (coded, plain)
    )
    assert gathered == 2 * (0.25 + 1 / 512) * 2 * matrices + 2 * 2 * norms + 2 * dim, "embedding and head: nothing"
    assert gathered / values <= 0.27
    rows, activations = coded["rows of the embedding", "forward"], coded["activations of the head", "forward"]
    gradients = coded["gradients of rows", "backward"]
    assert rows.wire == 3 * tokens * (2 * dim + 8) and gradients.wire == 3 * tokens * 2 * dim, "of all ranks' tokens"
    assert activations.wire == 3 * tokens * (2 * dim + 44)
    assert coded["gradients of activations", "backward"].wire == 3 * tokens * 2 * dim
    tables = table if model != "8b" else 2 * table
    assert plain["gradients", "backward"].message - coded["gradients", "backward"].message == 2 * tables


def test_without_a_policy_rows_of_an_embedding_travel_in_fp32():
    """As those of `shard_embedding_` do, whose weights are fp32; of the head activations travel, autocast's bf16."""
    common = {"model": "8b", "gpus": 4, "mesh": "dp_shard=4", "sequence": 8192, "recipe": "nvfp4@all", "head": "shared"}
    narrow, wide = (sent(PlanRequest(**common, values=values)) for values in ("bf16", "fp32"))
    assert narrow.keys() == wide.keys() and wide["rows of the embedding", "forward"].verb == "all-to-all"
    tokens, dim = 4 * 8192, 4096
    assert wide["rows of the embedding", "forward"].message == tokens * (4 * dim + 8)
    assert wide["gradients of rows", "backward"].message == tokens * 4 * dim
    for key in (("activations of the head", "forward"), ("gradients of activations", "backward")):
        assert wide[key] == narrow[key]


def test_gradients_that_are_reduced_in_fp32_make_a_gather_dearer():
    """Of 16,384 tokens of two ranks and 32,000 words activations are more than bf16's gather, and fewer than fp32's."""
    common = {"model": "1b", "gpus": 2, "mesh": "dp_shard=2", "sequences": 8, "sequence": 2048, "vocabulary": 32_000}
    narrow, wide = (
        sent(PlanRequest(**common, recipe="nvfp4@all", head="shared", reduce=reduce)) for reduce in ("bf16", "fp32")
    )
    exchanged = {"rows of the embedding", "activations of the head"}
    assert {what for what, _ in narrow} & exchanged == set() and {what for what, _ in wide} >= exchanged
    tokens, dim = 16_384, 2048
    rows = wide["gradients of rows", "backward"]
    assert rows.verb == "all-gather" and rows.message == 2 * tokens * 2 * dim, "of both ranks' tokens, as rows travel"
    many = PlanRequest(model="8b", gpus=32, mesh="dp_shard=32", recipe="nvfp4@all", head="shared", reduce="fp32")
    counted = sent(many)["gradients of rows", "backward"]
    assert counted.verb == "all-to-all" and counted.message == 8192 * 4 * 4096, "as they are added up"
    gathered = (sent(PlanRequest(**common, recipe="bf16", reduce=reduce)) for reduce in ("bf16", "fp32"))
    one, two = (found["gradients", "backward"].message for found in gathered)
    assert two == 2 * one


def test_embedding_and_head_are_gathered_where_that_is_fewer_bytes():
    """8,192 tokens of 32 ranks are more than the rows of a head, and those of one rank more than 4,096 words."""
    common = {"recipe": "nvfp4@all", "head": "shared", "sequence": 8192}
    many = sent(PlanRequest(model="8b", gpus=32, mesh="dp_shard=32", **common))
    assert ("rows of the embedding", "forward") in many and ("activations of the head", "forward") not in many
    counted, dim = many["rows of the embedding", "forward"], 4096
    assert counted.message == 8192 * (2 * dim + 8), "at most: those of 31 ranks' tokens are more than the rows"
    assert many["gradients of rows", "backward"].message == 8192 * 2 * dim
    small = sent(PlanRequest(model="10m", gpus=2, mesh="dp_shard=2", **common))
    assert not {what for what, _ in small} & {"rows of the embedding", "activations of the head"}
    with pytest.raises(ValueError, match="head='shared' with sharding='none', tp=1: ranks that share weights"):
        plan(PlanRequest(model="8b", gpus=2, mesh="dp_replicate=2", head="shared"))


def test_tensor_and_expert_parallelism_exchange_activations():
    request = PlanRequest(model="deepseek-v3", gpus=64, mesh="dp_shard=32,tp=2,ep=8", accumulate=2)
    found = sent(request)
    tokens = 8192
    assert found["activations", "forward"].message == 2 * 61 * 4 * tokens * 7168 * 2
    assert found["activations", "backward"].message == 2 * 61 * 6 * tokens * 7168 * 2
    experts = found["tokens of experts", "forward"]
    assert experts.message == 2 * 58 * 2 * (tokens / 2) * 8 * 7168 * 2 and experts.group == Group(size=8, stride=2)
    assert found["weights of experts", "forward"].group == Group(size=4, stride=16)
    assert not experts.is_hidden and found["weights of experts", "forward"].is_hidden
    full = sent(PlanRequest(**{**vars(request), "recompute": "full"}))
    assert full["tokens of experts", "backward"].message == 2 * experts.message
    assert full["activations", "backward"].message == 2 * 61 * 10 * tokens * 7168 * 2


def seconds(verb: str, size: int, stride: int, message: float = 1e9) -> float:
    group = Group(size=size, stride=stride)
    return Collective(what="x", verb=verb, phase="step", group=group, message=message, is_hidden=False).seconds(H200)


def test_a_collective_takes_its_slowest_link():
    nvlink, network = 450e9 * NVLINK_SHARE.value, 50e9 * NETWORK_SHARE.value
    assert seconds("all-gather", 4, 1) == pytest.approx(0.75e9 / nvlink)
    assert seconds("all-reduce", 4, 1) == pytest.approx(1.5e9 / nvlink)
    assert seconds("all-gather", 16, 8) == pytest.approx(15 / 16 * 1e9 / network)  # one rank a node
    assert seconds("all-reduce", 16, 8) == pytest.approx(2 * 15 / 16 * 1e9 / network)
    assert seconds("all-gather", 16, 1) == pytest.approx(max(15 / 16 * 1e9 / nvlink, 0.5e9 / (8 * network)))
    assert seconds("all-gather", 1024, 4) == pytest.approx(511 / 512 * 1e9 / (2 * network))  # two a node
    assert seconds("all-to-all", 16, 1) == pytest.approx(0.5e9 / network)
    assert seconds("all-to-all", 8, 1) == pytest.approx(7 / 8 * 1e9 / nvlink)


def test_one_gpu_sends_nothing():
    assert plan(PlanRequest(model="1b", gpus=1, mesh="dp_shard=1", sequence=128)).collectives == ()
