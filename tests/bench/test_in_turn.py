"""bench.in_turn: two trees, two processes, pairs; what is slower, what has no figure, what is left."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from bench import in_turn, turn_worker
from bench.registry import Unequal

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_verdict_is_that_of_ratios_and_their_spread():
    pairs = [(105.0, 100.0), (104.0, 100.0), (106.0, 100.0), (105.0, 100.0), (106.0, 101.0)]
    values = in_turn.compared("gemm/decoded", (2, 3), pairs)
    assert values["ratio"] == 1.05 and values["us"] == 105.0 and values["other_us"] == 100.0 and values["pairs"] == 5
    assert values["spread"] == pytest.approx(1.055 - 1.0447525, abs=1e-6)  # quartiles between the 1st, 2nd; 4th, 5th
    assert values["verdict"] == "slower"
    assert in_turn.compared("a/b", (2,), [(b, a) for a, b in pairs])["verdict"] == "faster"
    noisy = in_turn.compared("a/b", (2,), [(105.0, 100.0), (99.0, 100.0), (112.0, 100.0)])
    assert noisy["ratio"] == 1.05 and noisy["verdict"] == "equal"


def other_tree(folder: Path) -> Path:
    """Make a tree whose operations sleep before they run and which lacks a case."""
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    (folder / "halfbyte").symlink_to(ROOT / "halfbyte")
    measure = folder / "bench" / "measure.py"
    text = measure.read_text()
    changed = text.replace("[lambda x=x: function(x) for", "[lambda x=x: (time.sleep(0.4), function(x))[1] for")
    assert changed != text
    measure.write_text(changed)
    gemm = folder / "bench" / "cases" / "gemm.py"
    text = gemm.read_text()
    assert text.count('"gemm/decoded"') == 1
    gemm.write_text(text.replace('"gemm/decoded"', '"gemm/other"'))
    return folder


def test_each_tree_runs_its_own_code(tmp_path, capsys):
    other = other_tree(tmp_path / "other")
    options = ["--backend", "reference", "--pairs", "3", "--budget", "0.01", "--out", str(tmp_path)]
    cases = ["--only", "transpose/*", "gemm/decoded", "--other-commit", "before", "--commit", "now"]
    assert in_turn.main([str(other), *cases, *options]) == 1, "a case has no figure"
    printed = capsys.readouterr().out
    (path,) = tmp_path.glob("turns-*.jsonl")
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["run"]["other_commit"] == "before" and head["run"]["commit"] == "now"
    (found,) = [line for line in lines if line["case"].startswith("turns/transpose/")]
    assert found["verdict"] == "faster" and found["other_us"] > 400_000 > found["us"]
    (missing,) = [line for line in lines if line["case"] == "turns/gemm/decoded"]
    assert missing["problem"] == "the other: this tree has no such case" and "NO FIGURE: the other" in printed
    assert in_turn.main([str(other), *cases, *options, "--after", str(path)]) == 0, "nothing is left"


class Stub:
    """A tree that needs no process."""

    def __init__(self, root, name, *how):
        self.name, self.log = name, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def begin(self, case, shape, lead=0):
        self.case = case
        Order.leads.append(lead)

    def wait(self):
        if self.name == "the other" and self.case == "amax/plain":
            raise in_turn.Failed("the other: its process ended with status -11")

    def time(self):
        Order.log.append(self.name)
        if self.name == "this tree" and self.case == "amax/rotated":
            raise in_turn.Failed("this tree: RuntimeError: out of memory")
        return 1.0

    def end(self):
        Order.ended.append((self.name, self.case))

    def renew(self):
        Order.log.append(f"{self.name} anew")


class Order:
    log: ClassVar[list[str]] = []
    ended: ClassVar[list[tuple[str, str]]] = []
    leads: ClassVar[list[int]] = []


def test_pairs_begin_by_turns_and_a_crash_costs_one_case(monkeypatch):
    monkeypatch.setattr(Order, "log", [])
    monkeypatch.setattr(Order, "ended", [])
    mine, other = Stub("", "this tree"), Stub("", "the other")
    assert in_turn.pairs_of(mine, other, "transpose/packed", (1, 2), 3, in_turn.Floor()) == [(1.0, 1.0)] * 3
    assert Order.log == ["this tree", "the other", "the other", "this tree", "this tree", "the other"]
    with pytest.raises(in_turn.Failed, match="status -11"):
        in_turn.pairs_of(mine, other, "amax/plain", (1, 2), 3, in_turn.Floor())
    assert Order.ended[-1] == ("this tree", "amax/plain"), "the tree that was ready goes on"
    with pytest.raises(in_turn.Failed, match="out of memory"):
        in_turn.pairs_of(mine, other, "amax/rotated", (1, 2), 3, in_turn.Floor())
    assert Order.ended[-2:] == [("this tree", "amax/plain"), ("the other", "amax/rotated")], (
        "who waits goes on, no other"
    )


def test_pairs_come_from_several_processes(monkeypatch):
    monkeypatch.setattr(Order, "log", [])
    monkeypatch.setattr(Order, "leads", [])
    trees, floor = (Stub("", "this tree"), Stub("", "the other")), in_turn.Floor()
    assert in_turn.pairs_of_processes(*trees, "transpose/packed", (1, 2), 3, 2, floor) == [(1.0, 1.0)] * 6
    anew = ["this tree anew", "the other anew"]
    assert Order.log[6:8] == anew and Order.log[:6] == Order.log[8:] and not set(anew) & set(Order.log[:6])
    assert in_turn.pairs_of_processes(*trees, "transpose/packed", (1, 2), 3, 5, floor) == [(1.0, 1.0)] * 15
    assert Order.leads[:2] == [0, 0] and Order.leads[:4] == Order.leads[4:8], "a reading can be repeated"
    assert len(set(Order.leads[6:])) == 8 and 0 <= min(Order.leads) <= max(Order.leads) < 1024, "all places differ"


def test_a_new_process_is_another_one():
    with in_turn.Tree(ROOT, "this tree", "reference", 0.01) as tree:
        first = tree.process
        tree.renew()
        assert first.poll() is not None and tree.process.poll() is None and tree.process.pid != first.pid


def test_a_process_that_ends_while_a_case_is_timed_is_replaced(monkeypatch):
    """The real one, of which a line answers and then nobody reads."""
    code = "import json, sys; input(); print(json.dumps({'ready': True}), flush=True)"
    start = partial(subprocess.Popen, [sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    monkeypatch.setattr(in_turn.Tree, "_start", lambda self: start())
    asked = in_turn.Tree.time
    monkeypatch.setattr(in_turn.Tree, "time", lambda self: (self.process.wait(), asked(self)))
    with in_turn.Tree(ROOT, "the other", "reference", 0.01) as other:
        for _ in range(2):
            with pytest.raises(in_turn.Failed, match="the other: its process ended with status 0"):
                in_turn.pairs_of(Stub("", "this tree"), other, "amax/plain", (1, 2), 3, in_turn.Floor())


def test_a_case_answers_as_often_as_it_is_asked():
    """What a case measures first compiles and counts for nothing."""
    for kind in ("measured", "whole"):
        orders = io.StringIO("".join(json.dumps({"order": order}) + "\n" for order in ("time", "time", "next")))
        turns, seconds = turn_worker.Turns(orders, io.StringIO()), iter([9.0, 1.0, 2.0])
        if kind == "measured":
            with pytest.raises(turn_worker.Next):
                turns._serve(lambda seconds=seconds: next(seconds))
        else:
            next(seconds)
            turns.whole(lambda seconds=seconds: next(seconds))
        said = list(map(json.loads, turns.answers.getvalue().splitlines()))
        assert said == [{"ready": True}, {"us": 1e6}, {"us": 2e6}], kind


def test_a_worker_says_why_there_is_no_figure_and_goes_on(monkeypatch):
    """What cases print is no answer."""

    taken, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: (taken.append(size), empty(*size, **how))[1])

    def run(setting, shape) -> None:
        print("compiling")
        assert taken.pop() == (3 << 20,), "memory is taken before the case runs"
        if shape == (1,):
            raise RuntimeError("no memory\nof 80 GB")
        if shape == (2,):
            raise Unequal("row 3 differs")

    for module, name in ((turn_worker.measuring, "measure"), (turn_worker.attention, "measure")):
        monkeypatch.setattr(module, name, getattr(module, name))  # main replaces it
    monkeypatch.setattr(turn_worker.measuring, "measure_alternately", turn_worker.measuring.measure_alternately)
    monkeypatch.setattr(turn_worker, "all_cases", lambda: [SimpleNamespace(name="a/case", run=run)])
    order = {"case": "a/case", "backend": "reference", "budget": 0.01, "whole": False, "lead": 3}
    lines, said = [json.dumps({**order, "shape": [size]}) + "\n" for size in (1, 2, 3)], io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(lines)))
    monkeypatch.setattr(sys, "stdout", said)
    turn_worker.main()
    assert [json.loads(line)["problem"] for line in said.getvalue().splitlines()] == [
        "RuntimeError: no memory",
        "Unequal: row 3 differs",
        "it was not timed: it measures itself",
    ]


def test_cases_that_measure_themselves_run_whole(monkeypatch):
    said = []
    monkeypatch.setattr(
        in_turn.Tree, "_start", lambda self: subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    )
    monkeypatch.setattr(in_turn.Tree, "_say", lambda self, order: said.append((order["case"], order["whole"])))
    with in_turn.Tree(ROOT, "this tree", None, 0.1) as tree:
        for case in ("host/linear-nvfp4", "steps/60m", "train/1b", "transpose/packed"):
            tree.begin(case, (1,))
    assert said == [("host/linear-nvfp4", True), ("steps/60m", True), ("train/1b", True), ("transpose/packed", False)]


class Timed(Stub):
    """A tree's process on a GPU; this tree's `a/slow` reads slower until its process is another."""

    lanes: ClassVar[dict[str, list[str]]] = {}
    better = 1.0

    def __init__(self, root, name, backend, budget, gpu):
        super().__init__(root, name)
        self.gpu, self.anew = gpu, False

    def time(self):
        time.sleep(0.02)
        Timed.lanes.setdefault(self.gpu, []).append(self.case)
        if self.case != "a/slow" or self.name != "this tree":
            return 1.0
        return Timed.better if self.anew else 1.5

    def renew(self):
        self.anew = True


@pytest.mark.parametrize(("again", "better", "status"), [(0, 1.0, 1), (3, 1.0, 0), (3, 1.5, 1)])
def test_every_gpu_has_a_lane_and_what_is_slower_is_read_again(again, better, status, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(in_turn, "Tree", Timed)
    monkeypatch.setattr(Timed, "lanes", {})
    monkeypatch.setattr(Timed, "better", better)
    monkeypatch.setattr(in_turn.machine, "visible_gpus", lambda: ["3", "5"])
    names = ["a/slow", "a/b", "a/c", "a/d"]
    cases = [SimpleNamespace(name=name, small=(1, 2), shapes=()) for name in names]
    monkeypatch.setattr(in_turn, "all_cases", lambda: cases)
    monkeypatch.setattr(in_turn, "select", lambda cases, only: cases)
    assert in_turn.main([str(ROOT), "--out", str(tmp_path), "--pairs", "3", "--again", str(again)]) == status
    taken = {gpu: set(cases) for gpu, cases in Timed.lanes.items()}
    assert set(taken) == {"3", "5"}, "each lane sees a GPU of its own"
    assert sorted(case for case in names if sum(case in lane for lane in taken.values())) == sorted(names)
    (path,) = tmp_path.glob("turns-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    slow = [line for line in lines if line["case"] == "turns/a/slow"]
    assert len(lines) == len(names) + bool(again) and len(slow) == 1 + bool(again)
    assert slow[0]["verdict"] == "slower" and slow[0]["ratio"] == 1.5 and slow[-1]["pairs"] == (9 if again else 3)
    if again:
        assert slow[-1]["ratio"] == better, "the first of three processes is not all of the reading"
    assert f"4 timed, {status} slower or without a figure, 0 left" in capsys.readouterr().out


class Watched(Timed):
    """A tree that notes when it prepares and when it is timed."""

    spans: ClassVar[list[tuple[str, str, str, float, float]]] = []

    def note(self, what, seconds):
        begun = time.monotonic()
        time.sleep(seconds)
        Watched.spans.append((self.gpu, what, self.case, begun, time.monotonic()))

    def begin(self, case, shape, lead=0):
        self.case = case

    def wait(self):
        self.note("prepares", 0.02)
        if self.case == "a/3" and self.name == "the other":
            raise in_turn.Failed("the other: out of memory")

    def time(self):
        self.note("timed", 0.01)
        return 1.0

    def renew(self):
        self.note("prepares", 0.01)


def test_cases_prepare_at_once_and_each_is_timed_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(in_turn, "Tree", Watched)
    monkeypatch.setattr(Watched, "spans", [])
    monkeypatch.setattr(in_turn.machine, "visible_gpus", lambda: ["3", "5"])
    cases = [SimpleNamespace(name=f"a/{i}", small=(1, 2), shapes=()) for i in range(12)]
    monkeypatch.setattr(in_turn, "all_cases", lambda: cases)
    monkeypatch.setattr(in_turn, "select", lambda cases, only: cases)
    options = ["--out", str(tmp_path), "--pairs", "3", "--processes", "2", "--at-once", "3"]
    assert in_turn.main([str(ROOT), *options]) == 1, "a case has no figure, the others go on"
    (path,) = tmp_path.glob("turns-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert len(lines) == 12 and [line["case"] for line in lines if "problem" in line] == ["turns/a/3"]

    def together(first, second):
        return [
            (a, b)
            for a in Watched.spans
            for b in Watched.spans
            if (a[0], a[1], b[1]) == (b[0], first, second) and a[2] != b[2] and a[3] < b[4] and b[3] < a[4]
        ]

    assert not together("timed", "prepares") and not together("timed", "timed")
    assert together("prepares", "prepares"), "cases prepare side by side"


@pytest.mark.parametrize(
    ("count", "read", "left"), [(1, ["a/b"], ["a/c"]), (2, ["a/b", "a/c"], ["a/b", "a/c"]), (9, ["a/b", "a/c"] * 2, [])]
)
def test_what_is_slower_is_read_once_more_behind_all_the_others(count, read, left):
    """Where time did not suffice for these, what has a figure is not among what is left."""
    numbers = iter(range(count))

    class Lanes:
        def timed(self, left, processes):
            while left and next(numbers, None) is not None:
                case, shape = left.popleft()
                yield {"case": f"turns/{case}", "shape": list(shape), "verdict": "slower"}

    waiting = deque([("a/b", (8, 4)), ("a/c", (1,))])
    found = list(in_turn.readings(Lanes(), waiting, 1, 5))
    assert [line["case"].removeprefix("turns/") for line in found] == read
    assert [case for case, _ in waiting] == left


def test_a_lane_that_breaks_ends_the_others(monkeypatch, tmp_path):
    class Broken(Timed):
        def time(self):
            if self.gpu == "5" and "3" in Timed.lanes:
                raise RuntimeError("no such GPU")
            return super().time()

    monkeypatch.setattr(in_turn, "Tree", Broken)
    monkeypatch.setattr(Timed, "lanes", {})
    monkeypatch.setattr(in_turn.machine, "visible_gpus", lambda: ["3", "5"])
    with pytest.raises(RuntimeError, match="no such GPU"):
        in_turn.main([str(ROOT), "--only", "amax/*", "quantize/*", "--out", str(tmp_path), "--pairs", "3"])
    timed = len(Timed.lanes["3"])
    time.sleep(0.3)
    assert len(Timed.lanes["3"]) <= timed + 6, "the case that ran and no other"


def test_a_tree_sees_one_gpu():
    with in_turn.Tree(ROOT, "this tree", "reference", 0.01, "7") as tree:
        tree.begin("no/such", (1,))
        with pytest.raises(in_turn.Failed, match="no such case"):  # it has begun
            tree.wait()
        seen = Path(f"/proc/{tree.process.pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=7" in seen


def test_what_time_did_not_suffice_for_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(in_turn, "Tree", Stub)
    options = ["--only", "transpose/*", "--seconds", "0", "--out", str(tmp_path)]
    assert in_turn.main([str(ROOT), *options]) == 3
    assert "0 timed, 0 slower or without a figure, 1 left: transpose/" in capsys.readouterr().out


@pytest.mark.parametrize(("verdict", "seconds", "status"), [("slower", 0, 1), ("equal", 0, 3), ("equal", 9, 0)])
def test_what_is_slower_is_the_exit_status_whatever_is_left(verdict, seconds, status, monkeypatch, tmp_path):
    figures = {"us": 1.0, "other_us": 1.0, "ratio": 1.0, "spread": 0.0, "verdict": verdict}

    def readings(lanes, left, *_):
        left.popleft()
        yield {"case": "turns/a/b", "shape": [1], **figures}
        if seconds:
            left.clear()

    cases = [SimpleNamespace(name=name, small=(1,), shapes=()) for name in ("a/b", "a/c")]
    monkeypatch.setattr(in_turn, "readings", readings)
    monkeypatch.setattr(in_turn, "select", lambda *_: cases)
    assert in_turn.main([str(ROOT), "--out", str(tmp_path)]) == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["/nowhere"], "give a checkout of halfbyte"), ([str(ROOT), "--pairs", "2"], "give a number from 3 on")],
)
def test_what_makes_no_sense_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        in_turn.main(arguments)
    assert message in capsys.readouterr().err
