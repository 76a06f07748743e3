"""torchrun -m halfbyte: one log, one progress line, one folder; and what is left when a rank dies or a disk is full."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
import launch
import pages
import ranks
import train_checks as checks

pytest.importorskip("tyro")
ROOT = Path(__file__).resolve().parent.parent.parent
FAULTY = Path(__file__).parent / "faulty.py"
HANG = 60
"""Seconds in which torchrun has to end when a rank is dead."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    checks.write_corpus(folder)
    checks.load(checks.tiny(str(folder), "mixed", "none"))
    return folder


def options(folder: Path, out: str, *more: str) -> list[str]:
    """Return the options of what `checks.tiny` builds."""
    fixed = ["--preset", "tiny", "--corpus", f"{folder}/mixed.txt", "--cache", f"{folder}/cache", "--log-every", "1"]
    return [*fixed, "--out", str(folder / out), *more]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def torchrun(
    *command: str, count: int = 2, seconds: float = 120, is_forked: bool = True
) -> subprocess.CompletedProcess:
    """Run ranks of a command under torchrun, forked from a server that has imported torch.

    Its ranks are too, which takes three seconds less for each, unless `is_forked` says otherwise: then torchrun starts
    an interpreter for each, as it does for users.
    """
    arguments = ["torchrun", "--standalone", "--nproc-per-node", str(count), *command]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("output", "error")]
        how = (arguments, environment(), *map(str, streams), count if is_forked else 0)
        launcher = ranks.CONTEXT.Process(target=launch.torchrun, args=how)
        launcher.start()
        launcher.join(seconds)
        if launcher.is_alive():
            launcher.kill()
            raise subprocess.TimeoutExpired(arguments, seconds)
        return subprocess.CompletedProcess(arguments, launcher.exitcode, *[stream.read_text() for stream in streams])


