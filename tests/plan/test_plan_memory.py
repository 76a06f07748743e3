"""What `halfbyte plan` says a GPU holds, against sums made by hand."""

import pytest

from halfbyte import recipes
from halfbyte.plan import PlanRequest, held, kept, plan
from halfbyte.plan import architecture as models

GIB = 2**30


def compiled_block_by_hand(recipe: str, word: int) -> int:
    """Bytes per token that a compiled block of 1b keeps: dim 2048, hidden 8192, 512 columns of k and of v.

    Residual inputs of two norms with a factor each; q, k, v, attention's output and its sums for 32 heads; gate and up;
    and what the linear layers keep of their four inputs, where attention's output is one of them in bf16.
    """
    norms = 2 * (2048 * word + 4)
    attention = 2 * (2048 + 2 * 512) + 32 * 4
    activation = 2 * 2 * 8192
    inputs = 2048 + 2048 + 2048 + 8192
    share = {"bf16": 2, "nvfp4": 0.5625, "nvfp4_mxfp8_bwd": 1.03125}[recipe]
    output = 0 if recipe == "bf16" else 2 * 2048
    return norms + attention + activation + inputs * share + output


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "nvfp4_mxfp8_bwd"])
def test_a_compiled_block_keeps_what_adds_up_by_hand(recipe):
    shape = models.find_architecture("1b")
    found = kept.kept(shape, shape.kinds[0], recipes.get(recipe), 128, "fp32")
    assert found.per_token == pytest.approx(compiled_block_by_hand(recipe, 4), abs=1)
    copies = {"bf16": 2, "nvfp4": 0.5625, "nvfp4_mxfp8_bwd": 1.03125}[recipe]
    weights = sum(m.numel for m in shape.matrices(shape.kinds[0]))
    assert found.weights == pytest.approx(copies * weights, rel=0.002) and found.again == 0


def test_an_eager_block_keeps_what_activations_return_too():
    shape = models.find_architecture("1b")
    arguments = (shape, shape.kinds[0], recipes.get("nvfp4"), 128, "bf16")
    compiled, eager = (kept.kept(*arguments, compiled=flag).per_token for flag in (True, False))
    assert compiled == pytest.approx(compiled_block_by_hand("nvfp4", 2), abs=1)
    assert eager - compiled == 2 * 8192  # silu(gate)


def test_checkpoints_keep_inputs_and_hold_the_rest_of_one_block_again():
    shape = models.find_architecture("1b")
    arguments = (shape, shape.kinds[0], recipes.get("nvfp4"), 128, "bf16")
    whole = kept.kept(*arguments, compiled=False)
    full = kept.kept(*arguments, recompute="full", compiled=False)
    assert (full.per_token, full.weights) == (2 * 2048, 0) and full.again == whole.per_token - 2 * 2048
    some = kept.kept(*arguments, recompute="selective", compiled=False)
    # codes in both orientations of the four inputs, all that GEMMs and attention return, and the block's own input
    codes = 2 * 0.5625 * (3 * 2048 + 8192)
    returned = 2 * (2048 + 2 * 512 + 2048 + 2 * 8192 + 2048) + 2 * 2048 + 32 * 4
    assert some.per_token == pytest.approx(codes + returned + 2 * 2048, rel=0.001)
    assert some.weights == pytest.approx(2 * 0.5625 * sum(m.numel for m in shape.matrices(shape.kinds[0])), rel=0.01)


def test_a_sharded_run_holds_what_adds_up_by_hand():
    found = plan(
        PlanRequest(model="llama3-70b", gpus=64, mesh="dp_replicate=2,dp_shard=8,tp=4", sequence=4096, sequences=2)
    )
    at = found.moments[0].bytes
    numel = 70_553_706_496
    edges = 2 * 128_256 * 8192 + 8192
    norms = 80 * 2 * 8192
    own = ((numel - norms - edges) / 4 + norms + edges / 4) / 8
    assert at["masters"] == pytest.approx(4 * own, rel=1e-6) and at["optimizer moments"] == pytest.approx(8 * own)
    block = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672
    whole = block / 4 + 2 * 8192
    assert at["gathered layers"] == pytest.approx(2 * 2 * whole + 2 * edges / 4, rel=1e-6)  # the last 12 stay in bf16
    assert at["logits and loss"] == 12 * 2 * 4096 * 128_256 / 4
    assert at["gradients"] == 0
    tables = 80 * 4 * 8192 * 128 * 2 / 4  # cosines and sines in bf16, for q and for k
    codes = 0.5625 * 68 * block / 4  # 12 blocks stay in bf16
    assert at["weights"] == pytest.approx(codes + tables / 2, rel=0.001)  # of parts of weights nothing comes as codes
    early, head = found.moments[2].bytes, 128_256 * 8192 / 4
    assert early["gathered layers"] == pytest.approx(2 * whole + 2 * edges / 4 + 2 * (2 * whole + head), rel=1e-6)
    assert early["gradients"] == pytest.approx(4 * own)
    assert found.moments[3].bytes["gradients"] == pytest.approx(4 * own)
    again = plan(PlanRequest(model="llama3-70b", gpus=64, mesh="dp_shard=16,tp=4", gather="bf16", accumulate=2))
    assert again.moments[0].bytes["gathered layers"] == pytest.approx(4 * (block / 4 + 2 * 8192) + 2 * edges / 4)
    assert again.moments[0].bytes["weights"] == pytest.approx(codes + tables, rel=0.001)
    assert again.moments[0].bytes["gradients"] == pytest.approx(4 * own / 2)


