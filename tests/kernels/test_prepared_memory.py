"""Memory of records: what is allocated, when it goes back, and what outlives a call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import triton.language as tl
from record_checks import SIZE, Counted, add, check, no_records, values, with_temporaries

from halfbyte.kernels import prepared
from halfbyte.kernels.launch import jit

pytestmark = pytest.mark.usefixtures("no_records")
__all__ = ["no_records"]


@jit
def total_kernel(x_ptr, more_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(more_ptr + i))


def test_steps_that_nobody_needs_are_left_out():
    ran = []

    def function(static, tensors, numbers):
        x = tensors[0]
        torch.ones(SIZE), x.view(2, 4), x + 1, torch.empty(3)
        kept = torch.zeros(SIZE)
        kept.view(2, 4)[0].add_(5)  # through a view that nobody reads
        ran.append(1)
        return (add(kept, 1),), None

    check(function, ((values(),),), ((values(1),),))
    (record,) = prepared._RECORDS.values()
    assert len(record.steps) == 6, [getattr(step, "function", step) for step in record.steps]


def test_memory_goes_back_when_nobody_reads_it_any_more(monkeypatch):
    """Of a chain of launches two large tensors live at a time, as when the function itself runs."""
    monkeypatch.setattr(prepared, "ONE_ALLOCATION", 4 * SIZE - 1)  # so that all of them are large
    alive, most, allocate = [], [], torch.empty_strided

    def spy(*arguments, **named):
        tensor = allocate(*arguments, **named)
        alive.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in alive))
        return tensor

    def function(static, tensors, numbers):
        x = tensors[0]
        for i in range(6):
            x = add(x, i)
        return (x,), None

    monkeypatch.setattr(torch, "empty_strided", spy)
    check(function, ((values(),),), ((values(1),),), rounds=1)
    assert len(most) == 6 and max(most) == 2


def test_small_memory_is_allocated_at_once(monkeypatch):
    """Each tensor keeps its own bytes, aligned as the allocator does; what is returned or viewed stays apart."""
    sizes, allocate = [], torch.empty_strided

    def function(static, tensors, numbers):
        x = tensors[0]
        first, second = add(x, 1), add(x, 10)
        parts = torch.empty(3, SIZE)
        add(second, 100, parts[0])
        viewed = add(first, 1000)
        total = torch.empty(SIZE)
        total_kernel[(1,)](first, parts[0], total, SIZE=SIZE)
        return (add(total, 10_000), viewed.view(2, -1) + 1, second), None

    def spy(shape, *arguments, **named):
        sizes.append(shape)
        return allocate(shape, *arguments, **named)

    monkeypatch.setattr(torch, "empty_strided", spy)
    prepared.call(function, (), (values(),), ())
    sizes.clear()
    x = values(3)
    (total, viewed, second), _ = prepared.call(function, (), (x,), ())
    assert torch.equal(total, 2 * x + 10_111)
    assert torch.equal(viewed, (x + 1002).view(2, -1)) and torch.equal(second, x + 10)
    assert sorted(sizes) == sorted([(3 * prepared.SECTOR,), (SIZE,), (SIZE,), (SIZE,)])


@pytest.mark.parametrize("limit", (0, 600, 1200))
def test_large_memory_is_not_kept_for_a_whole_call(limit, monkeypatch):
    monkeypatch.setattr(prepared, "ONE_ALLOCATION", limit)

    def function(static, tensors, numbers):
        x = tensors[0]
        for i in range(6):
            x = add(x, i)
        return (x,), None

    check(function, *(((values(i),),) for i in range(3)))
    (record,) = prepared._RECORDS.values()
    small, *others = [step.bytes for step in record.steps if isinstance(step, prepared.Allocation)]
    kept = {0: 0, 600: 2, 1200: 3}[limit]  # of five intermediates of 32 bytes, 512 apart
    assert len(others) == (6 - kept if kept else 5)  # the others, and what is returned
    assert small == (kept * prepared.SECTOR if kept else 4 * SIZE)


def test_no_tensor_of_a_call_is_kept():
    gc.collect()
    gc.disable()
    try:
        for repetition in range(3):
            x = values(repetition)
            (out, temporary), _ = prepared.call(with_temporaries, (), (x,))
            refs = [weakref.ref(tensor) for tensor in (x, out, temporary)]
            del x, out, temporary
            assert all(ref() is None for ref in refs), f"kept by call {repetition}"
    finally:
        gc.enable()
    (record,) = prepared._RECORDS.values()
    assert not [value for value in record._repeat.__globals__.values() if isinstance(value, torch.Tensor)]


def test_constants_are_kept_and_made_once():
    made, known = [], {}

    def workspace():
        if "it" not in known:
            made.append(1)
            known["it"] = torch.zeros(SIZE)
        return prepared.keep(known["it"])

    def function(static, tensors, numbers):
        kept = workspace()
        add(kept, 1, kept)
        return (add(tensors[0], 0) + kept,), None

    counted = Counted(function)
    results = [prepared.call(counted, (), (torch.zeros(n),))[0][0] for n in (SIZE, SIZE, SIZE, 2 * SIZE - 8)]
    assert [int(r[0]) for r in results] == [1, 2, 3, 4] and counted.runs == len(made) == 1
    assert (known["it"] == 4).all()


def test_constant_that_is_cleared_in_every_call():
    kept = torch.zeros(SIZE)

    def function(static, tensors, numbers):
        prepared.keep(kept).zero_()
        add(kept, 1, kept)
        return (add(kept, 0),), None

    for _ in range(3):
        assert (prepared.call(function, (), (values(),))[0][0] == 1).all()
