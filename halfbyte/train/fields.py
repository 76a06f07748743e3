"""Checks of what configurations hold; each names the field, its value and the remedy."""

from __future__ import annotations

import math
from typing import Literal, get_args

Switch = Literal["auto", "on", "off"]


def check_positive(values: object, *names: str) -> None:
    """Raise ValueError unless these fields are above 0."""
    for name in names:
        if not getattr(values, name) > 0:
            raise ValueError(f"{name}={getattr(values, name)}: give a number above 0")


def check_finite(values: object, *names: str) -> None:
    """Raise ValueError if one of these fields is infinite."""
    for name in names:
        if math.isinf(getattr(values, name)):
            raise ValueError(f"{name}={getattr(values, name)}: give a finite number")


def check_fraction(values: object, *names: str) -> None:
    """Raise ValueError unless these fields lie in [0, 1)."""
    for name in names:
        if not 0 <= getattr(values, name) < 1:
            raise ValueError(f"{name}={getattr(values, name)}: give 0 <= {name} < 1")


def check_switch(values: object, *names: str) -> None:
    """Raise ValueError unless these fields are each a Switch."""
    for name in names:
        if getattr(values, name) not in get_args(Switch):
            raise ValueError(f"{name}={getattr(values, name)!r}: give 'auto', 'on' or 'off'")
