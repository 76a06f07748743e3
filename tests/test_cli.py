"""The command line: exit statuses and one-line errors."""

import os
import runpy
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from halfbyte import cli

pytest.importorskip("tyro")


def test_help_lists_its_commands(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_the_package_runs_as_a_module(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["halfbyte", "trian"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("halfbyte", run_name="__main__")
    assert stop.value.code == 2
    assert "no command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("env", "stopped\n"), ("study", "stopped; the same command goes on from the last checkpoint\n")],
)
def test_ctrl_c_promises_no_checkpoints_that_there_are_not(capsys, monkeypatch, name, said):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "env", stop)
    monkeypatch.setitem(cli.COMMANDS, name, cli.Command("halfbyte.cli", "env", ""))
    assert cli.main([name]) == 130
    assert capsys.readouterr().err == f"\nhalfbyte {name}: {said}"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_train_compare_and_study_alone_go_on_where_they_were_stopped(capsys, monkeypatch, name):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "env", stop)
    monkeypatch.setitem(cli.COMMANDS, name, cli.Command("halfbyte.cli", "env", ""))
    assert cli.main([name]) == 130
    assert ("goes on from" in capsys.readouterr().err) is (name in {"train", "compare", "study"})


def test_a_package_of_the_extra_is_named_and_a_module_of_ours_that_is_missing_is_no_mistake_of_a_user(
    capsys, monkeypatch
):
    def fail(arguments):
        if arguments:
            raise ModuleNotFoundError(f"No module named {arguments[0]!r}", name=arguments[0])
        raise ValueError("steps=0: give at least 1")

    monkeypatch.setattr(cli, "env", fail)
    assert cli.main(["env"]) == 2
    assert capsys.readouterr().err == "halfbyte env: steps=0: give at least 1\n"
    assert cli.main(["env", "tyro"]) == 2
    assert capsys.readouterr().err == "halfbyte env: No module named 'tyro': pip install 'halfbyte[train]'\n"
    with pytest.raises(ModuleNotFoundError, match=r"halfbyte\.train\.lop"):
        cli.main(["env", "halfbyte.train.lop"])


SLOW_TORCH = """
import signal, time

print("importing", flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
time.sleep(60)
"""
SCRIPT = "from halfbyte.cli import main\n\nraise SystemExit(main())\n"  # as pip writes it


@pytest.mark.parametrize(
    ("start", "status"), [(["-m", "halfbyte"], 130), (["halfbyte"], 130), (["of_a_user.py"], None)]
)
def test_ctrl_c_while_torch_is_imported(tmp_path, start, status):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    for name in ("halfbyte", "of_a_user.py"):
        (tmp_path / name).write_text(SCRIPT)
    paths = os.pathsep.join((str(tmp_path), str(Path(cli.__file__).parent.parent)))
    command = [sys.executable, *start, "env"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env={"PYTHONPATH": paths}, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        time.sleep(0.2)  # until it sleeps
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    if status is None:  # whose program decides what ctrl-C does
        assert process.returncode == -signal.SIGINT and error.endswith("KeyboardInterrupt\n")
    else:
        assert (process.returncode, error) == (status, "\nhalfbyte: stopped\n")


def test_unknown_command(capsys):
    assert cli.main(["trian"]) == 2
    assert "no command 'trian'; use one of train, compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--recipe", "fp3"], "recipe='fp3' is not a preset; use one of bf16, nvfp4"),
        (["compare", "--recipes", "bf16,fp3"], "recipe='fp3' is not a preset"),
        (["compare", "--recipes", ""], "name at least one"),
        (["train", "--preset", "cluster"], "preset='cluster' does not exist"),
        (["train", "--preset"], "argument --preset: expected one argument; halfbyte train --help says what"),
        (["train", "--corpus", "/absent"], "corpus='/absent': no such file or folder"),
        (["env", "--all"], "env takes no options"),
        (["train", "--lr", "-1"], "halfbyte train: lr=-1.0: give a number above 0\n"),
        (["train", "--model", "7b"], ": model='7b' is not a preset; use one of tiny, nano, 2m, 10m, 60m, 125m, 300m,"),
        (["train", "--steps", "1.5"], "Error parsing --steps: invalid literal for int() with base 10: '1.5'; halfbyte"),
        (["train", "--dtype", "fp4"], "'fp4' for argument '--dtype'. Expected one of ('auto', 'float32', 'bfloat16');"),
        (["train", "--steps", "/a" * 60], f"invalid literal for int() with base 10: '{'/a' * 60}'; halfbyte train"),
        (["compare", "--colour", "1"], "--colour, 1; halfbyte compare --help says what can be given\n"),
        (["inspect"], ": Missing from halfbyte inspect: PATH The folder of a run, one of its checkpoints, or a folder"),
        (["evaluate", "x"], "halfbyte evaluate: text, choices: give one of them, or both\n"),
        (
            ["verify", "--backend", "gpu"],
            "argument --backend: invalid choice: 'gpu' (choose from 'reference',",
        ),
        (["study"], ": the following arguments are required: FILE; halfbyte study --help says what can be given\n"),
        (["report", "--page"], ": the following arguments are required: run; halfbyte report --help says what"),
        (["explain", "16x16"], ": the following arguments are required: SPEC; halfbyte explain --help says what"),
        (
            ["export", "x", "y", "--batches", "few"],
            "argument --batches: invalid int value: 'few'; halfbyte export",
        ),
        (
            ["bench", "--limit", "long"],
            "argument --limit: invalid float value: 'long'; halfbyte bench --help says",
        ),
        (["plan", "--recompute", "all"], "'all' for argument '--recompute'. Expected one of ('auto', 'nothing',"),
    ],
)
def test_user_errors_are_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and error.startswith(f"halfbyte {arguments[0]}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--preset", "--corpus", "--lr", "--out", "--steps"))
    assert "noqa" not in text  # a comment behind a field is help


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_help(command, option, capsys):
    try:
        status = cli.main([command, option])
    except SystemExit as stop:
        status = stop.code
    text, error = capsys.readouterr()
    assert status == 0 and error == "" and text.startswith(f"usage: halfbyte {command} [-h]") and text.count("\n") > 1