def free_port() -> int:
    """Return a port that nobody has, of those that no connection is given before the ranks listen to it."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(10_000, first), *range(last + 1, 65_536)]
    for port in random.sample(others, len(others)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


def own_lines(text: str) -> list[str]:
    """Return what halfbyte printed to standard error, without what torchrun did."""
    return [line for line in text.splitlines() if line.startswith("halfbyte ")]


def only_torchrun_traces(text: str) -> bool:
    """Whether no rank left a traceback: torchrun itself leaves one when a rank has failed."""
    return text.count("Traceback (most") == text.count("multiprocessing.errors.ChildFailedError")


def test_one_log_one_progress_line_one_folder(folder):
    config = checks.tiny(str(folder), "mixed", "plain", mesh=(1, 2))
    command = ["train", *options(folder, "plain", "--recipe", "nvfp4", "--dp-shard", "2")]
    done = torchrun("-m", "halfbyte", *command, is_forked=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [line.split()[0] for line in printed] == ["nvfp4", "nvfp4:", "log,"] and "step 12/12" in printed[0]
    assert "halfbyte" not in done.stderr and "Error" not in done.stderr and "terminate" not in done.stderr
    names = sorted(path.name for path in (folder / "plain").iterdir() if path.name != ".lock")
    assert names == ["checkpoints", "config.json", "layers.txt", "log.jsonl", "result.json"]
    assert sorted(path.name for path in (folder / "plain" / "checkpoints" / "step-00000012").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "run.pt",
    ]
    assert [step for kind, step, _ in checks.lines(config) if kind == "step"] == list(range(1, 13))
    result = json.loads((folder / "plain" / "result.json").read_text())
    assert result["tokens"] == 12 * config.data.tokens_per_step, "of all ranks together"
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])
    assert result["steady_tokens_per_second"] > 0
    assert result["environments"][0]["mesh"] == "dp_replicate=1, dp_shard=2"


def test_the_page_runs_under_torchrun(tmp_path):
    """Its code blocks as a script, on four ranks; `make test-docs` runs them on one."""
    blocks = pages.blocks(ROOT / "docs" / "many_gpus.md")
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.text for block in blocks if block.language == "python"))
    done = torchrun(str(script), count=4)
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr


def test_compare_writes_one_table(folder):
    """And goes on, on one process, with what two began."""
    command = ["compare", *options(folder, "table", "--recipes", "bf16,nvfp4", "--steps", "4")]
    done = torchrun("-m", "halfbyte", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1 and done.stdout.count("| bf16 ") == 1
    assert "2 ranks (dp_replicate=2, dp_shard=1)" in done.stdout.splitlines()[0]
    table = json.loads((folder / "table" / "results.json").read_text())["results"]
    assert [result["recipe"] for result in table] == ["bf16", "nvfp4"] and table[1]["gap_percent"]
    alone = subprocess.run(
        [sys.executable, "-m", "halfbyte", *command], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert alone.returncode == 0 and alone.stdout.count("finished before, kept") == 2, alone.stderr
    assert "mesh dp_replicate=2, dp_shard=1 there, 1 process here" in alone.stderr


def test_compare_with_weights_as_nvfp4_says_once_what_travels_in_its_dtype(folder):
    command = ["compare", *options(folder, "codes", "--recipes", "bf16,nvfp4,mxfp8", "--steps", "2")]
    done = torchrun("-m", "halfbyte", *command, "--dp-shard", "2", "--weights", "nvfp4")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("weights='nvfp4'")]
    assert len(said) == 2 and all("they travel in their dtype; " in line for line in said)
    assert "none of its layers has a recipe" in said[0] and "forward reads it as mxfp8" in said[1]
    tables = [(folder / "codes" / name / "layers.txt").read_text() for name in ("bf16", "nvfp4", "mxfp8")]
    assert ["gathered as" in table for table in tables] == [False, True, False]


@pytest.mark.parametrize(
    "more, said",
    [
        (["--weights", "nvfp4"], "parameters travel as NVFP4 and exist only so"),
        (["--weights", "nvfp4", "--dp-shard", "2", "--head", "shared"], "lm_head.weight: activations exchanged, "),
    ],
)
def test_what_travels_is_an_option_of_the_command(folder, more, said):
    out = f"travels{len(more)}"
    command = ["train", *options(folder, out, "--recipe", "nvfp4@all", "--steps", "2", "--batch", "2", *more)]
    done = torchrun("-m", "halfbyte", *command)
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr
    assert said in (folder / out / "layers.txt").read_text()


@pytest.mark.parametrize(
    "more, said",
    [
        (
            ["--recipe", "quartet2", "--weights", "nvfp4"],
            "weights='nvfp4': they travel in their dtype; the recipe reads no weight as one set of 16x16 tiles",
        ),
        (
            ["--recipe", "bf16", "--model", "moe-tiny", "--ep", "2", "--dispatch", "nvfp4"],
            "dispatch='nvfp4': tokens travel in their values; the recipe leaves what experts read in high precision",
        ),
    ],
)
def test_codes_that_a_recipe_leaves_no_room_for_are_said_once(folder, more, said):
    out = f"no codes{len(more)}"
    done = torchrun("-m", "halfbyte", "train", *options(folder, out, "--steps", "2", "--batch", "2", *more))
    assert done.returncode == 0 and done.stderr.count(said) == 1, done.stderr


SAVED = ["--checkpoint-every", "3", "--eval-every", "6", "--dp-shard", "2"]
TRAVEL = {"plain": [], "nvfp4": ["--weights", "nvfp4"]}
"""How weights travel: the runs that no fault meets are plain, since no bit differs."""


def faulty(
    folder: Path, out: str, place: str, rank: int, step: int, *more: str, is_forked: bool = True
) -> subprocess.CompletedProcess:
    """Run into a fault; torchrun must end in time."""
    command = ["train", *options(folder, out, *SAVED, "--recipe", "nvfp4", *more)]
    begin = time.monotonic()
    done = torchrun(str(FAULTY), place, str(rank), str(step), *command, is_forked=is_forked)
    assert done.returncode != 0 and time.monotonic() - begin < HANG, (place, done.stderr)
    assert "terminate called" not in done.stderr
    return done


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the whole checkpoints, after looking that the newest is acknowledged."""
    found = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert not found or (run / "checkpoints" / "latest").read_text().strip() == found[-1]
    return [int(name.removeprefix("step-")) for name in found]


