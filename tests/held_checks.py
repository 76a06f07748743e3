"""What the tests of whole steps share: operands held to the reference while a layer makes them, products compared."""

from __future__ import annotations

from typing import Any

from quantize_checks import same_blocks
from torch import Tensor

from halfbyte import ops, reference
from halfbyte.layout import GroupEnds, as_offsets
from halfbyte.rng import Draw
from halfbyte.sides import Side

NEAR = 5e-3
"""Of the norm: two sums of equal operands in other orders, each rounded to bf16."""


def hold_to_reference(monkeypatch: Any, name: str) -> list[tuple[Any, Any]]:
    """Hold every operand that the op `name` makes to the reference's of the same tensors, on the same device.

    Returns:
        The specs of each, which grow with every call.
    """
    made, quantize, wanted = [], getattr(ops, name), getattr(reference, name)

    def checked(t: Tensor, *arguments: Any) -> Any:
        given = [one._replace(transient=False) if isinstance(one, Side) else one for one in arguments]  # codes
        found = quantize(t, *given)
        plain = [_with_numbers(one) if isinstance(one, Side) else one for one in given]
        plain = [as_offsets(one) if isinstance(one, GroupEnds) else one for one in plain]
        for got, want in zip(found, wanted(t.detach(), *plain), strict=True):
            same_blocks(got, want)
        made.append(tuple(side and side.spec for side in given[-2:]))
        return found

    monkeypatch.setattr(ops, name, checked)
    return made


def _with_numbers(side: Side) -> Side:
    """Return a side whose draws have ints as streams, in place of the numbers that a pass hands to kernels alone."""
    return side._replace(draw=_with_number(side.draw), sign_draw=_with_number(side.sign_draw))


def _with_number(draw: Draw | None) -> Draw | None:
    return draw and draw._replace(stream=getattr(draw.stream, "value", draw.stream))


def near(given: list[Tensor], wanted: list[Tensor]) -> None:
    """Check that tensors are alike but for the order of sums."""
    for got, want in zip(given, wanted, strict=True):
        got, want = got.double().cpu(), want.double().cpu()
        assert got.shape == want.shape and (got - want).norm() <= NEAR * want.norm()