def test_help_of_the_benchmark_without_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "halfbyte" / "cli.py"))
    assert cli.main(["bench", "--help"]) == 0
    assert "runs in a checkout" in capsys.readouterr().out
    assert cli.main(["bench"]) == 2
    assert "in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(option, capsys):
    assert cli.main([option]) == 0
    assert capsys.readouterr().out == f"halfbyte {metadata.version('halfbyte')}\n"


def test_a_preset_sets_the_defaults_of_the_other_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--preset", "one_gpu", "--help"])
    assert "60m" in capsys.readouterr().out


def test_env_reports_versions_and_backends(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text and "reference" in text


def test_train_in_one_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one scale for sixteen values " * 300)
    command = ["train", "--preset", "tiny", "--steps", "2", "--recipe", "bf16", "--corpus", str(tmp_path / "text.txt")]
    command += ["--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]
    assert cli.main(command) == 0
    assert "bf16: held-out loss" in capsys.readouterr().out
    assert cli.main([*command, "--lr", "0.1"]) == 2
    assert "choose another --out or --overwrite" in capsys.readouterr().err
    assert cli.main([*command, "--lr", "0.1", "--overwrite"]) == 0


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one scale for sixteen values " * 300)
    command = ["train", "--preset", "tiny", "--steps", "2", "--recipe", "bf16", "--corpus", str(tmp_path / "text.txt")]
    assert cli.main([*command, "--out", str(tmp_path / "run"), "--cache", str(tmp_path / "text.txt")]) == 2
    error = capsys.readouterr().err
    assert "text.txt: File exists" in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", (["--help"], ["train", "--help"], ["plan", "--model", "tiny"]))
def test_a_reader_that_leaves_ends_it_without_a_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, "-c", "import sys; from halfbyte.cli import main; sys.exit(main())", *arguments]
    result = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


PLAN = [sys.executable, "-c", "import sys; from halfbyte.cli import main; sys.exit(main())", "plan", "--model", "1b"]


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_a_closed_stream_ends_no_command(closed):
    def close() -> None:
        for number in closed:
            os.close(number)

    result = subprocess.run(PLAN, capture_output=True, text=True, check=False, preexec_fn=close)
    assert (result.returncode, result.stderr) == (0, "") and bool(result.stdout) == (1 not in closed)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_letters_that_an_encoding_lacks_end_no_command(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(PLAN, capture_output=True, check=False, env=environment)
    whole = subprocess.run(PLAN, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.count(b"\n") == whole.stdout.count(b"\n") and b"?" in result.stdout


def test_a_full_disk_behind_a_stream_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(PLAN, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("halfbyte plan: standard output or a file: No space left on device; make room")


@pytest.mark.parametrize("command", [["report", ""], ["report", "run", "--out", ""], ["verify", "--report", ""]])
def test_no_path_is_empty(command, capsys):
    assert cli.main(command) == 2
    assert "an empty path; give one, or leave the option out" in capsys.readouterr().err
