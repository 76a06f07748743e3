"""What values show in a notebook: tables in HTML without styles, which those of the notebook make readable."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""The operands of each GEMM, the left one first."""

ALWAYS = ("block", "element", "rounding")
"""Fields of a spec that are always said; of the others those that differ from their default."""


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML, without styles."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Sequence[str]) -> str:
    """Return lines of text in HTML, one below the other."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def spec_words(spec: Any) -> str:
    """Return in words how an operand is quantized; None stays in high precision."""
    if spec is None:
        return "high precision"
    given = {one.name: (getattr(spec, one.name), one.default) for one in fields(spec) if one.init}
    always = [_words(given.pop(name)[0]) for name in ALWAYS if name in given]
    others = [_named(name, value) for name, (value, default) in given.items() if value != default]
    return ", ".join((" ".join((type(spec).__name__, *always[:1])), *always[1:], *others))


def _words(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _named(name: str, value: Any) -> str:
    return repr(value) if hasattr(value, "__dataclass_fields__") else f"{name}={value!r}"


class ShowsGemms:
    """A value with the three GEMMs of a layer: a row for each, with how its operands are quantized."""

    def _repr_html_(self) -> str:
        rows = []
        for name, (left, right) in GEMMS.items():
            gemm = getattr(self, name)
            specs = (None, None) if gemm is None else (gemm.a, gemm.b)
            invariant = ["rows do not depend on their batch"] if getattr(gemm, "batch_invariant", False) else []
            cells = [f"{t}: {spec_words(spec)}" for t, spec in zip((left, right), specs, strict=True)]
            rows.append((", ".join((name, *invariant)), *cells))
        own = {one.name: (getattr(self, one.name), one.default) for one in fields(self) if one.init}  # type: ignore
        said = [f"{name}={value!r}" for name, (value, default) in own.items() if name not in GEMMS and value != default]
        return html_table(("GEMM", "left operand", "right operand"), rows) + html_lines(said)


class ShowsText:
    """A value whose text is a table: the same in a notebook."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
