"""`torchrun -m halfbyte train`: refused where it would train the same model several times."""

import pytest

from halfbyte import cli

pytest.importorskip("tyro")


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("rank", ["1", None])
def test_several_processes_are_refused_in_one_line_each(tmp_path, monkeypatch, capsys, command, rank):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    assert cli.main([command, "--corpus", "/absent", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"WORLD_SIZE=2, rank {rank or '?'}: halfbyte {command} is one process" in error
    assert "start it once, without torchrun" in error and "docs/distributed.md" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["1", "", "all"])
def test_one_process_of_a_launcher_trains(folder, monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", "0")
    command = ["train", "--preset", "tiny", "--steps", "1", "--recipe", "bf16", "--corpus", str(folder / "corpus")]
    assert cli.main([*command, "--out", str(folder / "run"), "--cache", str(folder / "cache")]) == 0
    assert (folder / "run" / "result.json").exists()
