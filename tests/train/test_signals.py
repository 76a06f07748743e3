"""Ctrl-C and SIGTERM: whatever a signal meets, the run goes on from there with the bits of one that nobody stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_kill

from halfbyte.train import checkpoint, commands, log, loop, signals

STEPS, STOP_AT = 7, 3
CHANGES = {"steps": STEPS, "checkpoint_every": 1000, "log_every": 5, "eval_every": 2, "accumulate": 2}


@pytest.fixture(autouse=True)
def ctrl_c():
    """Not ignored, as a shell has it for what runs in the background, and for the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at(place, trainer, call):
    """Have `call` called once, when the run is at a place of its step STOP_AT + 1."""
    pending = [call]

    def now():
        if trainer.step >= (STEPS - 1 if place == "last step" else STOP_AT) and pending:
            pending.pop()()

    if place == "validation":
        evaluate = trainer.evaluate
        trainer.evaluate = lambda: (now(), evaluate())[1]
    elif place == "backward":
        trainer.model.lm_head.weight.register_hook(lambda gradient: now())
    else:
        trainer.optimizer.register_step_pre_hook(lambda *_: now())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function from a run to the folder of the same without a signal; equal runs share it."""
    done = {}

    def get(config, recipe, data):
        key = (recipe, config.recipe_schedule)
        if key not in done:
            out = tmp_path_factory.mktemp("undisturbed")
            loop.train(replace(config, run=replace(config.run, out=out)), recipe, data)
            done[key] = out
        return done[key]

    return get


def assert_same_run(out, expected):
    for kind in ("step", "eval"):
        assert log.curve(out, kind) == log.curve(expected, kind)
    results = [json.loads((folder / loop.RESULT).read_text()) for folder in (out, expected)]
    assert results[0]["held_out_loss"] == results[1]["held_out_loss"]
    for part in ("model", "optimizer", "run_state"):
        assert test_kill._bits(test_kill._last(out)[part]) == test_kill._bits(test_kill._last(expected)[part])


@pytest.mark.parametrize(
    ("place", "schedule"), [("backward", ""), ("validation", ""), ("optimizer step", "4:nvfp4_mxfp8_bwd")]
)
def test_a_signal_waits_for_the_end_of_the_step(run, undisturbed, place, schedule):
    config, data = run(**CHANGES, recipe_schedule=schedule)
    expected = undisturbed(config, "nvfp4", data)
    interrupts = signals.Interrupts()
    trainer = loop.Trainer(config, "nvfp4", data, interrupts=interrupts)
    at(place, trainer, lambda: interrupts.receive(signal.SIGTERM, None))
    with pytest.raises(signals.Stopped) as stop:
        trainer.train()
    assert stop.value.status == 143 and f"step {STOP_AT + 2} of {STEPS}" in stop.value.where
    (path,) = (config.run.out / loop.CHECKPOINTS).glob("*.pt")
    assert checkpoint.load_checkpoint(path, trainer.identity)["step"] == STOP_AT + 1
    assert not (config.run.out / loop.RESULT).exists()
    loop.train(config, "nvfp4", data)
    assert_same_run(config.run.out, expected)


def test_a_signal_in_the_last_step_lets_the_run_finish(run, undisturbed):
    config, data = run(**CHANGES)
    interrupts = signals.Interrupts()
    trainer = loop.Trainer(config, "nvfp4", data, interrupts=interrupts)
    at("last step", trainer, lambda: interrupts.receive(signal.SIGINT, None))
    with pytest.raises(signals.Stopped, match="stopped by SIGINT") as stop:
        trainer.train()
    assert stop.value.status == 130 and stop.value.where == "after nvfp4, which is finished"
    assert_same_run(config.run.out, undisturbed(config, "nvfp4", data))


def test_a_run_that_diverged_before_the_signal_is_reported_as_diverged(run):
    config, data = run(**CHANGES | {"lr": 1e30, "eval_every": 100})
    interrupts = signals.Interrupts()
    trainer = loop.Trainer(config, "bf16", data, interrupts=interrupts)
    at("optimizer step", trainer, lambda: interrupts.receive(signal.SIGINT, None))
    with pytest.raises(signals.Stopped):
        trainer.train()
    assert json.loads((config.run.out / loop.RESULT).read_text())["diverged_at"] == 2
    assert not list((config.run.out / loop.CHECKPOINTS).glob("*.pt"))


def start(folder, *command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(test_kill.ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], env=environment, cwd=folder, **streams)


def cli(name, config, *options):
    command = [
        str(test_kill.HELD),
        str(STEPS - 2),
        name,
        "--preset",
        "tiny",
        "--steps",
        str(STEPS),
        "--corpus",
        config.data.corpus,
    ]
    command += ["--out", str(config.run.out), "--cache", str(config.run.cache), "--checkpoint-every", "1000"]
    return [*command, "--log-every", "1", "--eval-every", "2", "--accumulate", "2", *options]


def test_train_stopped_by_sigterm(run, folder, undisturbed):
    config, data = run(**CHANGES | {"log_every": 1})
    process = start(folder, *cli("train", config, "--recipe", "nvfp4"))
    test_kill._wait_for_step(config.run.out, STOP_AT, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    stopped = test_kill._last(config.run.out)["step"]
    assert process.returncode == 143 and STOP_AT <= stopped < STEPS
    assert error == (
        f"halfbyte train: stopped by SIGTERM; the same command goes on with step {stopped + 1} of {STEPS} "
        f"in {config.run.out}\n"
    )
    assert max(line["step"] for line in log.read_log(config.run.out)) == stopped
    loop.train(config, "nvfp4", data)
    assert_same_run(config.run.out, undisturbed(config, "nvfp4", data))


def test_compare_stopped_by_ctrl_c(run, folder, undisturbed):
    pytest.importorskip("matplotlib")
    config, data = run(**CHANGES | {"log_every": 1})
    out = config.run.out
    process = start(folder, *cli("compare", config, "--recipes", "bf16,nvfp4", "--overwrite"))
    test_kill._wait_for_step(out / "nvfp4", STOP_AT, process)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.count("\n") == 1 and "Traceback" not in printed
    assert error.startswith("halfbyte compare: stopped by SIGINT; the same command without --overwrite goes on with ")
    assert [row["recipe"] for row in json.loads((out / "results.json").read_text())["results"]] == ["bf16"]
    nvfp4 = replace(config, run=replace(config.run, out=out / "nvfp4"))
    loop.train(nvfp4, "nvfp4", data)
    assert_same_run(out / "nvfp4", undisturbed(config, "nvfp4", data))


def test_tokenizing_stops_at_once_and_leaves_no_half_a_cache(run, folder):
    config, _ = run(steps=STEPS)
    text = folder / "many.jsonl"
    text.write_text("".join(f'{{"text": "record number {number}"}}\n' for number in range(400_000)))
    config = replace(config, data=replace(config.data, corpus=str(text)), run=replace(config.run, cache=folder / "new"))
    process = start(folder, *cli("train", config))
    deadline = time.monotonic() + 120
    while not list((folder / "new").glob(".*.tmp")) and time.monotonic() < deadline:
        assert process.poll() is None, "tokenizing ended before it could be stopped"
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert error == "halfbyte train: stopped by SIGTERM; the same command goes on where it stopped\n"
    assert not list((folder / "new").iterdir()) and not (config.run.out / loop.CHECKPOINTS).exists()


WAITING = """
import time
from halfbyte.train import signals
with signals.watch(print) as interrupts, interrupts.deferred():
    print("ready", flush=True)
    while not interrupts.requested:
        time.sleep(0.01)
    print("heard", flush=True)
    time.sleep(120)
