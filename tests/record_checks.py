"""What the tests of records share: a kernel, functions that launch it, and what a repeated call must return."""

from __future__ import annotations

import functools

import pytest
import torch
import triton.language as tl

from halfbyte.kernels import prepared
from halfbyte.kernels.launch import jit

SIZE = 8


@jit(do_not_specialize=["number"])
def add_kernel(x_ptr, out_ptr, number, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + number)


def add(x, number, out=None):
    out = torch.empty_like(x) if out is None else out
    add_kernel[(1,)](x, out, number, SIZE=SIZE)
    return out


class Counted:
    """A function that counts how often it ran."""

    def __init__(self, function):
        self.function, self.runs = function, 0
        functools.update_wrapper(self, function)

    def __call__(self, *arguments):
        self.runs += 1
        return self.function(*arguments)


@pytest.fixture
def no_records(monkeypatch):
    monkeypatch.setattr(prepared, "_RECORDS", prepared.Records())


def reason() -> str | None:
    """Return why the only request is not repeated."""
    (record,) = prepared._RECORDS.values()
    return record if isinstance(record, str) else None


def values(start: float = 0.0, size: int = SIZE) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + start


def repeated(function, static, tensors, numbers=()):
    """Return what a layer's call would: `again` of a request that it knows, else `call`."""
    return prepared.again(function, static, tensors, numbers) or prepared.call(function, static, tensors, numbers)


def check(function, *calls, runs: int = 1, static=(), rounds: int = 3):
    """Check that calls of (tensors, numbers) return what the function does, which runs so often."""
    counted = function if isinstance(function, Counted) else Counted(function)
    counted.runs, function = 0, counted.function
    for tensors, *numbers in calls * (
        rounds if runs == 1 else 1
    ):  # found by its key the second time, by guards the third
        before = [None if t is None else t.clone() for t in tensors]
        given, _ = repeated(counted, static, tensors, *numbers)
        same = {id(t): copy for t, copy in zip(tensors, before, strict=True)}
        wanted, _ = function(static, [None if t is None else same[id(t)] for t in tensors], *(numbers or ((),)))
        assert len(given) == len(wanted)
        for got, want in zip(given, wanted, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert got.dtype == want.dtype and got.stride() == want.stride() and torch.equal(got, want)
        for changed in tensors:
            assert changed is None or torch.equal(changed, same[id(changed)]), "changed in place otherwise"
    assert counted.runs == runs


def with_temporaries(static, tensors, numbers):
    """Make tensors that nobody returns on the way to two that are returned."""
    once = add(tensors[0], 1)
    return (add(once.detach(), 1), once.view(2, 4)), None