def test_what_travels_in_fp32_is_held_in_fp32():
    common = {"model": "llama3-8b", "gpus": 8, "mesh": "dp_shard=8", "recompute": "full", "recipe": "bf16"}
    plain, wide = (plan(PlanRequest(**common, values=values)).moments for values in ("bf16", "fp32"))
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    edges, head = 2 * 128_256 * 4096 + 4096, 128_256 * 4096
    assert wide[0].bytes["gathered layers"] == 4 * (2 * block + edges)
    assert wide[1].bytes["gathered layers"] == 4 * (2 * block + edges) + 4 * (2 * block + head)
    assert wide[2].bytes["gathered layers"] == 4 * (block + edges) + 4 * (2 * block + head)
    for one, two in zip(plain, wide, strict=True):
        assert {k: v for k, v in one.bytes.items() if k != "gathered layers"} == {
            k: v for k, v in two.bytes.items() if k != "gathered layers"
        }
        assert two.bytes["gathered layers"] == 2 * one.bytes["gathered layers"]


def test_gradients_on_their_way_are_held_as_they_are_reduced():
    common = {"model": "llama3-8b", "gpus": 8, "mesh": "dp_shard=8", "recompute": "full", "recipe": "bf16"}
    plain, wide = (plan(PlanRequest(**common, reduce=reduce)).moments for reduce in ("auto", "fp32"))
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    more = [two.total - one.total for one, two in zip(plain, wide, strict=True)]
    assert more == [0, 2 * block, 2 * block, 0], "of one block, in fp32 in place of bf16"


def test_a_shared_head_is_kept_in_no_codes():
    common = {"model": "llama3-8b", "gpus": 4, "mesh": "dp_shard=4", "recipe": "nvfp4@all"}
    gathered, shared = (plan(PlanRequest(**common, head=head)).moments[0].bytes for head in ("gathered", "shared"))
    assert gathered["weights"] - shared["weights"] == 128_256 * 4096 * (1 / 2 + 1 / 256) / 4


def test_a_shared_head_holds_logits_of_its_words_and_activations_of_all_ranks():
    """Logits become their gradient; exponentials of a few take 0.5 GiB; no gradient of the head is whole."""
    common = {"model": "llama3-8b", "gpus": 4, "mesh": "dp_shard=4", "recipe": "bf16", "recompute": "full"}
    loss, early = (moment.bytes for moment in plan(PlanRequest(**common, head="shared")).moments[:2])
    tokens, dim, words = 4 * 8192, 4096, 128_256 // 4
    assert loss["logits and loss"] == 2 * tokens * words + 2 * 2 * tokens * dim + GIB / 2
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    assert early["gathered layers"] == 2 * (2 * block + 4096) + 2 * 2 * block


@pytest.mark.parametrize(
    ("recipe", "each"), [("nvfp4", 0.5625 + 1 / 256), ("rl", 0.5625), ("nvfp4_mxfp8_bwd", 1 + 1 / 32)]
)
def test_what_is_gathered_has_room_for_the_form_that_takes_more(recipe, each):
    """Of a forward and a backward that read other codes, those of eight bits."""
    found = plan(PlanRequest(model="llama3-8b", gpus=8, mesh="dp_shard=8", recipe=f"{recipe}@all", recompute="full"))
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    words, head = 2 * (128_256 * 4096 + 4096), each * 128_256 * 4096
    assert found.moments[0].bytes["gathered layers"] == pytest.approx(2 * (each * block + 2 * 2 * 4096) + words + head)