def test_every_fault_leaves_the_last_checkpoint_and_the_rest_is_as_undisturbed(folder):
    """One run meets them all, one after the other, and ends with the bits of one that met none.

    Also where weights travel as codes: killed in their gather, and gone on with, from what a plain run saved.
    """
    run = folder / "faults"
    killed = faulty(folder, "faults", "forward", 1, 5, is_forked=False)
    assert saved_steps(run) == [3] and "SIGKILL" in killed.stderr
    (said,) = own_lines(killed.stderr)
    assert said.startswith("halfbyte train: rank 0 lost another (") and said.endswith(
        "goes on from its last checkpoint"
    )
    faulty(folder, "faults", "backward", 0, 6)
    assert saved_steps(run) == [3]
    faulty(folder, "faults", "gather", 1, 5)
    assert saved_steps(run) == [3]
    in_codes = faulty(folder, "faults", "gather", 1, 5, *TRAVEL["nvfp4"])
    assert saved_steps(run) == [3] and "SIGKILL" in in_codes.stderr
    full = faulty(folder, "faults", "disk", 1, 6)
    target = run / "checkpoints" / "step-00000006"
    expected = (
        f"halfbyte train: {target}: File too large, what was saved before is whole; make room or choose another path"
    )
    assert own_lines(full.stderr) == [expected] and only_torchrun_traces(full.stderr)
    assert saved_steps(run) == [3] and not list((run / "checkpoints").glob(".step-*"))
    faulty(folder, "faults", "save", 1, 6)
    assert saved_steps(run) == [3]
    goes_on = options(folder, "faults", *SAVED, "--recipe", "nvfp4", *TRAVEL["nvfp4"])
    done = torchrun("-m", "halfbyte", "train", *goes_on)
    assert done.returncode == 0, done.stderr
    assert saved_steps(run) == [9, 12] and not list((run / "checkpoints").glob(".*"))
    assert "gathered as" in (run / "layers.txt").read_text()

    config = checks.tiny(str(folder), "mixed", "undisturbed", mesh=(1, 2), checkpoint_every=3)
    config = checks.replace(config, eval_every=6)
    ends = ranks.run(2, checks.train_all, [(config, "nvfp4")])
    resumed = checks.tiny(str(folder), "mixed", "faults", mesh=(1, 2), checkpoint_every=3)
    assert checks.lines(resumed) == checks.lines(config)
    for begun, _ in ranks.run(2, checks.until, checks.replace(resumed, eval_every=6), "nvfp4", 12):
        assert begun == (12, 12, ends[0][0])


def test_steps_go_on_while_a_save_is_under_way(folder):
    config = checks.tiny(str(folder), "mixed", "while", mesh=(1, 2), checkpoint_every=4, async_save=True)
    assert ranks.run(2, checks.saves_behind, config) == [3, 3]
    assert saved_steps(folder / "while") == [8, 12]
    alone = checks.tiny(str(folder), "mixed", "alone", async_save=True)
    with pytest.raises(ValueError, match="async_save=True: one process writes its checkpoints at once; start several"):
        checks.loop.train(alone, "nvfp4", checks.load(alone))