"""
DEAF = """
import hashlib, threading
from halfbyte.train import signals
signals.PATIENCE = 0.5
with signals.watch(lambda stopped: print(stopped, flush=True)):
    threading.Timer(1.0, lambda: print("ready", flush=True)).start()  # once the line below runs
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)  # other threads run, but no instruction of this one
"""


def test_foreign_code_that_does_not_answer_is_ended(tmp_path):
    """As the training of a tokenizer, which reads nothing that could be half written."""
    process = start(tmp_path, "-c", DEAF)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (143, "stopped by SIGTERM\n")


def test_a_second_signal_ends_the_process(tmp_path):
    process = start(tmp_path, "-c", WAITING)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "heard\n"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:  # one that comes too soon counts as the first again
        time.sleep(2 * signals.ONE_SIGNAL)
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    process.communicate()


@pytest.mark.parametrize(("seconds", "status"), [(signals.ONE_SIGNAL - 0.01, []), (signals.ONE_SIGNAL + 0.01, [143])])
def test_one_that_comes_again_at_once_is_the_first_still(monkeypatch, seconds, status):
    """As of a scheduler that signals the process and its group."""
    times, ended = iter([5.0, 5.0 + seconds]), []

    def end(number):
        ended.append(number)
        raise SystemExit

    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(signals.os, "_exit", end)
    interrupts = signals.Interrupts()
    interrupts.defer()
    reading, writing = os.pipe()
    os.write(writing, bytes([signal.SIGTERM, signal.SIGTERM]))
    os.close(writing)
    with contextlib.suppress(SystemExit):
        interrupts.listen(reading, print)
    os.close(reading)
    assert ended == status


def test_handlers_are_put_back_and_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    usual = signal.getsignal(signal.SIGINT)
    try:
        with signals.watch(print):
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            with pytest.raises(signals.Stopped):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is usual
    finally:
        signal.signal(signal.SIGTERM, before)
    found = []

    def elsewhere():  # where no handler can be installed
        with signals.watch(print) as interrupts:
            found.append(interrupts.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


def test_who_was_woken_by_signals_before_is_woken_again():
    """As asyncio's loop is, by a file of its own."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    outer = signal.set_wakeup_fd(writing)
    try:
        with signals.watch(print):
            pass
    finally:
        left = signal.set_wakeup_fd(outer)
        os.close(reading)
        os.close(writing)
    assert left == writing


