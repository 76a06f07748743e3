"""Linear layers on DTensors as one autograd function, which sees DTensors on both sides.

`to_local` and `from_local` are autograd functions of their own: for x, each weight and each output one more in the
forward and one more in the backward, where each makes a DTensor the long way. That took the host longer than the pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from halfbyte.functional.derivatives import LINEAR, first_order
from halfbyte.functional.linear import run_backward, run_forward
from halfbyte.functional.operands import Beside
from halfbyte.functional.request import Call
from halfbyte.layout import from_rows


class Lying(NamedTuple):
    """How the tensors of a call lie on its mesh.

    outputs: shape and placement of each output.
    lines: the leading dimensions of what is here of an output, and one more.
    inputs: placements of the gradients of x, of each weight and of each bias.
    """

    mesh: DeviceMesh
    outputs: tuple[tuple[torch.Size, Placement], ...]
    lines: torch.Size
    inputs: tuple[Placement, ...]


class Given(NamedTuple):
    """A call on DTensors: what `prepare` returned for the parts that are here, and how they lie."""

    call: Call
    tensors: tuple[Any, ...]
    places: Lying


def run_on_parts(given: Given, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the outputs of layers as DTensors; inputs are x, weights and biases."""
    return PartsOfLinear.apply(given, *inputs, Beside(given.tensors[len(inputs) :]))


class PartsOfLinear(torch.autograd.Function):
    """x, n weights and n biases in, all DTensors, n outputs out; what no gradient is wanted of comes in a `Beside`."""

    @staticmethod
    def forward(ctx: Any, given: Given, *inputs: Any) -> tuple[Tensor, ...]:
        call, (x, *tensors), places = given
        outputs, kept = run_forward(ctx, call, x, tensors)
        ctx.save_for_backward(*kept)
        ctx.places, ctx.specs = places, [None if t is None else t._spec for t in inputs[:-1]]
        return as_parts(outputs, places)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> tuple[Tensor | None, ...]:
        wanted = [Replicate() if place.is_partial() else place for _, place in ctx.places.outputs]
        own = [_part(dy, place) for dy, place in zip(dys, wanted, strict=True)]
        _, *gradients = _gradients(ctx, *own)
        count = len(ctx.specs)
        places = [(place,) for place in ctx.places.inputs]
        made = map(_as_gradient, gradients[:count], ctx.specs, places)
        return None, *made, *gradients[count:]


@first_order(LINEAR)
def _gradients(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what is here."""
    return run_backward(ctx, ctx.saved_tensors, dys)


def _part(dy: Any, place: Placement) -> Tensor | None:
    """Return what is here of a gradient that lies as its output does."""
    if dy is None:
        return None
    if dy.placements != (place,):
        dy = dy.redistribute(placements=(place,))
    return dy.to_local() if torch.is_grad_enabled() else dy._local_tensor


def as_parts(outputs: Sequence[Tensor], places: Lying) -> tuple[Tensor, ...]:
    """Return outputs [M, N_i] that are here as DTensors."""
    made = []
    for y, (shape, place) in zip(outputs, places.outputs, strict=True):
        meta = TensorMeta(shape, strides_of(shape), y.dtype)
        here = y if y.shape[:-1] == places.lines[:-1] else from_rows(y, places.lines)
        made.append(_wrapped(here, DTensorSpec(places.mesh, (place,), tensor_meta=meta)))
    return tuple(made)


class _Own(torch.autograd.Function):
    """What is here of a DTensor; its gradient lies as said."""

    @staticmethod
    def forward(ctx: Any, t: Any, places: tuple[Placement, ...]) -> Tensor:
        ctx.spec, ctx.places = t._spec, places
        ctx.set_materialize_grads(False)
        return t._local_tensor.view_as(t._local_tensor)

    @staticmethod
    def backward(ctx: Any, own: Tensor | None) -> tuple[Tensor | None, None]:
        return _as_gradient(own, ctx.spec, ctx.places), None


def part_here(t: Any, gradient: Placement | None = None) -> Tensor:
    """Return what is here of a DTensor: `to_local`, without its long way back.

    Args:
        t: on a mesh of one dimension, if gradient is given.
        gradient: how its gradient lies; as t does for None.
    """
    return _Own.apply(t, t.placements if gradient is None else (gradient,)) if torch.is_grad_enabled() else t.to_local()


class _Told(torch.autograd.Function):
    """A plain tensor as the DTensor of which it is a part; its gradient is what is here of one that lies as said."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, spec: DTensorSpec, place: Placement) -> Tensor:
        ctx.place = place
        ctx.set_materialize_grads(False)
        return _wrapped(t.detach(), spec)

    @staticmethod
    def backward(ctx: Any, whole: Any) -> tuple[Tensor | None, None, None]:
        return _part(whole, ctx.place), None, None


def as_part(t: Tensor, mesh: DeviceMesh, place: Placement, shape: torch.Size, gradient: Placement) -> Any:
    """Return a plain tensor as the DTensor of which it is this rank's part, whoever says so: nobody is asked.

    Args:
        t: what is here.
        mesh: of one dimension.
        place, shape: of the DTensor.
        gradient: what part the gradient is that t receives: `DTensor.from_local` would sum one that is partial.
    """
    spec = DTensorSpec(mesh, (place,), tensor_meta=TensorMeta(shape, strides_of(shape), t.dtype))
    return _Told.apply(t, spec, gradient) if torch.is_grad_enabled() and t.requires_grad else _wrapped(t.detach(), spec)


def _as_gradient(own: Tensor | None, spec: Any, places: tuple[Placement, ...]) -> Tensor | None:
    """Return a gradient as what it is a part of."""
    if own is None:
        return None
    shape = spec.shape
    strides = strides_of(shape) if own.is_contiguous() else _strides_like(own, shape)
    if torch.is_grad_enabled():  # with create_graph=True: what leads here has to lead on
        return DTensor.from_local(own, spec.mesh, places, run_check=False, shape=shape, stride=strides)
    if spec.placements == places and spec.tensor_meta == (shape, strides, own.dtype):
        return _wrapped(own, _copied(spec))
    return _wrapped(own, DTensorSpec(spec.mesh, places, tensor_meta=TensorMeta(shape, strides, own.dtype)))


@lru_cache(maxsize=1024)
def strides_of(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of what lies in order."""
    return tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])


def _strides_like(own: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a whole whose dimensions lie in the order of those of its part."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda i: (own.stride(i), -i)):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def _wrapped(own: Tensor, spec: DTensorSpec) -> Tensor:
    """Return a DTensor as torch's own ops make them, without the initializer, which does nothing but take its time."""
    return DTensor.__new__(DTensor, own, spec, requires_grad=False)


def _copied(spec: DTensorSpec) -> DTensorSpec:
    """Return what copy.copy does: torch may write into a spec, and a tensor's is its own."""
    made = object.__new__(DTensorSpec)
    made.__dict__.update(spec.__dict__)
    return made