def test_a_save_behind_the_steps_is_whole_or_absent_and_changes_no_bit(folder):
    """Killed as a rank writes in the background, out of room there, and undisturbed."""
    run = folder / "behind"
    faulty(folder, "behind", "save", 1, 6, "--async-save")
    assert saved_steps(run) == [3]
    full = faulty(folder, "behind", "disk", 1, 6, "--async-save")
    (said,) = own_lines(full.stderr)
    assert said.startswith(f"halfbyte train: {run / 'checkpoints' / 'step-00000006'}: File too large")
    assert saved_steps(run) == [3] and not list((run / "checkpoints").glob(".step-*"))
    done = torchrun("-m", "halfbyte", "train", *options(folder, "behind", *SAVED, "--recipe", "nvfp4", "--async-save"))
    assert done.returncode == 0, done.stderr
    assert saved_steps(run) == [9, 12] and not list((run / "checkpoints").glob(".*"))
    config = checks.tiny(str(folder), "mixed", "behind-undisturbed", mesh=(1, 2), checkpoint_every=3)
    config = checks.replace(config, eval_every=6)
    ends = ranks.run(2, checks.train_all, [(config, "nvfp4")])
    resumed = checks.tiny(str(folder), "mixed", "behind", mesh=(1, 2), checkpoint_every=3)
    assert checks.lines(resumed) == checks.lines(config)
    for begun, _ in ranks.run(2, checks.until, checks.replace(resumed, eval_every=6), "nvfp4", 12):
        assert begun == (12, 12, ends[0][0])


@pytest.mark.full
@pytest.mark.parametrize("travel", TRAVEL)
@pytest.mark.parametrize(
    ("place", "rank"),
    [*product(("forward", "backward", "gather", "save"), (0, 1)), ("publish", 0)],  # the first rank renames the folder
)
def test_each_kill_of_each_rank_three_times(folder, place, rank, travel):
    """And what goes on in between, to the step that met it, has the bits of the run that met none."""
    out, codes = f"{place}{rank}-{travel}", TRAVEL[travel]
    for step in (3, 6, 9):
        killed = faulty(folder, out, place, rank, step, *codes)
        travelled = "gathered as" in (folder / out / "layers.txt").read_text()
        assert "SIGKILL" in killed.stderr and travelled is (travel == "nvfp4")
        assert saved_steps(folder / out)[-1:] == ([step - 3] if step > 3 else [])
        stopped = faulty(folder, out, "signal", 1, step, *codes)
        assert saved_steps(folder / out)[-1] == step, stopped.stderr
    config = checks.tiny(str(folder), "mixed", f"{out}-undisturbed", mesh=(1, 2), checkpoint_every=3)
    ranks.run(2, checks.train_all, [(checks.replace(config, eval_every=6), "nvfp4")])
    resumed = checks.tiny(str(folder), "mixed", out, mesh=(1, 2))
    assert checks.lines(resumed, "step") == [line for line in checks.lines(config, "step") if line[1] <= 9]


@pytest.mark.full
@pytest.mark.parametrize("place", ["forward", "backward", "save"])
def test_a_kill_among_ranks_that_hold_codes_alone(folder, place):
    """ZeroOptimizer in the place of DDP; the rest is as of the run that met none."""
    out, codes = f"codes-{place}", ["--dp-shard", "1", "--weights", "nvfp4"]
    faulty(folder, out, place, 1, 6, *codes)
    assert saved_steps(folder / out) == [3]
    done = torchrun("-m", "halfbyte", "train", *options(folder, out, *SAVED, "--recipe", "nvfp4", *codes))
    assert done.returncode == 0, done.stderr
    config = checks.tiny(str(folder), "mixed", f"{out}-undisturbed", mesh=(2, 1), checkpoint_every=3)
    config = checks.replace(config, eval_every=6, mesh=checks.replace(config.mesh, weights="nvfp4"))
    ranks.run(2, checks.train_all, [(config, "nvfp4")])
    assert checks.lines(checks.tiny(str(folder), "mixed", out, mesh=(2, 1))) == checks.lines(config)


