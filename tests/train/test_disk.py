"""A disk that is full while a run saves: one line, a status, and everything saved before is as it was."""

import contextlib
import os
import resource
import stat
import subprocess
from dataclasses import replace

import pytest

from halfbyte import cli, files
from halfbyte.train import checkpoint, log, loop

pytest.importorskip("tyro")


def command(config):
    options = {"steps": 8, "checkpoint-every": 2, "eval-every": 8, "log-every": 1, "warmup": 0, "decay": 0}
    paths = {"corpus": config.data.corpus, "out": config.run.out, "cache": config.run.cache}
    listed = [part for name, value in (options | paths).items() for part in (f"--{name}", str(value))]
    return ["train", "--preset", "tiny", "--recipe", "bf16", *listed]


@contextlib.contextmanager
def files_of_at_most(size):
    """What `ulimit -f` sets; Python ignores SIGXFSZ, so that writing fails with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def saved(run):
    """A run of 8 steps, extended from 2 that were saved: config, data, its checkpoint and what is in it."""
    config, data = run(steps=2, checkpoint_every=2, eval_every=8, log_every=1, warmup=0.0, decay=0.0)
    loop.train(config, "bf16", data)
    longer = replace(config, optim=replace(config.optim, steps=8))
    (path,) = (config.run.out / "checkpoints").glob("*.pt")
    return longer, data, path, path.read_bytes()


@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_ulimit_while_a_checkpoint_is_saved(saved, capsys, share):
    """Within the first tensor, in the middle, and in the list of contents at the end of the archive."""
    config, data, path, content = saved
    with files_of_at_most(int(share * len(content))):
        status = cli.main(command(config))
    error = capsys.readouterr().err
    target = path.with_name("step-00000004.pt")
    assert status == 2 and error.count("\n") == 1
    assert error == (
        f"halfbyte train: {target}: File too large, what was saved before is whole; make room or choose another path\n"
    )
    assert path.read_bytes() == content and checkpoint.Checkpoints(path.parent, keep=2).latest() == path
    assert sorted(p.name for p in path.parent.iterdir()) == ["latest", path.name]
    assert loop.train(config, "bf16", data)["steps"] == 8


def test_ulimit_while_a_line_of_the_log_is_written(saved, capsys):
    """The line is cut in half; the run that goes on drops it."""
    config, data, path, content = saved
    log_file, filler = config.run.out / "log.jsonl", '{"kind": "recipe", "step": 1}\n'
    limit = 20_000
    log_file.write_text(log_file.read_text() + (limit - 30 - log_file.stat().st_size) // len(filler) * filler)
    with files_of_at_most(limit):
        status = cli.main(command(config))
    error = capsys.readouterr().err
    assert status == 2 and error.startswith(f"halfbyte train: {log_file}: File too large, what was saved")
    assert error.count("\n") == 1 and path.read_bytes() == content
    assert log_file.stat().st_size == limit and log_file.read_bytes()[-1:] != b"\n"
    assert loop.train(config, "bf16", data)["steps"] == 8
    assert [line["step"] for line in log.read_log(config.run.out) if line["kind"] == "step"] == list(range(1, 9))


def test_a_full_disk(saved, tmp_path, capsys):
    """A real one: a filesystem in memory with room for one checkpoint and a half."""
    config, _, path, content = saved
    disk = tmp_path / "disk"
    disk.mkdir()
    size = (3 * len(content) // 2 >> 12) + 16 << 12
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a filesystem; the test of ulimit takes the same way through the code")
    try:
        moved = replace(config, run=replace(config.run, out=disk / "run"))
        subprocess.run(["cp", "-r", str(config.run.out), str(disk / "run")], check=True)
        assert cli.main(command(moved)) == 2
        error = capsys.readouterr().err
        target = disk / "run" / "checkpoints" / "step-00000004.pt"
        assert error.count("\n") == 1 and f"{target}: No space left on device, what was saved before is whole" in error
        assert (target.with_name(path.name)).read_bytes() == content
        assert not list((disk / "run").rglob("*.tmp"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_error_that_is_not_of_writing_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="of the caller"), files.atomic(tmp_path / "file"):
        raise RuntimeError("of the caller")
    with pytest.raises(OSError, match="elsewhere") as error, files.atomic(tmp_path / "file"):
        (tmp_path / "elsewhere").read_text()
    assert error.value.filename == str(tmp_path / "elsewhere") and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread, below
@pytest.mark.parametrize("when", ["opened", "closed"])
def test_tensorboard_names_its_folder(tmp_path, when):
    """Its writer has a thread, whose errors come with the next call: as it is opened, written to or closed."""
    pytest.importorskip("tensorboard")
    record = None if when == "opened" else log.Log(tmp_path, after=0, tensorboard=True)
    if record is not None:
        record.write("step", 1, {"loss": 2.5})
    with (
        files_of_at_most(200 if record else 1),
        pytest.raises(OSError, match="File too large, what was") as error,
    ):
        log.Log(tmp_path, after=0, tensorboard=True) if record is None else record.close()
    assert error.value.filename == str(tmp_path / "tensorboard")


def test_what_is_renamed_into_place_is_on_the_disk_and_for_all_to_read(tmp_path, monkeypatch):
    """A power cut after the rename would else leave a whole name with nothing behind it."""
    done, fsync, replace_ = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append(os.fstat(descriptor).st_size), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), replace_(old, new)))
    files.write_text(tmp_path / "a", "x" * 1000)
    assert done[:2] == [1000, "renamed"] and len(done) == 3, "the file, its name, and the folder that holds the name"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644
    with files.temporary_folder(tmp_path / "b") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
