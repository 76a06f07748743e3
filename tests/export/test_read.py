"""Checkpoints written here by hand from the published layouts, whole and damaged."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from export_decoder import E2M1, e4m3, nibbles
from safetensors.torch import save_file

import halfbyte as hb
from halfbyte.export import files

CODES = torch.arange(256, dtype=torch.uint8).repeat(2).view(16, 32)  # [16, 64], every byte
SCALES = (torch.arange(64, dtype=torch.uint8) * 2 % 127).view(16, 4)
OPERAND = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": OPERAND, "input_activations": OPERAND}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP | {"weights": OPERAND | {"strategy": "tensor_group"}}},
}


def modelopt(factor=0.015, **others):
    scale = SCALES.view(torch.float8_e4m3fn)
    return {
        "a.weight": CODES,
        "a.weight_scale": scale,
        "a.weight_scale_2": torch.tensor(factor),
        "a.input_scale": torch.tensor(0.001),
        "lm_head.weight": torch.ones(4, 64, dtype=torch.bfloat16),
        **others,
    }


def packed(factor=1 / 0.015, **others):
    return {
        "a.weight_packed": CODES,
        "a.weight_scale": SCALES.view(torch.float8_e4m3fn),
        "a.weight_global_scale": torch.tensor([factor]),
        "a.input_global_scale": torch.tensor([1000.0]),
        "lm_head.weight": torch.ones(4, 64, dtype=torch.bfloat16),
        **others,
    }


def write(folder, tensors, described, **config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    values = {"dtype": "bfloat16", "quantization_config": described, **config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


FORMS = {"modelopt": (modelopt, MODELOPT), "compressed-tensors": (packed, PACKED)}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_by_hand(tmp_path, form):
    make, described = FORMS[form]
    checkpoint = hb.export.load(write(tmp_path, make(), described))
    expected = E2M1[nibbles(CODES)] * np.repeat(e4m3(SCALES), 16, 1) * np.float32(0.015)
    quant = checkpoint.quantized["a.weight"]
    assert torch.equal(quant.qdata, CODES) and torch.equal(quant.block_scale.view(torch.uint8), SCALES)
    assert np.allclose(quant.dequantize(torch.float32).numpy(), expected, rtol=4e-7, atol=0)
    masters = checkpoint.masters(torch.float32)
    assert masters.keys() == {"a.weight", "lm_head.weight"} and {t.dtype for t in masters.values()} == {torch.float32}
    assert np.allclose(masters["a.weight"].numpy(), expected, rtol=4e-7, atol=0)
    assert checkpoint.masters()["a.weight"].dtype == torch.bfloat16
    assert checkpoint.format == form and checkpoint.contract is None
    assert checkpoint.input_amaxes == {"a": pytest.approx(2.688, rel=1e-6)}


@pytest.mark.parametrize("form", FORMS)
def test_null_activations_and_zero_scales(tmp_path, form):
    make, described = FORMS[form]
    group = described["config_groups"]["group_0"] | {"input_activations": None}
    tensors = {k: v for k, v in make().items() if "input" not in k}
    tensors["a.weight_scale"] = torch.zeros(16, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    described = (
        described
        | {"config_groups": {"group_0": group}}
        | ({"quant_algo": "W4A16_NVFP4"} if form == "modelopt" else {})
    )
    checkpoint = hb.export.load(write(tmp_path, tensors, described))
    assert checkpoint.input_amaxes == {} and not checkpoint.masters()["a.weight"].any()


def test_mixed_precision(tmp_path):
    """NVFP4 and FP8 by layer, as Nemotron has them, with scales for the cache of attention."""
    weight = torch.linspace(-400, 400, 64).to(torch.float8_e4m3fn).view(4, 16)
    rows = torch.tensor([0.5, 1.0, 2.0, 4.0])
    extra = {
        "b.weight": weight,
        "b.weight_scale": torch.tensor(0.25),
        "b.input_scale": torch.tensor(0.5),
        "c.weight": weight.clone(),
        "c.weight_scale": rows,
        "k_proj.k_scale": torch.tensor(1.0),
    }
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}, "c": {"quant_algo": "FP8"}}
    described = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    checkpoint = hb.export.load(write(tmp_path, modelopt(**extra), described))
    assert checkpoint.fp8 == ("b.weight", "c.weight") and checkpoint.cache_scales.keys() == {"k_proj.k_scale"}
    masters = checkpoint.masters(torch.float32)
    assert torch.equal(masters["b.weight"], (weight.float() * 0.25).bfloat16().float())
    assert torch.equal(masters["c.weight"], (weight.float() * rows[:, None]).bfloat16().float())
    assert masters.keys() == {"a.weight", "b.weight", "c.weight", "lm_head.weight"}
    described["quantized_layers"]["d"] = {"quant_algo": "NVFP4"}
    with pytest.raises(ValueError, match="quantized_layers has d in NVFP4, and the files do not"):
        hb.export.load(write(tmp_path, modelopt(**extra), described))


def test_several_files_and_only_hf_quant_config(tmp_path):
    tensors = modelopt()
    keys = list(tensors)
    for number, part in enumerate((keys[:2], keys[2:])):
        save_file({key: tensors[key] for key in part}, tmp_path / f"{number}.safetensors")
    where = {key: f"{int(i > 1)}.safetensors" for i, key in enumerate(keys)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text("{}")
    described = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    assert torch.equal(hb.export.load(tmp_path).quantized["a.weight"].qdata, CODES)
    index.write_text(json.dumps({"weight_map": where | {"z.weight": "1.safetensors"}}))
    with pytest.raises(ValueError, match=r"1.safetensors: z.weight is missing, which the index says is there"):
        hb.export.load(tmp_path)
    index.write_text(json.dumps({"weight_map": where | {"z.weight": "../../x"}}))
    with pytest.raises(ValueError, match="is no file of this folder"):
        hb.export.load(tmp_path)
    (tmp_path / "0.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match=r"0.safetensors: is not there"):
        hb.export.load(tmp_path)


SCALE = SCALES.view(torch.float8_e4m3fn)
EXPERTS = {
    "e.up": CODES.view(2, 8, 32).mT.contiguous(),  # [E, K/2, N]
    "e.up_weight_scale": SCALE.view(2, 8, 4).mT.contiguous(),
    "e.up_weight_scale_2": torch.tensor(0.015),
    "e.up_input_scale": torch.tensor(0.001),
    "e.up_bias": torch.ones(2, 8),
}
"""Two experts [E, K, N] of 64 and 8 as ModelOpt lays them: the rows of `modelopt()`, turned."""


def test_experts_in_one_tensor_by_hand(tmp_path):
    checkpoint = hb.export.load(write(tmp_path, modelopt() | EXPERTS, MODELOPT))
    assert checkpoint.transposed == ("e.up",) and checkpoint.quantized["e.up"].shape == (2, 8, 64)
    expected = E2M1[nibbles(CODES)] * np.repeat(e4m3(SCALES), 16, 1) * np.float32(0.015)
    masters = checkpoint.masters(torch.float32)
    assert masters.keys() == {"a.weight", "e.up", "e.up_bias", "lm_head.weight"}
    assert masters["e.up"].shape == (2, 64, 8) and masters["e.up"].is_contiguous()
    got = masters["e.up"].mT.reshape(16, 64).numpy()
    assert np.allclose(got, expected, rtol=4e-7, atol=0)
    assert checkpoint.input_amaxes == {"a": pytest.approx(2.688, rel=1e-6), "e.up": pytest.approx(2.688, rel=1e-6)}
    with pytest.raises(
        ValueError, match=r"e.up is uint8, and weights of 'compressed-tensors' are called ….weight_packed"
    ):
        hb.export.load(write(tmp_path, packed() | EXPERTS, PACKED))


WRONG = {byte: SCALES.clone().fill_(byte).view(torch.float8_e4m3fn) for byte in (0x7F, 0x81, 0xFF)}

DAMAGED = {
    "no scale": ({"a.weight_scale": None}, "a.weight_scale is missing beside a.weight"),
    "no factor": ({"a.weight_scale_2": None}, "a.weight_scale_2 is missing beside a.weight"),
    "no codes": ({"a.weight": None}, "a.weight_scale_2 is of a weight that is missing"),
    "swizzled": ({"a.weight_scale": SCALE.view(4, 16)}, r"its block scale torch.float8_e4m3fn \[4, 16\]; NVFP4 has"),
    "another scale": ({"a.weight_scale": SCALES}, "its block scale torch.uint8"),
    "zero factor": ({"a.weight_scale_2": torch.tensor(0.0)}, r"the fp32 factor of a.weight is \[0.0\]; one positive"),
    "experts without scales": (
        EXPERTS | {"e.up_weight_scale": None},
        "e.up_weight_scale is missing beside e.up, which is",
    ),
    "experts without factor": (EXPERTS | {"e.up_weight_scale_2": None}, "e.up_weight_scale_2 is missing beside e.up,"),
    "no experts": (EXPERTS | {"e.up": None}, "e.up_weight_scale_2 is of experts that are missing or not packed"),
    "experts of whole K": (
        EXPERTS | {"e.up": EXPERTS["e.up"].mT.contiguous()},
        r"e.up is uint8 \[2, 8, 32\] and its block scale .*; experts in NVFP4 have float8_e4m3fn \[2, 1, 32\]",
    ),
    "experts of two factors": (
        EXPERTS | {"e.up_weight_scale_2": torch.tensor([0.1, 0.2])},
        r"e.up_weight_scale_2 is \[0.1\S*, 0.2\S*\]; one positive number for all experts is read",
    ),
    "fp8 alone": ({"b.weight": SCALE.clone()}, "b.weight_scale is missing beside b.weight"),
    "a scale of NaN": ({"a.weight_scale": WRONG[0x7F]}, "block scales of a.weight are NaN or negative"),
    "a scale below zero": ({"a.weight_scale": WRONG[0x81]}, "block scales of a.weight are NaN or negative"),
    "experts with a scale of NaN": (
        EXPERTS | {"e.up_weight_scale": WRONG[0xFF].view(2, 8, 4).mT.contiguous()},
        "block scales of e.up are NaN or negative",
    ),
    "an input of NaN": ({"a.input_scale": torch.tensor(torch.nan)}, r"input_scale is \[nan\]; one positive number is"),
    "an input of zeros": ({"a.input_scale": torch.tensor(0.0)}, r"a.input_scale is \[0.0\]; one positive number is"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_weight_that_lacks_a_part(tmp_path, case):
    change, message = DAMAGED[case]
    tensors = {key: tensor for key, tensor in (modelopt() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        hb.export.load(write(tmp_path, tensors, MODELOPT))


def test_files_that_are_truncated_or_foreign(tmp_path):
    write(tmp_path, modelopt(), MODELOPT)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:100], whole[:5], b"", b"PK\x03\x04" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{path}: is truncated or no safetensors file")):
            hb.export.load(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: is not there"):
        hb.export.load(tmp_path)
    for text, message in (("{", "is no JSON"), ("[]", "holds list"), ("{}", "has no quantization_config")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"config.json: {message}"):
            hb.export.load(tmp_path)
    with pytest.raises(ValueError, match=r"config.json: is not there"):
        hb.export.load(tmp_path / "absent")


def test_forms_that_are_not_read(tmp_path):
    others = {
        "quant_method='awq'": {"quant_method": "awq"},
        "quant_algo='W4A8_AWQ'": MODELOPT | {"quant_algo": "W4A8_AWQ"},
        "group_0 has weights of 4 bits, int, in groups of 128": PACKED
        | {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}},
    }
    for message, described in others.items():
        make = packed if described.get("quant_method") == "compressed-tensors" else modelopt
        with pytest.raises(ValueError, match=message):
            hb.export.load(write(tmp_path, make(), described))
    plain = {"a.weight": torch.ones(4, 16)}
    with pytest.raises(ValueError, match="no tensor of it is a weight in NVFP4"):
        hb.export.load(write(tmp_path, plain, MODELOPT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_groups": ["x"]}, r"config_groups is \['x'\], and an object is read"),
        ({"config_groups": {"g": "x"}}, "g is 'x', and an object is read"),
        ({"config_groups": {"g": {"weights": [4]}}}, r"weights is \[4\], and an object is read"),
        ({"quantized_layers": ["a"]}, r"quantized_layers is \['a'\], and an object is read"),
        ({"quantized_layers": {"a": "NVFP4"}}, "a is 'NVFP4', and an object is read"),
    ],
)
def test_a_config_of_another_structure(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        hb.export.load(write(tmp_path, modelopt(), MODELOPT | change))


def test_folders_in_the_place_of_files(tmp_path):
    write(tmp_path, modelopt(), MODELOPT)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=f"{name}: is not there"):
            hb.export.load(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_masters_in_fp32_have_the_amax(tmp_path, form):
    """Quantized again they find the amax of the file, not a neighbour of it: the loss depends on that bit."""
    make, described = FORMS[form]
    codes = torch.full((16, 32), 0xF7, dtype=torch.uint8)  # 6 and -6
    scale = torch.full((16, 4), 448.0).to(torch.float8_e4m3fn)
    name = "a.weight" if form == "modelopt" else "a.weight_packed"
    for number in range(50):
        factor = (1 + number / 71) * (0.01 if form == "modelopt" else 100)
        tensors = make(factor) | {name: codes, "a.weight_scale": scale}
        checkpoint = hb.export.load(write(tmp_path, tensors, described))
        quant, master = checkpoint.quantized["a.weight"], checkpoint.masters(torch.float32)["a.weight"]
        assert torch.equal(master.abs(), quant.amax.expand(16, 64)), factor
        again = hb.quantize(master, quant.spec)
        assert torch.equal(again.qdata, codes) and torch.equal(again.amax, quant.amax)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    """As where an older shard was left beside the new ones, which has tensors of the same names."""
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.full((2,), 3.0)}, tmp_path / "two.safetensors")
    where = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = files.read_tensors(tmp_path)
    assert {key: tensor.tolist() for key, tensor in found.items()} == {"a": [1, 1], "b": [3, 3]}
