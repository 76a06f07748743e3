"""Requests that torch's guards tell apart as keys do, and views of a record's own memory as autograd sees them."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from record_checks import Counted, add, check, no_records, repeated, values, with_temporaries

from halfbyte.kernels import launch, prepared
from halfbyte.kernels.repeating import known
from halfbyte.kernels.repeating.steps import Op, View

pytestmark = pytest.mark.usefixtures("no_records")
__all__ = ["no_records"]


@pytest.fixture
def keys(monkeypatch):
    """Count the keys that are made."""
    counted = Counted(known.key_of)
    monkeypatch.setattr(known, "key_of", counted)
    return counted


def test_the_third_call_makes_no_key(keys):
    for i in range(5):
        repeated(with_temporaries, (), (values(i),))
    assert keys.runs == 2 and len(prepared._RECORDS) == 1


def test_which_arguments_are_one_tensor_is_told_without_a_key(keys):
    """Siblings' backward is given their amax three times, which guards refuse: each pattern has guards of its own."""

    def function(static, tensors, numbers):
        x, y, z = tensors
        return (torch.full((1,), float((x is y) + 2 * (x is z) + 4 * (y is z))), add(x, 1), add(y, 2), add(z, 3)), None

    counted = Counted(function)
    patterns = {0: (0, 1, 2), 1: (0, 0, 1), 2: (0, 1, 0), 4: (0, 1, 1), 7: (0, 0, 0)}
    for i in range(4):
        for wanted, places in patterns.items():
            own = [values(10 * i + j) for j in range(3)]
            out = repeated(counted, (), [own[j] for j in places])[0]
            assert float(out[0]) == wanted
            assert all(torch.equal(y, own[j] + n) for y, j, n in zip(out[1:], places, (1, 2, 3), strict=True))
    assert counted.runs == len(patterns) and keys.runs == 2 * len(patterns)


def test_without_guards_keys_are_made(monkeypatch, keys):
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    for i in range(5):
        assert torch.equal(repeated(with_temporaries, (), (values(i),))[0][0], values(i + 2))
    assert keys.runs == 5


def test_guards_hold_no_tensor(keys):
    x = values()
    gone = weakref.ref(x)
    for _ in range(3):
        repeated(with_temporaries, (), (x,))
    del x
    assert keys.runs == 2 and gone() is None


def test_a_watcher_sees_every_call():
    counted = Counted(with_temporaries)
    for _ in range(3):
        repeated(counted, (), (values(),))

    class Watcher:
        seen = 0

        def launched(self, launched):
            self.seen += 1

    watcher = Watcher()
    with launch.watching(watcher):
        repeated(counted, (), (values(),))
    assert watcher.seen == 2 and counted.runs == 2, "a launch that is repeated on a GPU tells nobody"


def test_numbers_that_kernels_may_take_in_64_bits_are_none_of_a_record_of_small_ones():
    def function(static, tensors, numbers):
        return (add(tensors[0], numbers[1]),), None

    for _ in range(3):
        repeated(function, (), (values(),), (1, 2))
    small = known.LARGEST_INT32 - known.MARGIN
    for numbers in ((small + 1, 2), (1, small + 1), (1, 1 << 40)):
        assert prepared.again(function, (), (values(),), numbers) is None
    assert prepared.again(function, (), (values(),), (small, small)) is not None
    prepared._RECORDS.clear()
    for _ in range(3):
        repeated(function, (), (values(),), (1, small + 1))
    assert prepared.again(function, (), (values(),), (1, 2)) is None, "nor the other way round"


def test_static_values_streams_and_places_of_none(keys):
    counted = Counted(
        lambda static, tensors, numbers: ((torch.full((1,), float(static + (tensors[0] is None))),), None)
    )
    for _ in range(4):
        for static in (1, 5):
            for tensors in ((values(), None), (None, values())):
                assert repeated(counted, static, tensors)[0][0] == static + (tensors[0] is None)
    assert counted.runs == 4 and keys.runs == 8


def test_guards_of_the_default_stream_are_not_those_of_others(monkeypatch):
    """Kernels of the default stream share a workspace; all other streams find one record."""
    stream, counted = [0], Counted(lambda static, tensors, numbers: ((add(tensors[0], 1),), None))
    monkeypatch.setattr(known, "_stream_of", lambda tensor: stream[0])
    found = []
    for stream[0] in (0, 7, 8):
        found.append(prepared.again(counted, (), (values(),), ()) is not None)
        for _ in range(2 if stream[0] < 8 else 0):
            prepared._call(counted, ((), (values(),), ()), (torch.device("cpu"), stream[0]), nullcontext)
    assert found == [False, False, True] and counted.runs == 2


@pytest.mark.parametrize("cast", [False, True])
def test_autocast_to_one_of_two_dtypes_or_none(cast):
    def function(static, tensors, numbers):
        return (tensors[0] @ tensors[0],), None

    x = values(size=64).view(8, 8)
    for enabled, dtype in ((cast, torch.bfloat16), (not cast, torch.bfloat16), (True, torch.float16)) * 4:
        with torch.autocast("cpu", dtype, enabled=enabled):
            (y,), _ = repeated(function, (), (x,))
            assert torch.is_autocast_enabled("cpu") == enabled
        assert y.dtype == (dtype if enabled else torch.float32)


def test_a_sign_that_waits_and_a_class_of_its_own_are_no_plain_tensors():
    for _ in range(3):
        repeated(with_temporaries, (), (values(),))

    class Other(torch.Tensor):
        pass

    negated = torch._neg_view(values())
    for x in (negated, values().as_subclass(Other)):
        assert prepared.again(with_temporaries, (), (x,), ()) is None
    assert prepared.again(with_temporaries, (), (values(),), ()) is not None


def test_the_table_that_forgets_forgets_guards(monkeypatch):
    monkeypatch.setattr(prepared, "MAX_RECORDS", 3)
    for n in range(8, 14):
        for _ in range(3):
            repeated(with_temporaries, (n,), (values(),))
    assert len(prepared._RECORDS) <= 3 and len(prepared._RECORDS.alike) <= 3


def test_few_records_are_asked_in_turn():
    wide = torch.zeros(8, 64)
    counted = Counted(lambda static, tensors, numbers: ((tensors[0] + 1,), None))
    for _ in range(3):
        for step in range(1, 8):
            (out,), _ = repeated(counted, (), (wide[:, : 8 * step : step],))
            assert (out == 1).all()
    assert counted.runs == 7
    assert max(map(len, prepared._RECORDS.alike.values())) == known.MAX_ALIKE


def views_of() -> list:
    (record,) = [record for key, record in prepared._RECORDS.items()]
    return [type(step) for step in record.steps if isinstance(step, Op)]


def test_a_view_that_is_returned_alone():
    def function(static, tensors, numbers):
        once = add(tensors[0], 1)
        return (once[2:6], add(once.view(2, 4).t().contiguous().flatten(), 1)), None

    check(function, *(((values(i),),) for i in range(3)))
    assert View in views_of()


def test_memory_that_is_returned_by_two_names():
    """What a layer saves and what it returns may be one memory: torch has to see that somebody changed it."""

    def function(static, tensors, numbers):
        once = add(tensors[0], 1)
        return (once, once.view(2, 4)), None

    for i in range(4):
        (once, view), _ = repeated(function, (), (values(i),))
        view.mul_(2)
        assert once._version == view._version > 0 and torch.equal(once, values(i + 1) * 2)
    assert views_of() == [Op]