def children(process: int) -> list[int]:
    """Return a process and all that it started."""
    found = subprocess.run(["ps", "--ppid", str(process), "-o", "pid="], capture_output=True, text=True).stdout.split()
    return [process, *(other for child in found for other in children(int(child)))]


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_of_two_nodes_one_is_killed(folder, victim):
    """Two launchers that meet, as on two machines; the other ends by itself, and both go on together."""
    run = folder / f"nodes{victim}"
    command = ["train", *options(folder, run.name, "--recipe", "nvfp4", "--dp-shard", "2", "--checkpoint-every", "3")]

    def start(more: list[str]) -> list[subprocess.Popen]:
        meet = ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", f"localhost:{free_port()}"]
        node = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return [subprocess.Popen([*node, *more, *command], env=environment(), **pipes) for _ in range(2)]

    nodes = start([str(ROOT / "tests" / "scale" / "slow.py"), "1.0"])
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes)
        time.sleep(0.05)
    for process in children(nodes[victim].pid):
        os.kill(process, signal.SIGKILL)
    assert nodes[1 - victim].wait(HANG) != 0
    assert saved_steps(run)
    assert [node.wait(120) for node in start(["-m", "halfbyte"])] == [0, 0]
    config = checks.tiny(str(folder), "mixed", f"nodes{victim}-undisturbed", mesh=(1, 2), checkpoint_every=3)
    ranks.run(2, checks.train_all, [(config, "nvfp4")])
    resumed = checks.tiny(str(folder), "mixed", run.name, mesh=(1, 2))
    assert checks.lines(resumed) == checks.lines(config)


def test_an_error_of_one_rank_is_shown_once(folder):
    done = faulty(folder, "error", "error", 1, 2)
    assert own_lines(done.stderr) == ["halfbyte train: rank 1 had enough"]
    assert only_torchrun_traces(done.stderr)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(folder):
    done = faulty(folder, "signal", "signal", 1, 4)
    assert own_lines(done.stderr) == [
        f"halfbyte train: stopped by SIGTERM; the same command goes on with step 5 of 12 in {folder}/signal"
    ]
    assert saved_steps(folder / "signal") == [3, 4]


def started(
    folder: Path, out: str, changes: list[list[str]], program: tuple[str, ...] = ("-m", "halfbyte")
) -> list[tuple[int, str]]:
    """Start a process for each rank, as a launcher on several nodes does; return status and standard error of each."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(changes))}
    command = [sys.executable, *program, "train", *options(folder, out)]
    processes = [
        subprocess.Popen(
            [*command, *more],
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, more in enumerate(changes)
    ]
    try:
        return [(process.wait(HANG), process.stderr.read()) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


OTHERWISE = ["--recipe", "bf16", "--seed", "3", "--lr", "0.001", "--model", "2m"]


def test_ranks_of_other_commands_get_one_error_that_names_the_difference(folder):
    ends = started(folder, "other", [["--recipe", "nvfp4"], OTHERWISE])
    assert all(status for status, _ in ends)
    (said,) = [line for _, error in ends for line in own_lines(error)]
    assert said.startswith("halfbyte train: rank 1 was started otherwise than rank 0 (")
    for difference in (
        "model: '2m' there, 'tiny' here",
        "optim.lr: 0.001 there, 0.005 here",
        "recipe: 'bf16' there, 'nvfp4' here",
        "seed: 3 there, 0 here",
    ):
        assert difference in said
    assert not (folder / "other").exists()


def test_a_rank_of_another_release_gets_one_error_that_names_it(folder):
    faulty_rank = str(FAULTY), "version", "1", "0"
    ends = started(folder, "release", [["--recipe", "nvfp4"]] * 2, faulty_rank)
    assert all(status for status, _ in ends)
    (said,) = [line for _, error in ends for line in own_lines(error)]
    here = checks.loop.measure.package_versions()["halfbyte"]
    assert f"rank 1 was started otherwise than rank 0 (halfbyte: '0.0.1' there, {here!r} here, where" in said
    assert not (folder / "release").exists()
