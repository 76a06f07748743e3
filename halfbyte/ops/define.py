"""How an op is defined: its schema, the body that asks for a backend, a fake that only computes shapes, its FLOPs.

Ops take plain tensors, numbers and spec keys, so that compilers can look past them. Outputs never alias inputs or each
other, as torch.library demands: an amax that the caller handed in, or that both orientations share, comes back empty
and the function that calls the op puts the known one in its place. Defined with torch.library.Library, which costs a
third of what torch.library.custom_op costs per call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from halfbyte import reference
from halfbyte.ops.backends import REFERENCE, choose
from halfbyte.ops.repeat import BODIES, refuse_gradients, repeat_pass, repeated
from halfbyte.rng import Draw
from halfbyte.spec import Spec, parse

_LIBRARY = torch.library.Library("halfbyte", "DEF")

PASSES: list[Any] = []
"""Ops that are a whole pass."""

DRAW = "Tensor? rng, int stream, SymInt first_block, SymInt? blocks_per_row, Tensor? sign_rng, int sign_stream"
"""Where random bits and fresh signs are drawn, in a schema."""

OPERANDS = (
    "Tensor a, Tensor? a_scale, Tensor? a_amax, str a_key, str a_layout, "
    "Tensor b, Tensor? b_scale, Tensor? b_amax, str b_key, str b_layout, SymInt K"
)
"""Two operands of a GEMM, in a schema: codes with scales and key, decoded values without scales, plain without key."""


def op(
    schema: str, body: Callable, fake: Callable, flops: Callable | None = None, *, takes_parameters: bool = False
) -> None:
    """Define torch.ops.halfbyte.NAME.

    Args:
        schema: "NAME(...) -> ...", whose last argument is `str backend`, "" to choose.
        body: takes what the schema says, by position.
        fake: the same, and computes shapes only.
        flops: takes shapes in the place of tensors; see torch.utils.flop_counter.
        takes_parameters: it measures, and nobody wants a gradient of what it finds; others refuse tensors that require
            one, whose backward is the layer's.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, repeated(body, schema, takes_parameters=takes_parameters), "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfbyte::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.halfbyte, name)
    BODIES[packet] = body
    if flops is not None:
        register_flop_formula(packet)(flops)


def define_pass(name: str, function: Callable) -> Any:
    """Define a whole pass as an op, and return it.

    Args:
        name: of the op. It takes a text with what is static, tensors or None, sizes and the numbers that vary.
        function: (text, tensors, sizes, numbers) -> tensors or None, as `run` demands; None is not returned. Outputs
            that are inputs come back empty, and those that are returned twice once as a copy: an op aliases nothing.
    """

    def body(static: tuple, tensors: Sequence[Any], numbers: Sequence[int]) -> tuple[tuple, None]:
        text, sizes = static
        given, outputs = {id(tensor) for tensor in tensors}, {}
        for i, tensor in enumerate(function(text, tensors, sizes, numbers)):
            if tensor is not None:
                alone = tensor.clone() if any(tensor is other for other in outputs.values()) else tensor
                outputs[i] = tensor.new_empty(0) if id(tensor) in given else alone
        return tuple(outputs.values()), None

    def whole(text: str, tensors: Sequence[Any], sizes: Sequence[int], numbers: Sequence[int]) -> list[Tensor]:
        if torch.is_grad_enabled():
            refuse_gradients(name, tensors)
        return list(repeat_pass(body, (text, tuple(sizes)), tensors, numbers))

    def fake(text: str, tensors: Sequence[Any], sizes: Sequence[int], numbers: Sequence[int]) -> list[Tensor]:
        return list(body((text, sizes), tensors, numbers)[0])

    _LIBRARY.define(f"{name}(str text, Tensor?[] tensors, SymInt[] sizes, SymInt[] numbers) -> Tensor[]")
    _LIBRARY.impl(name, whole, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfbyte::{name}", fake, lib=_LIBRARY)
    PASSES.append(getattr(torch.ops.halfbyte, name))
    return PASSES[-1]


def implementation(device: torch.device, backend: str) -> Any:
    """Return the module that runs on `device`; both have the same functions.

    Args:
        device: of the tensors.
        backend: its name, or "" to choose.
    """
    if choose(device, backend or None) == REFERENCE:
        return reference
    from halfbyte.kernels import backend as kernels  # imports Triton, so only where it runs

    return kernels


def uncast(device: torch.device) -> AbstractContextManager:
    """Return where autocast casts nothing on `device`: an op multiplies in the dtypes that it was given."""
    is_cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_cast else nullcontext()


def spec_of(key: str) -> Spec | None:
    """Return the spec of a key, None for ""."""
    return parse(key) if key else None


def draw_of(base: Tensor | None, stream: int, first_block: int = 0, blocks_per_row: int | None = None) -> Draw | None:
    """Return the place where an op draws."""
    return None if base is None else Draw(base, stream, first_block, blocks_per_row)


def place_arguments(draw: Draw | None) -> tuple[Tensor | None, int]:
    """Return a place that names no shard as ops take it."""
    return (None, 0) if draw is None else (draw.base, draw.stream)


def empty_like(x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return unwritten (qdata, block_scale, amax) of these shapes on x's device."""
    dtypes = (torch.uint8, torch.uint8, torch.float32)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def nothing(*arguments: Any) -> None:
    """Return what an op returns that writes to its argument: a fake."""
