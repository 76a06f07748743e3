"""Masters made of an export's codes quantize to every byte of it, amax included: ordinary weights and tiny blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", minversion="5.23")
from export_models import llama, loss, trained

import halfbyte as hb
from halfbyte.export import masters
from halfbyte.integrations.transformers import load_exported

FORWARD = hb.recipes.nvfp4_forward()
HEADROOM = [hb.NVFP4(block=block, fp4_max=6 * 16 / 17) for block in ((1, 16), (16, 16))]
STANDARD = {
    "tiles": hb.NVFP4(block=(16, 16)),
    "rows": hb.NVFP4(),
    "256": hb.NVFP4(e4m3_max=256.0),
    "headroom": HEADROOM[0],
    "headroom, tiles": HEADROOM[1],
    "5.5": hb.NVFP4(fp4_max=5.5),
}
CANDIDATES = {
    "4over6": hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0),
    "4over6, tiles": hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix(), e4m3_max=256.0),
}
DTYPES = (torch.bfloat16, torch.float32)


def exported(folder, dtype, spec, smallest):
    """Return a model whose weights have blocks down to 10^-smallest of their maximum, and its export."""
    recipe = dataclasses.replace(FORWARD, fprop=hb.GemmSpec(a=hb.NVFP4(), b=spec))
    model = trained(llama(dtype, hidden_size=64, intermediate_size=240), recipe, steps=0)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            rows, columns = -(-weight.shape[0] // 16), weight.shape[1] // 16
            sizes = 10 ** (-smallest * torch.rand(rows, columns, generator=generator))
            tiles = sizes.repeat_interleave(16, 0)[: weight.shape[0]].repeat_interleave(16, 1)
            weight.data = (weight.detach().float() * tiles).to(dtype)
    hb.export.save(model, folder, compute_dtype=dtype)
    return model, hb.export.load(folder)


def differing(checkpoint):
    """Return the scales of blocks whose bytes are others once the masters are quantized."""
    masters, scales = checkpoint.masters(), []
    for key, quant in checkpoint.quantized.items():
        amax = quant.amax if checkpoint.contract.layers[key].shares is not None else None
        again = hb.quantize(masters[key], quant.spec, amax=amax)
        assert torch.equal(again.amax, quant.amax), key
        scale, now = (q.linear_scale().view(torch.uint8) for q in (quant, again))
        differ = (scale != now) | (quant.qdata != again.qdata).unflatten(1, (-1, 8)).any(-1)
        scales += scale[differ].tolist()
    return scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smallest", [0, 8])
@pytest.mark.parametrize("spec", STANDARD)
def test_masters_have_the_bytes_of_the_export(tmp_path, spec, smallest, dtype):
    _, checkpoint = exported(tmp_path / "out", dtype, STANDARD[spec], smallest)
    assert differing(checkpoint) == []
    for key, master in checkpoint.masters().items():
        quant = checkpoint.tensors[key]
        if isinstance(quant, hb.QuantTensor) and quant.spec.fp4_max == 6:  # of tiny blocks alone a value moves
            values, coarse = quant.dequantize(), quant.amax / 50_000
            kept = torch.where(values.abs() > coarse, master, values)
            assert torch.allclose(kept, values, rtol=1e-6 if dtype == torch.float32 else 0, atol=0), key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", CANDIDATES)
def test_of_candidate_scales_tiny_blocks_may_get_others(tmp_path, spec, dtype):
    """docs/export.md says so."""
    assert differing(exported(tmp_path / "ordinary", dtype, CANDIDATES[spec], 0)[1]) == []
    assert set(differing(exported(tmp_path / "wide", dtype, CANDIDATES[spec], 8)[1])) <= {1, 2, 3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ["rows", "headroom", "headroom, tiles"])
def test_the_loss_is_that_of_before_the_export(tmp_path, spec, dtype):
    model, _ = exported(tmp_path / "out", dtype, STANDARD[spec], 4)
    assert torch.equal(loss(load_exported(tmp_path / "out")), loss(model))


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, result.nbytes if isinstance(result, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("count", [3, 1 << 16])
def test_nothing_larger_than_the_values_is_made(count, monkeypatch):
    """All experts of a layer are one weight, and few of its blocks move: those alone are looked at."""
    monkeypatch.setattr(masters, "BLOCKS", count)
    x = torch.randn(128, 264, generator=torch.Generator().manual_seed(0))
    x[7, :160] *= 1e-6
    quant = hb.quantize(x, hb.NVFP4())
    decoded = masters.decoded_values(quant)
    monkeypatch.setattr(masters, "decoded_values", lambda _: decoded.clone())
    with Largest() as made:
        values = masters.quantizable_values(quant)
    assert (values != decoded).sum() == (values[7, :160] != 0).sum() > 90
    assert torch.equal(hb.quantize(values, quant.spec).qdata, quant.qdata)
    assert made.nbytes == 128 * 272 * values.itemsize  # padded to whole blocks
