"""Buffers have the dtype that kernels write, whatever torch.set_default_dtype says: factories are told theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "halfbyte"
FACTORIES = {"empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}


def without_dtype(text: str) -> Iterator[str]:
    """Give the calls of torch's factories that take the default dtype."""
    for node in ast.walk(ast.parse(text)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called.startswith("torch.") and called.removeprefix("torch.") in FACTORIES:
            told = {keyword.arg for keyword in node.keywords} & {"dtype", None}
            if not told:
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_factories_are_told_their_dtype(path):
    assert list(without_dtype(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("call", ["torch.zeros(3, device=y.device)", "torch.full((2,), 1.5)", "f(torch.empty(0))"])
def test_one_that_is_not_is_seen(call):
    assert len(list(without_dtype(call))) == 1


@pytest.mark.parametrize("call", ["torch.zeros(3, dtype=x.dtype)", "torch.empty(2, **like)", "x.new_zeros(3)"])
def test_others_are_not(call):
    assert list(without_dtype(call)) == []
