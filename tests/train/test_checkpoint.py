"""Checkpoints come back as they were, or are refused with the file's name and the reason."""

import pickle
import zipfile

import pytest
import torch

from halfbyte import files
from halfbyte.train import checkpoint

IDENTITY = {"recipe": "bf16", "seed": 0}


def content(step: int) -> dict:
    return {
        "identity": IDENTITY,
        "step": step,
        "position": 3 * step,
        "seconds": 1.5,
        "model": {"weight": torch.arange(1000.0)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}},
        "run_state": {"seed": 0},
    }


@pytest.fixture
def saved(tmp_path):
    return checkpoint.Checkpoints(tmp_path / "checkpoints", keep=2).save(content(7))


def refuses(path, reason, identity=IDENTITY):
    with pytest.raises(ValueError, match=reason) as error:
        checkpoint.load_checkpoint(path, identity)
    assert str(path) in str(error.value)


def test_what_was_saved_comes_back(saved):
    found = checkpoint.load_checkpoint(saved, IDENTITY)
    assert torch.equal(found["model"]["weight"], torch.arange(1000.0))
    assert (found["step"], found["position"], found["seconds"]) == (7, 21, 1.5)


def test_truncated(saved):
    saved.write_bytes(saved.read_bytes()[:-100])
    refuses(saved, "truncated or not a checkpoint")


def test_empty(saved):
    saved.write_bytes(b"")
    refuses(saved, "truncated or not a checkpoint")


def test_one_flipped_bit(saved):
    data = bytearray(saved.read_bytes())
    place = bytes(data).index(torch.arange(1000.0).numpy().tobytes()) + 1234
    data[place] ^= 1
    saved.write_bytes(bytes(data))
    refuses(saved, "corrupt .* does not match its checksum")


def test_a_state_dict_of_someone_else(saved):
    torch.save({"model": {"weight": torch.zeros(3)}}, saved)
    refuses(saved, "foreign")


def test_a_pickle_that_would_run_code(saved):
    torch.save({"format": checkpoint.FORMAT, "call": pickle.loads}, saved)
    refuses(saved, "not a checkpoint of halfbyte")


def test_a_broken_archive_of_someone_else(saved):
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights", "hello " * 10000)
    data = bytearray(saved.read_bytes())
    data[60:62] = b"\xff\xff"
    saved.write_bytes(bytes(data))
    refuses(saved, "truncated or not a checkpoint|corrupt")


def test_a_checkpoint_that_nobody_acknowledged_is_not_the_latest(saved):
    """Killed between the two, some ranks may have seen it and others not."""
    kept = checkpoint.Checkpoints(saved.parent, keep=2)
    later = kept.save(content(9))
    files.write_text(saved.parent / checkpoint.LATEST, f"{saved.name}\n")
    assert kept.latest() == saved != later


def test_an_unreadable_pointer_counts_as_gone(saved):
    (saved.parent / checkpoint.LATEST).write_bytes(b"\xff\xfe\n")
    assert checkpoint.Checkpoints(saved.parent, keep=2).latest() == saved


def test_a_text_file(saved):
    saved.write_text("weights")
    refuses(saved, "truncated or not a checkpoint")


@pytest.mark.parametrize("key", checkpoint.KEYS)
def test_a_missing_part(saved, key):
    parts = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, **content(7)}
    del parts[key]
    torch.save(parts, saved)
    refuses(saved, f"lacks {key}")


def test_a_later_version(saved):
    torch.save({"format": checkpoint.FORMAT, "version": 99, **content(7)}, saved)
    refuses(saved, "version 99")


def test_of_another_run(saved):
    refuses(saved, "of another run \\(seed: 0 there, 1 here\\)", identity=IDENTITY | {"seed": 1})


def test_the_last_ones_stay(tmp_path):
    kept = checkpoint.Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15):
        kept.save(content(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000010.pt", "step-00000015.pt"]
    assert kept.latest().name == "step-00000015.pt"


def test_deleting_a_broken_one_goes_back_to_the_one_before(tmp_path):
    kept = checkpoint.Checkpoints(tmp_path, keep=2)
    for step in (5, 10):
        kept.save(content(step))
    kept.latest().unlink()
    assert kept.latest().name == "step-00000005.pt"


def test_none_yet(tmp_path):
    assert checkpoint.Checkpoints(tmp_path / "absent", keep=2).latest() is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    files.write_text(path, "old")
    writer = files.atomic(path)
    writer.__enter__().write(b"new")
    with pytest.raises(RuntimeError, match="half way"):
        writer.gen.throw(RuntimeError("half way"))
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_leftovers_of_a_killed_writer_go(tmp_path):
    (tmp_path / ".step-00000010.pt.abc.tmp").write_bytes(b"half")
    assert checkpoint.Checkpoints(tmp_path, keep=2).latest() is None
    assert not list(tmp_path.iterdir())


def test_broken_json_is_named(tmp_path):
    (tmp_path / "result.json").write_text('{"half": ')
    with pytest.raises(ValueError, match=r"result\.json: not JSON"):
        files.read_json(tmp_path / "result.json")
    (tmp_path / "result.json").write_text("[]")
    with pytest.raises(ValueError, match=r"result\.json: holds no JSON object"):
        files.read_json(tmp_path / "result.json")


def test_of_a_link_the_link_alone_is_deleted(tmp_path):
    """A checkpoint that was moved to another disk; folders are moved aside before, which no link to one can be."""
    away = tmp_path / "away"
    away.mkdir()
    (away / "kept").write_text("bytes")
    link = tmp_path / "step-00000008"
    link.symlink_to(away)
    checkpoint.remove(link)
    assert not link.is_symlink() and (away / "kept").read_text() == "bytes"