def test_a_sharded_run_whose_weights_come_as_codes_holds_what_adds_up_by_hand():
    found = plan(PlanRequest(model="llama3-70b", gpus=64, mesh="dp_replicate=2,dp_shard=32", sequence=4096))
    at, early = found.moments[0].bytes, found.moments[2].bytes
    block, edges, head = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672, 2 * 128_256 * 8192 + 8192, 128_256 * 8192
    whole = block + 2 * 8192
    assert at["masters"] == 4 * 70_553_706_496 / 32
    assert at["gathered layers"] == pytest.approx(2 * 2 * whole + 2 * edges)  # the last 12 stay in bf16
    assert at["weights"] == pytest.approx(68 * block / 32 * (1 / 2 + 1 / 256))  # codes of what this rank sends
    codes = (0.5 + 1 / 16 + 1 / 256) * block + 2 * 2 * 8192
    assert early["gathered layers"] == pytest.approx(codes + 2 * edges + 2 * (2 * whole + head), rel=1e-9)


def test_experts_that_ranks_share_are_held_in_values():
    coded, plain = (
        plan(PlanRequest(model="deepseek-v3", gpus=64, mesh="dp_shard=64,ep=8", recipe="nvfp4@all", gather=gather))
        for gather in ("nvfp4", "bf16")
    )
    shape = models.find_architecture("deepseek-v3")
    sparse = shape.kinds[1]
    others = sum(m.numel for m in shape.matrices(sparse) if m.experts == 1)
    head = 129_280 * 7168
    fewer = plain.moments[0].bytes["gathered layers"] - coded.moments[0].bytes["gathered layers"]
    assert fewer == pytest.approx((2 * others + head) * (2 - 0.5 - 1 / 16 - 1 / 256))


def test_experts_are_split_by_ep_and_their_masters_by_all():
    request = PlanRequest(model="deepseek-v3", gpus=256, mesh="dp_shard=256,ep=8", recompute="full", gather="bf16")
    found = plan(request).moments[0].bytes
    filled = 61 * (3 * 256 - 576) * 7168  # of 576 rows (512 of the latent, 64 of a rotary key) three lie on most ranks
    assert found["masters"] == 4 * (671_026_404_352 + filled) / 256
    shape = models.find_architecture("deepseek-v3")
    sparse = shape.kinds[1]
    experts = sum(m.numel for m in shape.matrices(sparse) if m.experts > 1)
    others = sum(m.numel for m in shape.matrices(sparse) if m.experts == 1) + shape.small(sparse)
    assert found["gathered layers"] == pytest.approx(4 * (experts / 8 + others) + 2 * shape.edges)
    assert found["activations"] == pytest.approx(8192 * (61 * 2 * 7168 + 4 * 7168 + 4))


def test_the_peak_is_the_largest_moment_and_fits_only_below_the_room():
    found = plan(PlanRequest(model="llama3-8b", gpus=1, mesh="dp_shard=1", recompute="full"))
    totals = {moment.moment: moment.total for moment in found.moments}
    assert found.peak.total == max(totals.values()) and found.peak.moment == max(totals, key=totals.__getitem__)
    assert found.fits == (found.peak.total <= 0.92 * 139.8 * GIB) and found.fits
    assert not plan(PlanRequest(model="llama3-8b", gpus=1, mesh="dp_shard=1", hardware="h100")).fits
    assert all(set(moment.bytes) == set(held.KINDS) for moment in found.moments)


def test_a_head_that_follows_the_recipe_is_held_as_the_codes_it_is_gathered_in():
    """Llama-3-8B's has 128,256 words; a code, a scale a block of 16 and one a tile of 256 are 0.5664 bytes."""
    words, code = 128_256 * 4096, 0.5 + 1 / 16 + 1 / 256
    request = {"model": "llama3-8b", "gpus": 4, "mesh": "dp_shard=4", "recipe": "nvfp4@all"}
    codes, values, shared = (
        plan(PlanRequest(**request, **options)).moments[0].bytes["gathered layers"]
        for options in ({}, {"gather": "bf16"}, {"head": "shared", "sequence": 512})
    )
    matrices = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    assert codes == pytest.approx(2 * (code * matrices + 2 * 2 * 4096) + 2 * (words + 4096) + code * words)
    assert values == pytest.approx(2 * 2 * (matrices + 2 * 4096) + 2 * (2 * words + 4096))
    assert shared == pytest.approx(2 * (code * matrices + 2 * 2 * 4096) + 2 * 4096)
