"""Records: a repeated call returns what the function would, whatever is given, and keeps nothing of a call alive."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton.language as tl
from record_checks import (
    SIZE,
    Counted,
    add,
    add_kernel,
    check,
    no_records,
    reason,
    repeated,
    values,
    with_temporaries,
)

from halfbyte.kernels import launch, prepared
from halfbyte.kernels.launch import jit

pytestmark = pytest.mark.usefixtures("no_records")
__all__ = ["no_records"]


def test_numbers_and_memory_of_the_call():
    def function(static, tensors, numbers):
        once = add(tensors[0], numbers[0] + 3)
        return (add(once, 4 + numbers[1]), None, once), "value"

    check(function, *(((values(i),), (10 * i, 7 - i)) for i in range(3)))
    assert reason() is None
    assert prepared.call(function, (), (values(),), (0, 0))[1] == "value"
    assert prepared.call(function, (), (values(),), (0, 0))[1] == "value"


class Sum(NamedTuple):
    x_ptr: torch.Tensor
    number: int
    more_ptr: torch.Tensor | None
    fixed: int = 2


@jit(do_not_specialize=["whole.number"])
def sum_kernel(whole, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    total = tl.load(whole.x_ptr + i) + whole.number * whole.fixed
    if whole.more_ptr is not None:
        total += tl.load(whole.more_ptr + i)
    tl.store(out_ptr + i, total)


def test_parts_of_arguments_are_those_of_the_call():
    def function(static, tensors, numbers):
        x, more = tensors
        outs = torch.empty(2, SIZE)
        sum_kernel[(1,)](Sum(x[SIZE:], numbers[0] + 3, more), outs[1], SIZE=SIZE)
        sum_kernel[(1,)](Sum(x, 5, None), outs[0], SIZE=SIZE)
        return (outs,), None

    check(function, *(((values(i, 2 * SIZE), values(-i)), (10 * i,)) for i in range(3)))
    assert reason() is None


def test_part_that_a_kernel_is_compiled_for():
    def function(static, tensors, numbers):
        out = torch.empty(SIZE)
        sum_kernel[(1,)](Sum(tensors[0], 1, None, numbers[0]), out, SIZE=SIZE)
        return (out,), None

    check(function, ((values(),), (3,)), ((values(),), (4,)), runs=2)
    assert "whole.fixed" in reason()


@jit(do_not_specialize=["whole"])
def any_sum_kernel(whole, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(whole.x_ptr + i) + whole.number * whole.fixed)


def test_part_of_an_argument_that_may_have_any_value():
    def function(static, tensors, numbers):
        out = torch.empty(SIZE)
        any_sum_kernel[(1,)](Sum(tensors[0], numbers[0], None, numbers[1]), out, SIZE=SIZE)
        return (out,), None

    check(function, *(((values(i),), (3 * i, 5 - i)) for i in range(3)))
    assert reason() is None


def test_views_are_found_by_their_offset():
    def function(static, tensors, numbers):
        own = torch.empty(3, SIZE)
        given = tensors[0].view(4, SIZE)
        add(given[2], 1, own[1])
        add(given[1:].flatten()[SIZE : 2 * SIZE], 2, own.view(-1)[2 * SIZE :])
        add(own[2].view(2, 4).reshape(-1), 5, own[0])
        return (own, own[1:]), None

    check(function, *(((values(i, 4 * SIZE),),) for i in range(3)))
    assert reason() is None


def test_view_of_a_view_that_was_given():
    whole = values(size=40)
    check(lambda static, tensors, numbers: ((add(tensors[0][4:], 1),), None), ((whole[4:16],),), ((whole[20:32],),))


def test_torch_ops_between_launches():
    def function(static, tensors, numbers):
        x, flags = tensors
        a, b = x.view(2, SIZE).unbind()
        total = add(a, 1) + b * 2
        total.mul_(3).add_(torch.ones(SIZE))
        parts = torch.split(torch.cat([total, a]), [4, 12])
        top, where = parts[1][:SIZE].max(0)
        places = total[where.view(1)]
        return (torch.where(flags, total, 0.0), parts[0], top, where, places, x.t().to(torch.bfloat16)), None

    flags = torch.arange(SIZE) % 2 == 0
    check(function, *(((values(i, 2 * SIZE), flags.roll(i)),) for i in range(3)))
    assert reason() is None


def test_what_is_changed_in_place():
    def function(static, tensors, numbers):
        out, x = tensors
        out.view(2, SIZE)[1].mul_(2)
        add(x, 1, out[:SIZE])
        return (), None

    check(function, *(((values(i, 2 * SIZE), values(-i)),) for i in range(3)))


DESCRIPTIONS = {
    "alignment": lambda t: t[0].data_ptr() % 16,
    "dtype": lambda t: t[0].element_size() + t[0].is_floating_point(),
    "shape": lambda t: t[0].shape[0],
    "strides": lambda t: t[0].stride(0),
    "aliasing": lambda t: (t[0] is t[1]) + 2 * (t[0] is t[2]) + 4 * (t[1] is t[2]),
    "None": lambda t: t[2] is None,
}


@pytest.mark.parametrize("what", DESCRIPTIONS)
def test_requests_differ_in(what):
    """A function that looks at one property, and calls that differ in it alone."""
    whole, other = torch.zeros(64), torch.zeros(8, 8)
    x, y, z = (torch.zeros(8) for _ in range(3))
    calls = {
        "alignment": [(whole[i : i + 8], y, z) for i in (0, 1, 2, 3)],
        "dtype": [(torch.zeros(8, dtype=dtype), y, z) for dtype in (torch.float32, torch.int32, torch.bfloat16)],
        "shape": [(torch.zeros(n), y, z) for n in (8, 0, 1)],
        "strides": [(t, y, z) for t in (other, other.t().contiguous().t(), other[:, :1].expand(8, 8))],
        "aliasing": [(x, y, z), (x, x, z), (x, y, x), (y, x, x), (x, x, x)],
        "None": [(x, y, z), (x, y, None)],
    }[what]
    describe = DESCRIPTIONS[what]
    counted = Counted(lambda static, tensors, numbers: ((torch.full((1,), float(describe(tensors))),), None))
    for tensors in calls * 4:
        assert repeated(counted, (), tensors)[0][0] == float(describe(tensors))
    assert counted.runs == len(calls)


def test_requests_differ_in_the_device_of_any_tensor():
    """A record of kernels would hand over the address of a host's tensor, which only Triton itself refuses."""
    x = values()

    def function(static, tensors, numbers):
        return (torch.full((1,), float(tensors[1].device.type == "meta")),), None

    for y in (values(), values().to("meta"), values()) * 3:
        assert repeated(function, (), (x, y))[0][0] == float(y.device.type == "meta")


