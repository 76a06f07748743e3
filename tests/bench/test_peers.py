"""Peers of the benchmark: the fastest way that is right is timed; all else leaves a reason and no figure."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from bench import measure, peer_libraries, peers, plain
from bench.cases import quantize
from bench.peers import Task, Way
from bench.registry import Setting, all_cases, select
from halfbyte import reference
from halfbyte.layout import Operand
from halfbyte.spec import MXFP8, NVFP4
from halfbyte.verify.timing import Ceilings

SETTING = Setting(
    device=torch.device("cpu"), backend="reference", ceilings=Ceilings(1e9, 1e9), plain=False, budget=0.0, limit=5.0
)
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def task(kind: str = "1x16", error: float = 0.1) -> Task:
    return Task(kind=kind, xs=[X], targets=[X], errors=[error])


def way(name: str, error: float = 0.1, seconds: float = 0.0, shape: tuple[int, ...] = (32, 64)) -> Way:
    def run(x):
        time.sleep(seconds)
        return x * (1 + error)

    return Way(name=name, run=run, values=lambda y: [y.reshape(shape)])


def library(*ways: Way):
    return lambda kind, x: iter(ways)


def test_the_fastest_way_that_is_right_is_timed():
    found = peers.time_all(task(), SETTING, {"lib": library(way("slow", seconds=0.2), way("fast"), way("off", 0.5))})
    assert list(found.seconds) == ["lib (fast)"] and found.seconds["lib (fast)"] < 0.1
    assert found.left_out == {"lib (off)": "is another operation: relative error 0.5000, ours 0.1000"}


@pytest.mark.parametrize(
    "bad, why",
    [
        (way("", error=0.0), "another operation: relative error 0.0000, ours 0.1000"),  # quantizes nothing
        (way("", error=1.0), "another operation"),
        (way("", shape=(64, 32)), r"decodes to \(64, 32\), not \(32, 64\)"),
        (Way(name="", run=lambda x: x, values=lambda y: [y, y]), "gives 2 orientations, not 1"),
        (Way(name="", run=lambda x: x.no_such_thing, values=lambda y: [y]), "AttributeError"),
        (way("", seconds=60.0), "took longer than 1 s"),
    ],
)
def test_a_way_that_is_wrong_or_does_not_run_has_a_reason_and_no_time(bad, why):
    setting = replace(SETTING, limit=1.0)  # which the other way needs no hundredth of, but on a busy machine
    found = peers.time_all(task(), setting, {"lib": library(bad), "other": library(way("x"))})
    assert list(found.seconds) == ["other (x)"]
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.left_out["lib"])


def test_a_library_that_is_not_installed_says_so():
    def missing(kind, x):
        raise ModuleNotFoundError("No module named 'lib'")

    assert peers.time_all(task(), SETTING, {"lib": missing}).left_out == {"lib": "not installed: No module named 'lib'"}


def test_a_compiler_that_does_not_end_costs_the_plain_figure_alone(monkeypatch):
    monkeypatch.setattr(plain, "compiled", lambda function, xs: time.sleep(60))
    setting = replace(SETTING, plain=True, limit=0.2)
    outcome = select(all_cases(), ["amax/tensor"])[0].run(setting, (64, 64))
    assert outcome.seconds > 0 and not outcome.rivals
    assert outcome.left_out == {measure.PLAIN: "took longer than 0.2 s to compile and run"}


def test_a_time_limit_that_a_compiler_wrapped_comes_again(monkeypatch):
    """Torch turns what is raised in a backend into its own error; the next way would have no limit."""
    alarms = []
    right = measure.signal.setitimer
    monkeypatch.setattr(
        measure.signal, "setitimer", lambda which, *t: alarms.append(t) or right(which, *(v / 5 for v in t))
    )

    def swallow(x):
        try:
            time.sleep(60)
        except TimeoutError as error:
            raise RuntimeError("backend failed") from error

    ways = Way(name="a", run=swallow, values=lambda y: [y]), way("b", seconds=60.0)
    found = peers.time_all(task(), replace(SETTING, limit=1.0), {"lib": library(*ways)})
    assert not found.seconds and found.left_out["lib (a)"] == "RuntimeError: backend failed"
    assert "took longer" in found.left_out["lib (b)"] and alarms[0] == (1.0, 5.0)


def test_a_time_limit_leaves_no_alarm_behind():
    before = measure.signal.getsignal(measure.signal.SIGALRM)
    with measure.limit(60.0):
        assert 0 < measure.signal.getitimer(measure.signal.ITIMER_REAL)[0] <= 60
    assert measure.signal.getitimer(measure.signal.ITIMER_REAL) == (0.0, 0.0)
    assert measure.signal.getsignal(measure.signal.SIGALRM) is before


def test_peers_are_compared_with_our_whole_operation_and_our_error(monkeypatch):
    """Ours gets no amax in what is timed beside them; their error is judged by ours, from the values themselves."""
    given = []
    right = quantize.Quantization.run

    def run(self, x, known, backend):
        given.append(known.row_amax is None)
        return right(self, x, known, backend)

    monkeypatch.setattr(quantize.Quantization, "run", run)
    seen: list[Task] = []

    def record(task, setting, libraries):
        seen.append(task)
        return peers.Found(seconds={"lib": 1.0}, left_out={"none": "why"})

    monkeypatch.setattr(peers, "time_all", record)
    (case,) = select(all_cases(), ["row_col/sr+sr-rht"])
    outcome = case.run(replace(SETTING, peers=True, plain=True), case.small)
    assert given[-1] and not given[0]
    assert outcome.rivals["lib"] == pytest.approx(1e6 / outcome.facts["us_with_amax"])
    assert outcome.rivals.keys() == {measure.PLAIN, "lib"} and outcome.left_out == {"none": "why"}
    (task,) = seen
    x = task.xs[0]
    assert task.kind == "row_col-sr" and torch.equal(task.targets[0], x)
    # The rotation written out: rows of x.T in groups of 16, signs of docs/numerics.md, Sylvester's matrix over 4.
    h = torch.ones(1, 1)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
    rotated = ((x.T.float().unflatten(1, (-1, 16)) * signs) @ h / 4).flatten(1)
    torch.testing.assert_close(task.targets[1].float(), rotated, rtol=2**-7, atol=1e-3)
    assert all(0.08 < error < 0.2 for error in task.errors)  # of four bits, rounded stochastically


def test_values_of_codes_are_decoded_as_the_formats_say():
    x = X[:, :32].bfloat16()
    blocks = reference.quantize(x, NVFP4())
    values = peer_libraries._decode(blocks.qdata, blocks.block_scale.view(torch.float8_e4m3fn), blocks.amax / (448 * 6))
    assert peers.relative_error(values, reference.dequantize(Operand(blocks, NVFP4(), 32))) < 1e-6
    blocks = reference.quantize(x, MXFP8())
    values = peer_libraries._decode_mx(blocks.qdata.view(torch.float8_e4m3fn), blocks.block_scale)
    assert torch.equal(values, reference.dequantize(Operand(blocks, MXFP8(), 32)))


@pytest.mark.parametrize("name", ["Quartet II", "TransformerEngine", "ModelOpt, values alone"])
def test_what_needs_another_gpu_says_so(name):
    found = peers.time_all(task(), SETTING, {name: peer_libraries.LIBRARIES[name]})
    assert not found.seconds and ("sm_100" in found.left_out[name] or "needs a GPU" in found.left_out[name])
