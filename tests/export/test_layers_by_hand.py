"""What an engine computes from an export, in numpy from the published layouts: layers and logits are ours."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from export_decoder import E2M1, decoded, e4m3, stored
from export_models import SMALL, TOKENS, llama, trained
from transformers import LlamaConfig, LlamaForCausalLM

import halfbyte as hb

FORMS = ("modelopt", "compressed-tensors")
SCALES = e4m3(np.arange(127))  # positive E4M3, finite
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def nearest(values, grid):
    """Return the number of the nearest entry of an ascending grid; ties go to the even one, as codes do."""
    above = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    low, high = values - grid[above - 1], grid[above] - values
    return np.where((low < high) | ((low == high) & ((above - 1) % 2 == 0)), above - 1, above)


def engine_input(x, tensors, prefix, read):
    """Return x as W4A4 reads it, in fp64: blocks of 16, E4M3 scales, the stored factor of the layer's input.

    A scale within fp32's rounding of the middle of two may be either: the one of the two with which the block is nearer
    to `read`, what the layer reads.

    Returns:
        The values, and where one lies so near the middle of two codes that fp32 may take the other.
    """
    if f"{prefix}.input_scale" in tensors:
        factor = float(tensors[f"{prefix}.input_scale"])
    else:
        factor = 1 / float(tensors[f"{prefix}.input_global_scale"])
    blocks = x.astype(np.float64).reshape(len(x), -1, 16)
    wanted = np.minimum(np.abs(blocks).max(-1, keepdims=True) / 6 / factor, 448)
    (low, low_ties), (high, high_ties) = (
        coded(blocks, SCALES[nearest(wanted * side, SCALES)].astype(np.float64) * factor)
        for side in (1 - 1e-6, 1 + 1e-6)
    )
    off_low, off_high = (np.abs(v - read.reshape(v.shape)).sum(-1, keepdims=True) for v in (low, high))
    is_high = off_high < off_low
    return tuple(np.where(is_high, *pair).reshape(x.shape) for pair in ((high, low), (high_ties, low_ties)))


def coded(blocks, scale):
    """Return blocks in E2M1 times their scale, and which values tie."""
    ratio = np.minimum(np.abs(blocks) / np.where(scale > 0, scale, 1), 6)
    middles = (E2M1[:7] + E2M1[1:8]) / 2
    ties = (np.abs(ratio[..., None] - middles) < 1e-6 * middles).any(-1)
    return np.sign(blocks) * E2M1[nearest(ratio, E2M1[:8])] * scale, ties


def inputs_of(model):
    """Return what each linear layer of the blocks was given for TOKENS, in rows."""
    found, handles = {}, []
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            note = lambda module, given, key=name: found.update({key: given[0].detach().flatten(0, -2).float()})  # noqa: E731
            handles.append(module.register_forward_pre_hook(note))
    with torch.no_grad():
        model.eval()(input_ids=TOKENS)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_layer_of_w4a4_is_what_an_engine_computes(tmp_path, form):
    model = trained(llama(**WIDE), "nvfp4", steps=4)
    inputs = inputs_of(model)
    hb.export.save(model, tmp_path / "out", format=form, activations="static", batches=[TOKENS])
    tensors = stored(tmp_path / "out")
    assert len(inputs) == 14
    for name, x in inputs.items():
        layer = copy.deepcopy(model.get_submodule(name)).float()  # so that y is not rounded to bf16
        with torch.no_grad():
            ours = layer(x).double().numpy()
        read = hb.quantize(x, layer.recipe.fprop.a).dequantize(torch.float32).double().numpy()
        values, ties = engine_input(x.numpy(), tensors, name, read)
        assert ties.mean() < 0.01, name
        values = np.where(ties, read, values)  # equal inputs: a tie falls to either side by one rounding
        theirs = values @ decoded(tensors, name).astype(np.float64).T
        plain = x.double().numpy() @ layer.weight.detach().double().numpy().T
        gap = np.linalg.norm(theirs - ours)
        assert gap < 1e-3 * np.linalg.norm(ours), name
        assert gap < np.linalg.norm(plain - ours) / 20, name  # what both quantized alike is much more


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_w4a16_are_those_of_decoded_weights(tmp_path, form):
    recipe = dataclasses.replace(hb.recipes.bf16(), fprop=hb.GemmSpec(b=hb.NVFP4(block=(16, 16))))
    model = trained(llama(**WIDE), recipe, steps=4)
    hb.export.save(model, tmp_path / "out", format=form)
    tensors = stored(tmp_path / "out")
    engine = LlamaForCausalLM(LlamaConfig(**SMALL | WIDE))
    values = {}
    for name in engine.state_dict():
        prefix = name.removesuffix(".weight")
        is_coded = f"{prefix}.weight_scale" in tensors
        values[name] = torch.from_numpy(decoded(tensors, prefix)) if is_coded else tensors[name]
    assert sum(v.dtype == torch.float32 for v in values.values()) == 14
    engine.load_state_dict({name: value.bfloat16() for name, value in values.items()})
    rotary = engine.model.rotary_emb.inv_freq.clone()
    engine.bfloat16().eval().model.rotary_emb.inv_freq = rotary
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=TOKENS).logits.float() for m in (model, engine))
        with hb.high_precision(model):
            unrounded = model(input_ids=TOKENS).logits.float()
    gap = (ours - theirs).norm()
    assert (ours - theirs).abs().max() < 1e-2 * ours.abs().max() and gap < 1e-2 * ours.norm()
    assert gap < (ours - unrounded).norm() / 5