def test_requests_differ_in_the_default_stream_and_others():
    """Of the default stream kernels keep a workspace, which those of others must not use beside it."""
    counted = Counted(lambda static, tensors, numbers: ((add(tensors[0], 1),), None))
    for stream in (0, 7, 0, 7, 8):
        prepared._call(counted, ((), (values(),), ()), (torch.device("cpu"), stream), nullcontext)
    assert counted.runs == 2 and len(prepared._RECORDS) == 2


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_run_on_the_gpu_of_the_tensors(monkeypatch, current):
    """Whatever GPU is the current one: launches and allocations are those of it."""
    entered, called, gpu = [], [], torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    monkeypatch.setattr(prepared, "_stream", lambda device: 5)
    monkeypatch.setattr(prepared, "_call", lambda *arguments: called.append((arguments[2], len(entered))))
    prepared.call(add, (), (None, SimpleNamespace(device=gpu)))
    assert entered == [gpu] * (current != 1) and called == [((gpu, 5), len(entered))]


def test_a_detached_view_is_no_tensor_of_the_call():
    def function(static, tensors, numbers):
        return (tensors[0].detach(), add(tensors[0].detach(), 1)), None

    for start in range(3):
        x = values(start).requires_grad_()
        with torch.no_grad():
            (same, _), _ = prepared.call(function, (), (x,))
        assert same is not x and not same.requires_grad and same.data_ptr() == x.data_ptr()
    assert reason() is None


def test_requests_differ_in_static_values_and_functions():
    functions = [
        Counted(lambda static, *_, more=i: ((torch.full((1,), float(static[0] + more)),), None)) for i in (0, 5)
    ]
    for _ in range(2):
        for i, function in enumerate(functions):
            for static in (1, 2):
                assert prepared.call(function, (static,), (values(),))[0][0] == static + 5 * i
    assert [function.runs for function in functions] == [2, 2]


