"""torch.set_default_dtype changes no byte: what kernels and the reference allocate has a dtype of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from repeating import kernels
from torch import Tensor

import halfbyte as hb
from halfbyte import ops
from halfbyte.delayed import Delayed

ROWS = hb.NVFP4(outer="row")
__all__ = ["kernels"]


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float32).bfloat16()


def of_groups() -> list[Tensor]:
    ends = torch.tensor([3, 9, 16], dtype=torch.int32)
    row, col = hb.grouped_quantize_row_col(drawn(16, 32), ends, ROWS, None)
    assert col is None
    return [row.qdata, row.block_scale, row.amax[:16]]


def of_nothing() -> list[Tensor]:
    a, b = (hb.quantize(drawn(rows, 0), hb.NVFP4()) for rows in (4, 3))
    bias = torch.full((3,), 1.2345678, dtype=torch.float32)
    out = hb.gemm_nt(a, b, bias=bias, out_dtype=torch.float32)
    assert torch.equal(out, bias.expand(4, 3))
    return [out]


def of_sums() -> list[Tensor]:
    x, spec = drawn(32, 64).float() * 1.01, hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0)
    operand = ops.Operand(hb.quantize(x, spec).blocks, spec, 64)
    return list(ops.operand_sums(x, operand, with_maxima=True))


def of_rotation() -> list[Tensor]:
    found = hb.quantize(drawn(16, 64), hb.NVFP4(rotation=hb.Hadamard(signs="-+++")))
    return [found.qdata, found.block_scale]


def of_experts() -> list[Tensor]:
    layer = hb.nn.GroupedLinear(3, 32, 32, recipe="rl", dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(drawn(3, 32, 32))
    x = drawn(17, 32).requires_grad_()
    y = layer(x, torch.tensor([4, 9, 17], dtype=torch.int32))
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, layer.weight.grad]


def of_held_amaxes() -> list[Tensor]:
    state = hb.RunState(3, rank=0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False, dtype=torch.float32))
    with torch.no_grad():
        net[0].weight.copy_(drawn(32, 32).float())
    hb.quantize_(net, replace(hb.recipes.nvfp4(), amax=Delayed()), state=state)
    losses = []
    for _ in range(3):
        state.begin_step(net)
        loss = (net(drawn(16, 32).float() * 1.7) ** 2).sum()
        loss.backward()
        losses.append(loss.detach())
        state.advance()
    return losses


CASES: dict[str, Callable[[], list[Tensor]]] = {
    found.__name__: found for found in (of_groups, of_nothing, of_sums, of_rotation, of_experts, of_held_amaxes)
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_byte_changes(name, with_kernels, dtype, request):
    if with_kernels:
        request.getfixturevalue("kernels")
    torch.set_default_dtype(dtype)
    first = CASES[name]()  # what is kept for later calls is made under it as well
    torch.set_default_dtype(torch.float32)
    wanted = CASES[name]()
    torch.set_default_dtype(dtype)
    for found in (first, CASES[name]()):
        assert [t.dtype for t in found] == [t.dtype for t in wanted]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
