"""Whether a row's output depends on the rows beside it: with one amax a tensor it does, with one a row it does not.

Both directions are tested, so that docs/exactness.md can be wrong in neither.
"""

import pytest
import torch
from causal_checks import check_causal

import halfbyte as hb
from halfbyte import recipes

ALONE = {
    "bf16": recipes.bf16(),
    "mxfp8": recipes.mxfp8(),
    "rl": recipes.rl(),
    "nvfp4": recipes.nvfp4(activation_outer="row"),
    "nvfp4_forward": recipes.nvfp4_forward(activation_outer="row"),
    "four_over_six": recipes.four_over_six(base=recipes.nvfp4(activation_outer="row")),
    "nvfp4_mxfp8_bwd": recipes.nvfp4_mxfp8_bwd(activation_outer="row"),
}
TOGETHER = {name: recipes.get(name) for name in ("nvfp4", "nvfp4_forward", "four_over_six", "nvfp4_mxfp8_bwd")}
RNG = hb.Philox(3)


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(24, 64, generator=generator), torch.randn(32, 64, generator=generator)
    louder = x.clone()
    louder[-1] *= 3
    return x.to(dtype), louder.to(dtype), w.to(dtype)


def bits(t):
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALONE)
def test_with_an_amax_a_row_other_rows_change_no_bit(name, dtype):
    x, louder, w = tensors(dtype)
    y, other = (hb.linear(t, w, None, ALONE[name], rng=RNG)[:-1] for t in (x, louder))
    assert torch.equal(bits(y), bits(other))


@pytest.mark.parametrize("name", TOGETHER)
def test_with_an_amax_a_tensor_a_louder_row_changes_the_others(name):
    x, louder, w = tensors()
    y, other = (hb.linear(t, w, None, TOGETHER[name], rng=RNG)[:-1] for t in (x, louder))
    changed = (y != other).any(1)
    assert changed.float().mean() > 0.9 and (y - other).norm() / y.norm() > 0.01


def test_a_row_is_quantized_as_it_would_be_alone():
    """As in generation, where a forward has one row: the codes, whatever the number of rows."""
    x, louder, _ = tensors()
    spec = hb.NVFP4(outer="row")
    whole = hb.quantize(louder, spec)
    for row in (0, 7):
        alone = hb.quantize(x[row : row + 1], spec)
        assert torch.equal(alone.qdata[0], whole.qdata[row]) and torch.equal(alone.amax[0], whole.amax[row])
        assert torch.equal(bits(alone.block_scale[0]), bits(whole.block_scale[row]))
    together = hb.quantize(louder, hb.NVFP4())
    assert not torch.equal(hb.quantize(x[:1], hb.NVFP4()).block_scale[0].float(), together.block_scale[0].float())


@pytest.mark.parametrize("outer, alone", [("row", True), ("tensor", False)])
def test_experts(outer, alone):
    """Tokens of one expert share an amax; those of another never do."""
    x, louder, _ = tensors()
    w = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([10, 24], dtype=torch.int32)
    recipe = recipes.nvfp4(activation_outer=outer)
    y, other = (hb.grouped_linear(t, w, offsets, recipe, rng=RNG)[:-1] for t in (x, louder))
    assert torch.equal(bits(y[:10]), bits(other[:10]))
    assert torch.equal(bits(y[10:]), bits(other[10:])) is alone


CAUSAL = {
    "row": (recipes.nvfp4(activation_outer="row"), True),
    "rl": (recipes.rl(), True),
    "rl_mxfp8": (recipes.rl(gradients="mxfp8"), True),
    "tensor": (recipes.nvfp4(), False),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_logits_of_a_decoder_are_causal_with_an_amax_a_row_alone(name):
    """What comes later in a sequence, or in another sequence of the batch, changes what came before, or does not."""
    recipe, causal = CAUSAL[name]
    check_causal(recipe, causal, "cpu")
