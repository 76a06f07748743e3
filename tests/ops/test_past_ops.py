"""Without a GPU a pass calls the bodies of its ops, unless somebody watches ops."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte import ops
from halfbyte.ops import repeat
from halfbyte.ops.repeat import BODIES

HB = torch.ops.halfbyte


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def called(monkeypatch):
    """Return the names of the ops whose bodies are called past them."""
    names = []
    for op, body in list(BODIES.items()):

        def counted(*arguments, body=body, name=op.__name__):
            names.append(name)
            return body(*arguments)

        monkeypatch.setitem(BODIES, op, counted)
    return names


def step(m, x):
    y = m(x)
    return y.detach(), *torch.autograd.grad(y.sum(), [x, *m.parameters()])


def test_a_pass_calls_bodies_where_nobody_watches(called):
    torch.manual_seed(0)
    m, x = hb.nn.Linear(32, 48, recipe="nvfp4"), torch.randn(16, 32, requires_grad=True)
    alone = step(m, x)
    assert called.count("gemm_nt") == 3 and called.count("quantize_row_col") == 3
    called.clear()
    with Ops() as mode:
        watched = step(m, x)
    assert not called and mode.seen.count(HB.gemm_nt.default) == mode.seen.count(HB.quantize_row_col.default) == 3
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    with torch.no_grad():
        assert torch.equal(m(x), alone[0]) and called.count("gemm_nt") == 1


def product(static, tensors, numbers):
    return (ops.gemm_nt(*tensors, out_dtype=torch.float32),), None


def test_what_no_pass_calls_is_an_op_and_so_is_what_has_no_memory(called):
    x = torch.randn(16, 32)
    alone = ops.gemm_nt(x, x, out_dtype=torch.float32)
    assert not called
    assert torch.equal(ops.run(product, (), (x, x), ())[0][0], alone) and called == ["gemm_nt"]
    shapes = ops.run(product, (), (x.to("meta"), x.to("meta")), ())[0][0]
    assert shapes.shape == (16, 16) and shapes.is_meta and called == ["gemm_nt"]


def test_a_pass_within_a_pass_leaves_the_outer_one_past_ops():
    assert not repeat.is_past_ops()
    with repeat._past_ops():
        with repeat._past_ops():
            assert repeat.is_past_ops()
        assert repeat.is_past_ops()
    assert not repeat.is_past_ops()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (2, 0, 3)])
@pytest.mark.parametrize("columns", [0, 1, 5])
def test_outputs_in_the_shape_of_tokens_have_torchs_own_strides(shape, columns):
    wanted = torch.empty(*shape, columns)
    (made,) = ops.in_shape([torch.empty(wanted.numel() // columns if columns else 6, columns)], shape)
    assert made.shape == wanted.shape and made.stride() == wanted.stride() and made._base is None