def test_numbers_beyond_32_bits():
    """Kernels take sums near the limit in 32 or in 64 bits: no record of the one serves the other."""
    kinds, limit = [], 1 << 31

    def function(static, tensors, numbers):
        kinds.append((numbers[0] + 8).value >= limit)
        return (add(tensors[0], numbers[0] + 8),), None

    x = torch.zeros(SIZE, dtype=torch.int64)
    streams = (5, limit - 9, limit - 8, limit - 5000, limit - 9, limit - 1, limit, limit + 1, 1 << 40)
    for stream in streams:
        before = len(kinds)
        (out,), _ = prepared.call(function, (), (x,), (stream,))
        assert (out == stream + 8).all() and (repeated(function, (), (x,), (stream,))[0][0] == stream + 8).all()
        if stream < limit - 8:
            assert not any(kinds[before:]), "recorded as 64 bits"
    assert kinds == [False, False, True, True, True], "near the limit every number has a record of its own"


def test_empty_tensors_lie_nowhere():
    """An empty view has no address from which the place of its memory followed."""

    def function(static, tensors, numbers):
        x, nothing = tensors
        out = torch.empty(2, SIZE)
        add_kernel[(0,)](x[:0], out[:0], 1, SIZE=SIZE)
        add_kernel[(0,)](nothing, x.new_empty(0), 1, SIZE=SIZE)
        add(x, 1, out[0]), add(x, 2, out[1])
        return (out, nothing.clone(), x.new_empty(0, 3).view(3, 0), torch.empty(0)), None

    check(function, *(((values(i), values(size=0)),) for i in range(3)))
    assert reason() is None
    for record in prepared._RECORDS.values():
        offsets = [
            p.offset for step in record.steps if isinstance(step, launch.Launch) for p in step._pointers.values()
        ]
        assert min(offsets) == 0


def test_empty_outputs_are_of_their_own():
    def function(static, tensors, numbers):
        made = torch.empty(0, 4)
        return (made.view(4, 0), torch.empty(0)), None

    _, second, third = (prepared.call(function, (), (values(),))[0] for _ in range(3))
    second[0].add_(1), second[1].resize_(8), second[0].untyped_storage().resize_(64)
    assert third[0]._version == 0 and third[0].untyped_storage().nbytes() == 0 and third[1].numel() == 0


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode(first):
    """Whether the record was made there or not, a call's tensors are those of the mode that it runs in."""

    @Counted
    def function(static, tensors, numbers):
        x = tensors[0].contiguous().reshape(-1).to(torch.float32)
        empty = torch.empty(0).zero_()
        return (add(x, 1), x.view(2, 4).contiguous().flatten(0), torch.cat([empty, x])), None

    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            check(function, ((values(3),),), ((values(4),),), runs=1 if not prepared._RECORDS else 0)
            assert prepared.call(function, (), (values(3),))[0][0].is_inference() == inference


