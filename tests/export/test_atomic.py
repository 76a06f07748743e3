"""An export is whole or absent: full disks, kills, folders that hold something, contracts of other files."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5.23")

from export_decoder import stored
from export_models import TOKENS, llama, trained

import halfbyte as hb
from halfbyte.export import write


@contextlib.contextmanager
def files_of_at_most(size):
    """What `ulimit -f` sets; Python ignores SIGXFSZ, so that writing fails with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def model():
    return trained(llama(), "nvfp4", steps=1)


def test_a_full_disk_leaves_nothing(tmp_path, model):
    target = tmp_path / "deep" / "out"
    for size in (0, 1000, 20_000):
        with files_of_at_most(size), pytest.raises(OSError, match="File too large, nothing was written") as error:
            hb.export.save(model, target)
        assert error.value.filename == str(target) and list(target.parent.iterdir()) == []
    hb.export.save(model, target)
    assert [path.name for path in target.parent.iterdir()] == ["out"] and len(hb.export.load(target).quantized) == 14


def test_what_is_there_stays(tmp_path, model):
    target = tmp_path / "out"
    target.mkdir()
    hb.export.save(model, target)  # empty: fine
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(ValueError, match=r"holds files already \(.*nothing is written over"):
        hb.export.save(model, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match="it is a file or a link"):
            hb.export.save(model, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_files_that_appear_meanwhile_stay(tmp_path, model):
    target = tmp_path / "out"

    class Tokenizer:
        def save_pretrained(self, folder):
            target.mkdir()
            (target / "other").write_text("other's")

    with pytest.raises(ValueError, match=r"holds files already \(other, …\)"):
        hb.export.save(model, target, tokenizer=Tokenizer())
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "other"]


def test_shards_and_their_index(tmp_path, model, monkeypatch):
    hb.export.save(model, tmp_path / "one")
    monkeypatch.setattr(write, "SHARD_BYTES", 4000)
    report = hb.export.save(model, tmp_path / "many")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one, many = stored(tmp_path / "one"), stored(tmp_path / "many")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[key], many[key]) for key in one)
    for key, name in index["weight_map"].items():
        assert key in load_file(tmp_path / "many" / name)
    assert index["metadata"]["total_size"] == report.nbytes == sum(t.numel() * t.element_size() for t in one.values())
    assert len(hb.export.load(tmp_path / "many").quantized) == 14


def test_a_file_holds_tensors_up_to_its_size_and_no_more(monkeypatch):
    monkeypatch.setattr(write, "SHARD_BYTES", 100)
    sizes = {"a": 60, "b": 60, "c": 40, "d": 150, "e": 10, "f": 90}
    tensors = {key: torch.zeros(size, dtype=torch.uint8) for key, size in sizes.items()}
    assert write._shards(tensors) == [["a"], ["b", "c"], ["d"], ["e", "f"]]


def test_a_folder_is_on_the_disk_and_readable_by_all_before_it_is_there(tmp_path, monkeypatch):
    target, order, replace = tmp_path / "made", [], os.replace
    monkeypatch.setattr(write, "_sync", lambda path: order.append(path.name))
    monkeypatch.setattr(write.os, "replace", lambda old, new: (order.append("renamed"), replace(old, new)))
    with write.new_folder(target) as place:
        (place / "inner").mkdir()
        (place / "inner" / "a").write_text("a")
        (place / "b").write_text("b")
    begun = order.index("renamed")
    assert set(order[:begun]) == {"a", "b", place.name} and order[begun + 1 :] == [tmp_path.name]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755 and (target / "inner" / "a").read_text() == "a"


def test_each_tensor_has_memory_of_its_own_and_one_that_had_is_not_copied():
    base, alone = torch.arange(12.0), torch.arange(4.0)
    given = {"a": base[:4], "b": base[4:8], "c": base[8:], "alone": alone}
    made = write.same_memory(given)
    assert len({t.untyped_storage().data_ptr() for t in made.values()}) == 4 and made["alone"] is alone
    assert all(torch.equal(made[key], tensor) for key, tensor in given.items())


def changed_codes(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] ^= 1


def changed_factor(tensors):
    tensors["model.layers.0.mlp.up_proj.weight_scale_2"] *= 2


def another_layer(tensors):
    for part in ("weight", "weight_scale", "weight_scale_2"):
        tensors[f"extra.{part}"] = tensors[f"model.layers.0.mlp.up_proj.{part}"].clone()


CHANGES = {
    changed_codes: "the bytes of model.layers.0.mlp.up_proj.weight are not those of the export",
    changed_factor: "the fp32 factor of model.layers.0.mlp.up_proj.weight is not that of its amax",
    another_layer: "extra.weight is in the files alone",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_contract_is_that_of_its_files(tmp_path, model, change):
    hb.export.save(model, tmp_path / "out", format="modelopt", activations="static", batches=[TOKENS])
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{CHANGES[change]}, so halfbyte.json is not the contract"):
        hb.export.load(tmp_path / "out")
    (tmp_path / "out" / "halfbyte.json").unlink()
    assert "model.layers.0.mlp.up_proj.weight" in hb.export.load(tmp_path / "out").quantized


@pytest.mark.parametrize("text", ["", "{}", '{"contract": 2}', '{"contract": 1, "layers": {"a": {}}}'])
def test_a_damaged_contract(tmp_path, model, text):
    hb.export.save(model, tmp_path / "out")
    Path(tmp_path / "out" / "halfbyte.json").write_text(text)
    with pytest.raises(ValueError, match=r"halfbyte.json: cannot be read as a contract of training"):
        hb.export.load(tmp_path / "out")


def test_an_amax_beyond_every_float_is_a_damaged_contract(tmp_path, model):
    hb.export.save(model, tmp_path / "out")
    path = tmp_path / "out" / "halfbyte.json"
    contract = json.loads(path.read_text())
    next(iter(contract["layers"].values()))["amax"] = "0x1p5000"
    path.write_text(json.dumps(contract))
    with pytest.raises(ValueError, match=r"halfbyte.json: cannot be read as a contract of training"):
        hb.export.load(tmp_path / "out")
