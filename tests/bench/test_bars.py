"""All figures of a machine in one command: what runs where, what is ended by the clock, and what is printed."""

import json
import os
import subprocess
import sys
import time

import pytest

from bench import bars, machine, registry

CASES = {case.name for case in registry.all_cases()}


def test_every_case_of_a_step_and_of_the_host_is_run_once(tmp_path):
    globs = [glob for only in bars.BENCHED for glob in only]
    chosen = [case.name for glob in globs for case in registry.select(registry.all_cases(), [glob])]
    wanted = {name for name in CASES if name.partition("/")[0] in ("host", "eval", "steps", "train")}
    assert sorted(chosen) == sorted(wanted - {"train/moe-300m"}), "which has no bar, and takes a minute"
    found = bars.entries(tmp_path / "records", tmp_path, ("--commit", "abc"))
    assert len({entry.name for entry in found}) == len(found) == len(bars.BENCHED) + len(bars.STEPS)
    benched = [entry.command for entry in found if "bench" in entry.command]
    assert all(command[-1] in globs and "abc" in command for command in benched)
    assert all(command[command.index("--out") + 1] == str(tmp_path / "records") for command in benched)


def test_what_the_host_paces_runs_alone(tmp_path):
    found = bars.entries(tmp_path, tmp_path, ())
    assert [entry.name for entry in found if entry.alone] == ["host/* eval/*", "steps/60m"]


def entry(name, text, alone=False):
    return bars.Entry(name, (sys.executable, "-c", text), alone)


def test_what_runs_alone_runs_first_and_has_all_cores(tmp_path, capsys):
    text = f"import os, time; open('{tmp_path}/NAME.begun', 'w'); time.sleep(0.2); "
    text += f"print(len(os.sched_getaffinity(0)), len(os.listdir('{tmp_path}')))"
    waiting = [entry(name, text.replace("NAME", name), name in "bd") for name in "abcd"]
    queue = bars.Queue(waiting, tmp_path, time.monotonic() + 60)
    queue.run(["3", "5"], sorted(os.sched_getaffinity(0))[:2])
    order = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert order[:2] == ["b", "d"] and set(order[2:]) == {"a", "c"} and not queue.waiting
    every, there = len(os.sched_getaffinity(0)), [(1, "b"), (2, "d")]  # files begun when it ends, besides outputs
    for count, name in there:
        assert (tmp_path / f"{name}.txt").read_text().split() == [str(every), str(2 * count)], name
    late = bars.Queue([entry("b", "", True)], tmp_path, time.monotonic())
    late.run(["3"], sorted(os.sched_getaffinity(0)))
    assert [e.name for e in late.waiting] == ["b"], "the clock holds for it too"


def test_each_gpu_has_one_entry_at_a_time(tmp_path, capsys):
    (tmp_path / "seen").mkdir()
    own = f"p = '{tmp_path}/seen/' + os.environ['CUDA_VISIBLE_DEVICES']"
    text = f"import os, time; {own}; os.mkdir(p); time.sleep(0.2); os.rmdir(p); print(*os.sched_getaffinity(0))"
    queue = bars.Queue([entry(f"e {i}", text) for i in range(6)], tmp_path, time.monotonic() + 60)
    cores = sorted(os.sched_getaffinity(0))[:2]
    queue.run(["3", "5"], cores)
    assert [status for _, status in queue.ended] == [0] * 6 and not queue.waiting
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6 and {line.rpartition(" ")[2] for line in said} == {"3", "5"}
    seen = {file.read_text().strip() for file in tmp_path.glob("*.txt")}
    assert seen <= set(map(str, cores)) and set(os.sched_getaffinity(0)) >= set(cores), (
        "one core each, all of them here"
    )


def test_the_clock_ends_what_runs_with_all_that_it_started(tmp_path, capsys):
    child = f"import time; time.sleep(2); open('{tmp_path}/late', 'w')"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    wrong = entry("wrong", "raise SystemExit(3)")
    queue = bars.Queue([wrong, entry("long", text), entry("never", "")], tmp_path, time.monotonic() + 0.8)
    queue.run(["0"], sorted(os.sched_getaffinity(0)))
    assert [e.name for e in queue.waiting] == ["never"] and [status for _, status in queue.ended] == [3, -9]
    said = capsys.readouterr().out
    assert "wrong: 0 s on GPU 0, FAILED: " in said and "long: 1 s on GPU 0, ended by the limit of time" in said
    time.sleep(2)
    assert not (tmp_path / "late").exists()


