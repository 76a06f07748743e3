"""What the tests of repeated calls share: kernels on a CPU, in Triton's interpreter, and calls that repeat nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import kernel_checks
import pytest
from torch import Tensor

from halfbyte.kernels import launch, prepared


@pytest.fixture
def kernels(monkeypatch):
    """Let ops run kernels where they would take the reference, from an empty table of records."""
    for name in ("define", "quantization", "gemm", "grouped", "backends", "repeat"):
        module = importlib.import_module(f"halfbyte.ops.{name}")
        monkeypatch.setattr(module, "choose", lambda device, backend: backend or "triton")
    monkeypatch.setattr(prepared, "_RECORDS", prepared.Records())


class _Nobody:
    def launched(self, launched: Any) -> None:
        pass


@contextmanager
def anew() -> Iterator[None]:
    """Run everything anew: what is watched is not repeated."""
    with launch.watching(_Nobody()):
        yield


def tensors_of(value: Any) -> list[Tensor | None]:
    """Return the tensors of nested tuples, in order."""
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if isinstance(value, Tensor) or value is None else []


def same(given: Any, wanted: Any) -> None:
    """Check that nested tuples hold the same bits, strides and Nones."""
    given, wanted = tensors_of(given), tensors_of(wanted)
    assert len(given) == len(wanted)
    for got, want in zip(given, wanted, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.stride() == want.stride()
            kernel_checks.same(got.detach(), want.detach())


def check_repeats(call: Callable[[int], Any], data: Sequence[int] = (1, 2), *, first: int = 0) -> None:
    """Check that call(first) is recorded and that its repetitions with other data are what they are anew."""
    prepared._RECORDS.clear()
    call(first)
    known = list(prepared._RECORDS)
    refused = [record for record in prepared._RECORDS.values() if isinstance(record, str)]
    assert known and not refused, refused
    for i in data:
        with anew():
            wanted = call(i)
        same(call(i), wanted)
    assert list(prepared._RECORDS) == known, "data of one kind made another record"