COPIES = {
    "contiguous": lambda x: x.T.contiguous(),
    "reshape": lambda x: x.T.reshape(-1),
    "flatten": lambda x: x.T.flatten(),
    "ravel": lambda x: x.T.ravel(),
    "to": lambda x: x.to(torch.bfloat16),
    "double": lambda x: x.double(),
    "clone": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("where", [nullcontext, torch.inference_mode, torch._C._AutoDispatchBelowAutograd])
def test_what_may_be_a_view_reads_what_was_launched(where, name):
    """Ops that are made of others come whole in inference mode, and say of their copies that they are views."""

    def function(static, tensors, numbers):
        out = torch.full((2, SIZE // 2), -7.0)
        add_kernel[(1,)](tensors[0], out, 1, SIZE=SIZE)
        return (COPIES[name](out),), None

    with where():
        want = COPIES[name]((values() + 1).view(2, -1))
        for made in (prepared.call(function, (), (values(),))[0][0] for _ in range(3)):  # worked out, then repeated
            assert torch.equal(made, want)
    assert reason() is None


def test_launches_come_in_the_order_in_which_they_are_asked_for():
    """Also where somebody else watches or rehearses meanwhile."""

    class Order:
        def launched(self, told):
            seen.append(outs[0].tolist())

    def function(static, tensors, numbers):
        out, other = torch.zeros(SIZE), torch.zeros(SIZE)
        outs[:] = [out]
        add_kernel[(1,)](tensors[0], out, 1, SIZE=SIZE)
        with launch.watching(Order()):
            add_kernel[(1,)](tensors[0], other, 1, SIZE=SIZE)
        add_kernel[(1,)](tensors[0], out, 2, SIZE=SIZE)
        with launch.rehearsing():
            more = out + 1
        return (out, more), None

    seen, outs = [], []
    out, more = prepared.call(function, (), (values(),))[0]
    assert seen == [(values() + 1).tolist()]
    assert torch.equal(out, values() + 2) and torch.equal(more, values() + 3)


def test_a_failed_launch_that_is_caught_leaves_no_record():
    class Refusing:
        def run(self, *args, warmup, **options):
            if not warmup:
                raise ValueError("mine")

    def function(static, tensors, numbers):
        out = torch.zeros(SIZE)
        launch._WATCHERS.deferring.put_off(launch.PutOff(Refusing(), (), (1,), {}))
        try:
            return (out + 1,), None
        except ValueError:
            return (out + 2,), None

    with pytest.warns(UserWarning, match="a launch of it failed"):
        (made,), _ = prepared.call(function, (), (values(),))
    assert torch.equal(made, torch.full((SIZE,), 2.0)) and "failed" in reason()


@pytest.mark.parametrize("before, after", [(False, True), (True, False)])
def test_autocast(before, after):
    """A function switches it off for a product; whoever repeats it is no less exact."""
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))

    def function(static, tensors, numbers):
        with torch.autocast("cpu", enabled=False):
            exact = tensors[0] @ tensors[0]
        return (exact, tensors[0] @ tensors[0]), None

    for enabled in (before, after, after, before):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            wanted, _ = function((), (x,), ())
            given, _ = prepared.call(function, (), (x,))
            assert torch.is_autocast_enabled("cpu") == enabled, "left as it was found"
        assert all(map(torch.equal, given, wanted)) and given[1].dtype == (torch.bfloat16 if enabled else torch.float32)


def test_table_stays_bounded(monkeypatch):
    monkeypatch.setattr(prepared, "MAX_RECORDS", 3)
    counted = Counted(with_temporaries)
    for _ in range(2):
        for n in range(SIZE, SIZE + 5):
            prepared.call(counted, (n,), (values(),))
            assert len(prepared._RECORDS) <= 3
    assert counted.runs == 10
    prepared.call(counted, (SIZE + 4,), (values(),))
    assert counted.runs == 10, "the latest are kept"


def test_exception_leaves_nothing_behind():
    def function(static, tensors, numbers):
        add(tensors[0], 1)
        if broken:
            raise ValueError("broken")
        return (add(tensors[0], 2),), None

    broken = True
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            prepared.call(function, (), (values(),))
        assert not prepared._RECORDS and launch.watcher() is None and not torch._C._len_torch_dispatch_stack()
    broken = False
    check(function, ((values(),),), ((values(1),),))


def test_who_watches_launches_sees_those_of_repeated_calls():
    seen = []

    class Watcher:
        def launched(self, launched):
            seen.append((launched.kernel.__name__, launched.arguments["number"]))

    counted = Counted(with_temporaries)
    prepared.call(counted, (), (values(),))
    with launch.watching(Watcher()):
        prepared.call(counted, (), (values(),))
    assert seen == [("add_kernel", 1), ("add_kernel", 1)]


def test_recorded_within_what_is_recorded():
    def inner(static, tensors, numbers):
        return (add(tensors[0], numbers[0]),), None

    def outer(static, tensors, numbers):
        return prepared.call(inner, (), tensors, numbers)[0], None

    prepared.call(inner, (), (values(),), (1,))
    check(outer, ((values(),), (2,)), ((values(1),), (3,)))
    assert len(prepared._RECORDS) == 2


def test_threads_record_apart(monkeypatch):
    """Two threads record and repeat at once; Triton's interpreter itself runs one kernel at a time."""
    lock, run = threading.Lock(), launch.InterpretedFunction.run
    barrier, wrong = threading.Barrier(2), []

    def one_at_a_time(self, *arguments, **options):
        with lock:
            return run(self, *arguments, **options)

    def function(static, tensors, numbers):
        once = add(tensors[0], numbers[0])
        barrier.wait(10) if static[0] == "meet" else None
        return (add(once, numbers[0] + 1) * 2,), None

    def work(sign):
        for i in range(12):
            x, number = values(sign * i), sign * 100 + i
            static = ("meet" if i == 0 else "later", i % 3, sign if i < 6 else 0)
            (out,), _ = prepared.call(function, static, (x,), (number,))
            if not torch.equal(out, (x + 2 * number + 1) * 2):
                wrong.append((sign, i))

    monkeypatch.setattr(launch.InterpretedFunction, "run", one_at_a_time)
    threads = [threading.Thread(target=work, args=(sign,)) for sign in (1, 2)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert not any(isinstance(record, str) for record in prepared._RECORDS.values())
