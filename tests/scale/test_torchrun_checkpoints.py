"""Checkpoints of several ranks: whole or absent, refused with a reason when they are damaged, and never a program."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import train_checks as checks

from halfbyte import files
from halfbyte.train import checkpoint, loop, sharded
from halfbyte.train import folder as folders
from halfbyte.train.ranks import Elsewhere


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run of 2 steps that two ranks saved, each its shards."""
    root = tmp_path_factory.mktemp("made")
    checks.write_corpus(root)
    config = checks.tiny(str(root), "mixed", "run", mesh=(1, 2))
    checks.load(config)
    config.run.out.mkdir()
    ranks.run(2, checks.until, config, "nvfp4", 2)
    return root


@pytest.fixture
def config(made, tmp_path):
    """The same run for one process, on a copy."""
    shutil.copytree(made / "run", tmp_path / "run")
    config = checks.tiny(str(made), "mixed", "run")
    return replace(config, run=replace(config.run, out=tmp_path / "run"))


def saved(config) -> Path:
    return config.run.out / "checkpoints" / "step-00000002"


def rewrite(config, change) -> None:
    """Change the facts of a checkpoint, hashes included, as somebody would who wants them believed."""
    facts = torch.load(saved(config) / "run.pt", weights_only=True)
    change(facts)
    torch.save(facts, saved(config) / "run.pt")


def build(config):
    return loop.Trainer(config, "nvfp4", checks.load(config))


def test_one_process_goes_on_with_it(config):
    assert build(config).step == 2


DAMAGE = {
    "a byte of a shard": (
        lambda path: path.joinpath("__1_0.distcp").write_bytes(flipped(path / "__1_0.distcp")),
        r"corrupt \(__1_0.distcp does not have the hash that it was written with\); delete it",
    ),
    "a shard that is gone": (lambda path: path.joinpath("__0_0.distcp").unlink(), r"corrupt \(__0_0.distcp is missing"),
    "no metadata": (lambda path: path.joinpath(".metadata").unlink(), r"corrupt \(.metadata is missing"),
    "other metadata": (lambda path: path.joinpath(".metadata").write_bytes(b"x"), r"corrupt \(.metadata does not have"),
    "no facts": (lambda path: path.joinpath("run.pt").unlink(), r"run.pt: cannot be read \(No such file"),
}


def flipped(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    return bytes(content)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(config, kind):
    damage, message = DAMAGE[kind]
    damage(saved(config))
    with pytest.raises(ValueError, match=message) as error:
        build(config)
    assert str(saved(config)) in str(error.value)


class Attack:
    def __reduce__(self):
        return (os.mkdir, ("attacked",))


def test_metadata_runs_no_code(config, tmp_path, monkeypatch):
    """DCP's own reader would: its metadata is a pickle."""
    monkeypatch.chdir(tmp_path)
    (saved(config) / ".metadata").write_bytes(pickle.dumps(Attack()))
    rewrite(config, lambda facts: facts["files"].update({".metadata": files.sha256(saved(config) / ".metadata")}))
    with pytest.raises(ValueError, match=r"posix.mkdir is in it, which no checkpoint needs"):
        build(config)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    "names, message",
    [
        (None, "does not list its files"),
        ({}, "does not list"),
        ({".metadata": "", "../x": ""}, "does not list its files"),
    ],
)
def test_facts_without_files_are_refused(config, names, message):
    rewrite(config, lambda facts: facts.update(files=names))
    with pytest.raises(ValueError, match=message):
        build(config)


def test_another_model_is_refused_by_name(config):
    other = replace(config, model="moe-tiny")
    rewrite(config, lambda facts: facts.update(identity=folders.identity(other, "nvfp4", checks.load(other))))
    with pytest.raises(ValueError, match=r"model: '\S+' is on one side only"):
        build(other)


def test_moments_that_are_gone_are_missed(config):
    metadata = pickle.loads((saved(config) / ".metadata").read_bytes())
    del metadata.state_dict_metadata["optimizer.0.exp_avg"]
    (saved(config) / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite(config, lambda facts: facts["files"].update({".metadata": files.sha256(saved(config) / ".metadata")}))
    with pytest.raises(ValueError, match="'exp_avg' is missing"):
        build(config)


def test_what_a_killed_writer_left_goes_and_what_a_live_one_writes_stays(config):
    path = config.run.out / "checkpoints"
    left = path / ".step-00000004.abc.tmp"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    with files.temporary_folder(path / "step-00000005") as live:
        (live / "__0_0.distcp").write_bytes(b"half")
        assert checkpoint.Checkpoints(path, keep=2).latest() == saved(config)
        assert live.exists() and not left.exists()
    assert not live.exists()


def test_overwrite_clears_folders_of_ranks_too(config):
    folders.clear(config.run.out)
    assert sorted(path.name for path in config.run.out.rglob("*")) == []


def test_overwrite_leaves_all_where_a_link_is_in_the_place_of_a_folder(config, tmp_path):
    away = tmp_path / "away"
    saved(config).rename(away)
    saved(config).symlink_to(away)
    with pytest.raises(ValueError, match="symbolic link .* so --overwrite deleted nothing"):
        folders.clear(config.run.out)
    assert (away / "run.pt").exists()


def _full(rank: int, world: int, path: str) -> str:
    """Save with no room on the second rank; return what each is told."""
    import resource

    content = {
        "model": {"w": torch.full((4000,), float(rank)), "v": torch.ones(4000)},
        "optimizer": {"state": {}, "param_groups": []},
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        sharded.save_sharded(Path(path), content, checks.world_of(rank, world))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except Elsewhere:
        return "elsewhere"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
    return "saved"


def test_a_full_disk_of_one_rank_leaves_no_trace(tmp_path):
    path = tmp_path / "step-00000001"
    assert ranks.run(2, _full, str(path)) == [
        "elsewhere",
        f"{path}: File too large, what was saved before is whole",
    ]
    assert not list(tmp_path.iterdir())


def _with_codes(config, those) -> None:
    config = replace(config, mesh=replace(config.mesh, weights="nvfp4"))
    loop.Trainer(config, "nvfp4", checks.load(config), ranks=those)


def _asked(rank: int, world: int, root: str) -> list[str]:
    """Return how weights as NVFP4 are refused where nothing else is there: cached, and compiled."""
    said = []
    for mesh, compiled, is_cached in (((2, 1), "off", True), ((2, 1), "on", False)):
        config = checks.tiny(root, "mixed", f"nvfp4{mesh[1]}", mesh=mesh, cache_weights=is_cached)
        with pytest.raises(ValueError) as error:
            _with_codes(replace(config, compile=compiled), checks.world_of(rank, world))
        said.append(str(error.value))
    return said


def test_weights_that_cannot_travel_as_nvfp4_are_refused_by_name(made):
    for cached, compiled in ranks.run(2, _asked, str(made)):
        assert cached.startswith("cache_weights=True with weights='nvfp4' and dp_shard=1") and "leave one" in cached
        assert compiled.startswith("compile='on' with weights='nvfp4' and dp_shard=1") and "leave one" in compiled