def test_speeds_are_read_from_the_table_of_compare(tmp_path):
    file = tmp_path / "out.txt"
    table = "| recipe | held-out loss | gap to bf16 | tokens/s |\n| --- | ---: | ---: | ---: |\n"
    table += "| bf16   | 4.37 | | 772,155 |\n"
    file.write_text(f"step 60\n{table}| nvfp4  | 4.37 | +0.1% | 693,331 |\n")
    assert bars.speeds(file) == "; tokens/s: bf16 772,155; nvfp4 693,331 (1.114 x its time)"
    file.write_text(table)
    assert bars.speeds(file) == ""


def test_a_record_is_printed_with_its_bars(tmp_path):
    path = tmp_path / "nvidia-h200-20261129T020003-53eedd15.jsonl"
    step = {"case": "steps/60m", "shape": [16, 2048], "us": 50468.1, "metric": "x bf16", "value": 1.2306}
    step |= {"verdict": "least", "least": 1.3, "aim": 1.15}
    without = {"case": "amax/tensor", "shape": [8], "problem": "out of memory"}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in ({"run": {"device": "NVIDIA H200"}}, step, without)))
    head, first, second = bars.lines_of(path)
    assert head == f"{path.name}: NVIDIA H200"
    assert first.split() == ["steps/60m", "16x2048", "1.231", "x", "bf16", "least", "1.3/1.15"]
    assert second.split()[:5] == ["amax/tensor", "8", "out", "of", "memory"]


def test_records_are_in_their_folder_whatever_the_clock_ends(tmp_path, capsys, monkeypatch):
    kept = tmp_path / "records"
    kept.mkdir()
    (kept / "of-before.jsonl").write_text("{}")
    line = {"case": "a/b", "shape": [8], "value": 1.25, "metric": "x bf16"}
    line |= {"verdict": "least", "least": 1.3, "aim": 1.2}
    head = {"run": {"device": "GPU"}}

    def made(records, folder, commit):
        full = f"open('{records}/one.jsonl', 'w').write({chr(10).join(map(json.dumps, (head, line)))!r})"
        cut = f"import time; open('{records}/two.jsonl', 'w').close(); time.sleep(9)"
        return [entry("full", full), entry("cut", cut)]

    monkeypatch.setattr(bars, "entries", made)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert bars.main(["--out", str(kept), "--seconds", "1.5"]) == 1
    said = capsys.readouterr().out
    assert "cut: 1 s on GPU 0, ended by the limit of time" in said
    assert said.splitlines()[-2:] == ["one.jsonl: GPU", f"{'a/b':26}{'8':16}1.250 x bf16  least 1.3/1.2"]


def test_what_was_not_begun_is_named_and_no_success(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bars, "entries", lambda *_: [entry("one", ""), entry("two", "")])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert bars.main(["--out", str(tmp_path), "--seconds", "0"]) == 1
    assert capsys.readouterr().out.splitlines() == ["not begun: one", "not begun: two"]
    assert bars.main(["--out", str(tmp_path), "--seconds", "60"]) == 0


def test_entries_are_chosen_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bars, "entries", lambda *_: [entry("steps/1b", ""), entry("train/1b", ""), entry("other", "")])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert bars.main(["--out", str(tmp_path), "--only", "*/1b", "--seconds", "60"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["steps/1b", "train/1b"]
    with pytest.raises(SystemExit):
        bars.main(["--out", str(tmp_path), "--only", "steps/2b"])
    assert "entries are steps/1b; train/1b; other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "count", "wanted"),
    [("4,6", 2, ["4", "6"]), ("GPU-a1,GPU-b2", 2, ["GPU-a1", "GPU-b2"]), (None, 2, ["0", "1"]), ("4,6", 1, ["4"])],
)
def test_gpus_are_named_as_the_variable_names_them(named, count, wanted, monkeypatch):
    """A process that is given another name would have a GPU that is somebody else's, or none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert machine.visible_gpus() == wanted


@pytest.mark.parametrize(
    ("gpus", "cores", "wanted"),
    [(2, [3, 4, 5, 6], [(3, 4), (5, 6)]), (2, [3, 4, 5], [(3,), (4,)]), (3, [5, 6], [(5, 6)] * 3), (1, [7], [(7,)])],
)
def test_gpus_share_out_the_cores_and_where_there_are_fewer_have_them_all(gpus, cores, wanted):
    places = machine.places([str(index) for index in range(gpus)], cores)
    assert [(place.gpu, place.cores) for place in places] == [(str(i), own) for i, own in enumerate(wanted)]


def test_a_commit_is_marked_where_its_files_differ_not_for_others_beside_them(tmp_path):
    """Records of a marked commit count for less."""

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(("git", *who, *arguments), cwd=tmp_path, check=True, capture_output=True, text=True)

    assert machine.commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "one").write_text("1")
    git("add", "one")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD").stdout[:10]
    (tmp_path / "record.jsonl").write_text("{}")
    assert machine.commit(tmp_path) == head
    (tmp_path / "one").write_text("2")
    assert machine.commit(tmp_path) == f"{head}+"
