"""Functions that no record can repeat: they run anew in every call, or are refused loudly."""

from __future__ import annotations

import warnings

import pytest
import torch
import triton.language as tl
from record_checks import SIZE, add, check, no_records, reason, values

from halfbyte.kernels import launch, prepared
from halfbyte.kernels.launch import jit

pytestmark = pytest.mark.usefixtures("no_records")
__all__ = ["no_records"]


@jit
def number_kernel(out_ptr, number):
    tl.store(out_ptr, number)


@jit
def pair_kernel(pointers, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(pointers[0] + i) + tl.load(pointers[1] + i))


def test_kernel_compiled_for_a_number_is_not_repeated():
    def function(static, tensors, numbers):
        out = torch.empty_like(tensors[0])
        number_kernel[(1,)](out, numbers[0])
        return (out[:1],), None

    check(function, ((values(),), (3,)), ((values(),), (4,)), runs=2)
    assert "number" in reason()


@pytest.mark.parametrize(
    "use",
    [
        lambda n: torch.full((1,), n),
        lambda n: torch.zeros(2) + n,
        torch.ones,
        lambda n: n if n else 0,
        lambda n: n == 3,
        lambda n: n != 3,
        lambda n: 3 in [n],
        lambda n: n < 4,
        range,
        int,
        float,
        lambda n: n * 2,
        lambda n: n % 4,
        lambda n: {n: 1},
    ],
)
def test_number_that_something_else_takes_is_refused_loudly(use):
    def function(static, tensors, numbers):
        use(numbers[0])
        return (add(tensors[0], numbers[0]),), None

    with pytest.raises(TypeError):
        prepared.call(function, (), (values(),), (3,))
    assert not prepared._RECORDS and launch.watcher() is None


OUTSIDE = values(100)

UNREPEATABLE = {
    "host read": lambda x: x * x.sum().item(),
    "host decision": lambda x: x + 1 if x.sum() > 100 else x - 1,
    "host comparison": lambda x: x if torch.equal(x, OUTSIDE) else x * 2,
    "tensor from outside": lambda x: x + OUTSIDE,
    "launch of a tensor from outside": lambda x: add(OUTSIDE, 1) + x,
    "constant from the host": lambda x: x + torch.tensor([float(x[0])]),
    "shape that follows from values": lambda x: torch.zeros(torch.nonzero(x > 3).shape[0]),
    "mask": lambda x: x[x > 3] * 2,
    "mask of bytes": lambda x: torch.ops.aten.index.Tensor(x, [(x > 3).to(torch.uint8)]) * 2,
    "view moved": lambda x: add(torch.cat([x, x * 2]).as_strided_((SIZE,), (1,), SIZE), 1),
    "memory exchanged": lambda x: torch.empty(0).set_(x.clone().untyped_storage(), 4, (4,), (1,)).clone(),
    "tuple of tensors": lambda x: (out := torch.empty_like(x), pair_kernel[(1,)]((x, x), out, SIZE=SIZE))[0],
    "another device": lambda x: add(x, 1) + x.to("meta").numel(),
}


@pytest.mark.parametrize("what", UNREPEATABLE)
def test_what_cannot_be_repeated_is_not(what):
    body = UNREPEATABLE[what]
    check(
        lambda static, tensors, numbers: ((body(tensors[0]),), None), *(((values(60 * i),),) for i in range(3)), runs=3
    )
    assert reason()


def test_output_from_outside_is_not_repeated():
    check(lambda static, tensors, numbers: ((OUTSIDE,), None), ((values(),),), ((values(1),),), runs=2)
    assert "outside" in reason()


def read_on_the_host(static, tensors, numbers):
    """What a record cannot repeat."""
    return (tensors[0] * tensors[0].sum().item(),), None


def test_what_is_worked_out_anew_says_so_once_with_the_reason():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for size in (SIZE, SIZE, SIZE, 2 * SIZE):
            prepared.call(read_on_the_host, (), (values(1.0, size),))
    (warning,) = said
    assert str(warning.message) == (
        f"{__name__}.read_on_the_host is worked out anew in every call, slower on the host: "
        "aten._local_scalar_dense.default returns what is no tensor"
    )


def test_what_is_repeated_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            prepared.call(lambda static, tensors, numbers: ((add(tensors[0], 1),), None), (), (values(),))
