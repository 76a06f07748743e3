"""Whoever watches ops sees those that a repeated pass would hide, and gets the same bits."""

from __future__ import annotations

import functools

import pytest
import torch
from repeating import anew, kernels, same
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import halfbyte as hb
from halfbyte.kernels import prepared

pytestmark = pytest.mark.usefixtures("kernels")
__all__ = ["kernels"]
HB = torch.ops.halfbyte


def layer() -> hb.nn.Linear:
    torch.manual_seed(0)
    return hb.nn.Linear(32, 48, recipe="nvfp4_forward").to(torch.bfloat16)


def x_of(i: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(i)).bfloat16().requires_grad_()


def step(m, x, call=None):
    """Return the output and all gradients."""
    y = m(x) if call is None else call(m, x)
    return y, *torch.autograd.grad(y, [x, *m.parameters()], torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))


@pytest.fixture
def trained():
    """Return a layer whose passes have records, and what a step of it returns anew."""
    m = layer()
    with anew():
        wanted = step(m, x_of(1))
    for i in (0, 1):
        given = step(m, x_of(i))
    same(given, wanted)
    assert len(prepared._RECORDS) == 2
    return m, wanted


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode(trained):
    m, wanted = trained
    with Ops() as mode:
        same(step(m, x_of(1)), wanted)
    assert mode.seen.count(HB.gemm_nt.default) == 3 and HB.quantize_row_col.default in mode.seen
    with Ops() as outer, Ops() as inner:
        same(step(m, x_of(1)), wanted)
    assert outer.seen.count(HB.gemm_nt.default) == inner.seen.count(HB.gemm_nt.default) == 3


def test_mode_that_watches_what_it_calls(trained):
    """A mode that stays on within an op sees the op's allocations, repeated or not."""

    class Within(Ops):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            if func is HB.amax.default and self.seen.count(func) == 1:
                with self:
                    return func(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    seen = []
    for _ in range(3):
        with Within() as mode:
            hb.ops.amax(x_of(1).detach())
        seen.append(mode.seen)
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) > 1


def test_function_mode(trained):
    class Functions(TorchFunctionMode):
        seen = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, func)
            return func(*args, **(kwargs or {}))

    m, wanted = trained
    with Functions() as mode:
        same(step(m, x_of(1)), wanted)
    assert sum("gemm_nt" in str(func) for func in mode.seen) >= 1


def test_default_device_is_no_spectator(trained, monkeypatch):
    m, wanted = trained
    monkeypatch.setattr(prepared, "Recorder", None)  # whatever would be recorded now is an error
    with torch.device("cpu"):
        same(step(m, x_of(1)), wanted)


def test_flops_are_counted(trained):
    m, wanted = trained
    with FlopCounterMode(display=False) as counter:
        m(x_of(1)).backward(torch.ones_like(wanted[0]))
    assert counter.get_total_flops() == 3 * 2 * 16 * 32 * 48


def test_selective_checkpointing(trained):
    """What is kept is not computed again: one GEMM in the forward, two in the backward."""
    m, wanted = trained
    contexts = functools.partial(create_selective_checkpoint_contexts, hb.selective_checkpoint_ops())
    same(step(m, x_of(1), lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=contexts)), wanted)
    same(step(m, x_of(1), lambda m, x: checkpoint(m, x, use_reentrant=False)), wanted)
    with Ops() as mode:
        step(m, x_of(1), lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=contexts))
    assert mode.seen.count(HB.gemm_nt.default) <= 4


def test_fake_tensors(trained):
    m, wanted = trained
    from torch._subclasses.fake_tensor import FakeTensorMode

    known = list(prepared._RECORDS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = m(mode.from_tensor(x_of(1)))
        assert type(y) is not torch.Tensor and y.shape == wanted[0].shape
    assert list(prepared._RECORDS) == known


def test_compiled_code(trained):
    m, wanted = trained
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        same(step(m, x_of(1), lambda _, x: compiled(x)), wanted)
    same(step(m, x_of(1)), wanted)


class Wrapped(torch.Tensor):
    """A subclass without data of its own."""


def test_subclass(trained):
    m, wanted = trained
    x = x_of(1).detach().as_subclass(Wrapped).requires_grad_()
    given = step(m, x)
    same([t.as_subclass(torch.Tensor) for t in given], wanted)


def test_transforms_are_refused_as_before(trained):
    m, _ = trained
    for transform in (torch.func.vmap(m), torch.func.grad(lambda x: m(x).float().sum())):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError)):
            transform(x_of(1).detach()[None])


def test_hooks_on_saved_tensors(trained):
    """They see plain tensors, and what they return is read."""
    m, wanted = trained
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        same(step(m, x_of(1)), wanted)
    assert packed and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in packed)
    with saved_tensors_hooks(pack, torch.zeros_like):
        given = step(m, x_of(1))
    assert not given[1].any() and not given[2].any() and given[3].any()


def test_gradient_of_a_gradient_is_refused(trained):
    m, _ = trained
    x = x_of(1)
    (dx,) = torch.autograd.grad(m(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?i)second|twice|once|first"):
        torch.autograd.grad(dx.float().sum(), x)


def test_change_in_place_of_what_is_saved_is_noticed(trained):
    """nvfp4_forward keeps x itself for the weight's gradient: views of it know its version."""
    m, _ = trained
    x = x_of(1).detach()
    y = m(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_may_be_changed_in_place(trained):
    m, wanted = trained
    for _ in range(2):
        same(step(m, x_of(1), lambda m, x: m(x).add_(0))[1:], wanted[1:])


def test_layers_of_one_shape_share_records(trained):
    other = layer()
    other.weight.data.mul_(2)
    with anew():
        wanted = step(other, x_of(1))
    same(step(other, x_of(1)), wanted)
    assert len(prepared._RECORDS) == 2


@pytest.mark.parametrize("fill", [True, False])
def test_deterministic_algorithms(trained, fill):
    m, wanted = trained
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        same(step(m, x_of(1)), wanted)
        prepared._RECORDS.clear()
        same(step(m, x_of(1)), wanted)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    same(step(m, x_of(1)), wanted)