@contextlib.contextmanager
def handlers_put_back():
    before = {number: signal.getsignal(number) for number in signals.CAUGHT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_that_follows_a_failure_does_not_take_its_place(capfd):
    """As of torchrun, which ends the ranks that are left when one dies: here, as locks and logs are given back."""
    ranks = SimpleNamespace(size=2, is_first=True, speaks_of=lambda error: True, say=print)
    ranks.place = SimpleNamespace(rank=0)

    def run(interrupts):
        try:
            with interrupts.deferred():
                raise RuntimeError("[transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
        finally:
            signal.raise_signal(signal.SIGTERM)

    with handlers_put_back():
        assert commands.until_stopped("train", False, run, ranks) == commands.FAILED
    output, error = capfd.readouterr()
    assert output.startswith("halfbyte train: rank 0 lost another (Connection closed by peer") and not error


def test_a_rank_that_failed_says_why_though_a_launcher_ends_it():
    """Its error is printed when its groups are gone; ranks that had nothing to say are gone before, and noticed."""
    ranks = SimpleNamespace(size=2, is_first=True, speaks_of=lambda error: True)
    usual = signal.getsignal(signal.SIGTERM)

    def run(interrupts):
        raise ValueError("rank 0 had enough")

    with handlers_put_back():
        with pytest.raises(ValueError, match="had enough"):
            commands.until_stopped("train", False, run, ranks)
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "ctrl-C still ends it"
    with pytest.raises(ValueError, match="had enough"):
        commands.until_stopped("train", False, run)
    assert signal.getsignal(signal.SIGTERM) == usual, "of one process alone"


def test_work_that_is_deferred_after_a_signal_does_not_begin():
    interrupts = signals.Interrupts()
    with pytest.raises(signals.Stopped):
        interrupts.receive(signal.SIGINT, None)
    with pytest.raises(signals.Stopped), interrupts.deferred():
        raise AssertionError("begun")
