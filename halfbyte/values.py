"""What frozen values of options share: refusals, equality by key, splitting, whether rows of a product stand alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def refused(field: str, value: object, remedy: str) -> ValueError:
    """Return the error of a value that a field does not take."""
    return ValueError(f"{field}={value!r}: {remedy}")


def check_choice(field: str, value: object, allowed: tuple) -> None:
    """Raise ValueError unless a field has one of the allowed values."""
    if value not in allowed:
        raise refused(field, value, f"use one of {', '.join(map(repr, allowed))}")


@contextmanager
def called(**names: str) -> Iterator[None]:
    """Within the block a field of a value that is refused is called as the caller's argument is, field=argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        field, equals, rest = str(error).partition("=")
        if not equals or field not in names:
            raise
        raise type(error)(f"{names[field]}={rest}") from error


class EqualByKey:
    """Values with a key are equal if their keys are.

    Compiled code compares values too, and after a switch between recipes that differ in a float it takes that float for
    a variable, which it cannot compare; strings it compares at once.
    """

    key: str

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, EqualByKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)


def rows_problem(a: Any, b: Any) -> str | None:
    """Say why rows of a product of operands with these specs depend on each other, and what to do, or None."""
    if a is None or b is None:
        return f"a={a}, b={b}; give both operands a spec, or use False"
    if any(spec.format.element.name == "e5m2" for spec in (a, b)):
        return "sums of e5m2 have no order-free form; use MXFP8(element='e4m3')"
    if a.rounding == "stochastic":
        return "a draws bits by its place in the batch; use rounding='nearest'"
    if a.is_tile or a.has_tensor_amax:
        shared = "16x16 tiles" if a.is_tile else "one amax"
        return f"a shares {shared} among its rows; use block=(1, 16) and outer='row'"
    return None


def split_outside(text: str, separator: str) -> list[str]:
    """Return the parts of a text between separators that stand in no parentheses, without spaces around them."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
