"""Exports that lost something on their way: load_exported says which key or file, and builds nothing of the rest."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5.23")
from export_models import NOTHING_KEPT, llama, loss, trained

import halfbyte as hb
from halfbyte.integrations.transformers import HalfbyteConfig, load_exported

NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj"
FORMS = ("compressed-tensors", "modelopt")


@pytest.fixture(scope="module", params=FORMS)
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "out"
    hb.export.save(trained(llama(), "nvfp4", steps=1), folder, format=request.param)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(whole, tmp_path):
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def change(folder, change_):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change_(tensors)
    save_file(tensors, path, {"format": "pt"})


def without(prefix):
    def change_(tensors):
        for key in [key for key in tensors if key.startswith(prefix)]:
            del tensors[key]

    return change_


def test_the_whole_folder_loads(folder):
    assert loss(load_exported(folder)).isfinite()


def test_a_key_that_no_layout_misses(folder):
    change(folder, without(NORM))
    with pytest.raises(ValueError, match=rf"{NORM} is missing \(1 are\); copy the folder again"):
        load_exported(folder)


def test_a_weight_with_all_its_parts(folder):
    change(folder, without(UP))
    with pytest.raises(
        ValueError, match=rf"{UP}\.weight is in the contract alone, so halfbyte.json is not the contract"
    ):
        load_exported(folder)
    (folder / "halfbyte.json").unlink()
    with pytest.raises(ValueError, match=rf"{UP}\.weight is missing \(1 are\)"):
        load_exported(folder, HalfbyteConfig("nvfp4", keep=NOTHING_KEPT))


@pytest.mark.parametrize("key", [NORM, UP])
def test_tensors_of_another_model(folder, key):
    """A file of a wider model under the same names."""

    def widen(tensors):
        for name in [name for name in tensors if name.startswith(key) and tensors[name].dim() > 0]:
            tensors[name] = torch.cat([tensors[name]] * 2)
            if tensors[name].dim() == 1 and tensors[name].dtype == torch.float32:
                tensors[name] = tensors[name][:1].clone()

    change(folder, widen)
    (folder / "halfbyte.json").unlink()
    stored, wanted = (r"\[64\]", r"\[32\]") if key == NORM else (r"\[96, 32\]", r"\[48, 32\]")
    message = rf"{key.removesuffix('.weight')}.weight is {stored} and its config.json makes it {wanted} \(1 differ\)"
    with pytest.raises(ValueError, match=message):
        load_exported(folder, HalfbyteConfig("nvfp4", keep=NOTHING_KEPT))


def test_a_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"model.safetensors: is truncated or no safetensors file \(.*\); copy it again"
    ):
        load_exported(folder)


@pytest.mark.parametrize(
    ("change_", "message"),
    [
        ({"model_type": "foo"}, r"config.json: transformers cannot read it: .*foo"),
        ({"num_attention_heads": 3.5}, r"config.json: transformers cannot read it: "),
        ({"architectures": ["LlamaConfig"]}, r"architectures=\['LlamaConfig'\] .* no model of that name"),
        ({"architectures": [3]}, r"architectures=\[3\] .* no model of that name"),
        ({"architectures": ["NobodysForCausalLM"]}, "no model of that name"),
    ],
)
def test_a_config_that_transformers_cannot_build(folder, change_, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change_))
    with pytest.raises(ValueError, match=f"{folder}.*{message}"):
        load_exported(folder)


def test_a_contract_with_a_dtype_of_nothing(folder):
    path = folder / "halfbyte.json"
    path.write_text(path.read_text().replace('"compute_dtype": "bfloat16"', '"compute_dtype": "int8"'))
    with pytest.raises(ValueError, match="compute_dtype='int8' is none of bfloat16, float16, float32"):
        load_exported(folder)
