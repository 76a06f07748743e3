"""What ops calls has one name and one head in the reference and in the kernels."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from halfbyte import ops, reference
from halfbyte.kernels import backend

FUNCTIONS = {name: value for name, value in vars(backend).items() if inspect.isfunction(value)}
OF_KERNELS_ALONE = {"grouped_values"}
"""The reference decodes group by group; `_grouped_decode` of halfbyte/ops/grouped.py asserts that kernels run."""


def asked_of_backends(text: str) -> set[str]:
    """Return what a file asks of `implementation(...)`: of the call, or of a name that it calls its result.

    A name means that everywhere in the file, so that a function to which the result is passed is read as well.
    """
    nodes = list(ast.walk(ast.parse(text)))
    names = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and is_asked_for(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return {
        n.attr for n in attributes if is_asked_for(n.value) or (isinstance(n.value, ast.Name) and n.value.id in names)
    }


def is_asked_for(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "implementation"


ASKED = {
    name: path.name
    for path in sorted(Path(ops.__file__).parent.glob("*.py"))
    for name in asked_of_backends(path.read_text())
}
"""Every function that ops ask a backend for, with a file that does."""


@pytest.mark.parametrize("name", sorted(ASKED))
def test_both_backends_have_what_ops_ask_for(name):
    """On a CPU ops only run the reference: a line that kernels/backend.py lacks would show on a GPU."""
    file = f"halfbyte/ops/{ASKED[name]}"
    assert callable(getattr(backend, name, None)), f"{file} asks kernels/backend.py for it"
    is_shared = name not in OF_KERNELS_ALONE
    assert callable(getattr(reference, name, None)) == is_shared, f"{file} asks halfbyte.reference for it"


def test_the_kernels_have_nothing_that_ops_do_not_ask_for():
    assert FUNCTIONS.keys() == ASKED.keys()


def test_what_is_asked_is_found():
    text = """
def direct(x):
    return implementation(x.device, "").quantize(x)
def by_name(x):
    module = implementation(x.device, "")
    run = module.decode if x.any() else module.plain
    return passed_on(module, run(x)), x.shape, other(x).transpose
def passed_on(module, x):
    return module.from_values(x)
"""
    assert asked_of_backends(text) == {"quantize", "decode", "plain", "from_values"}


def test_the_kernels_have_no_function_of_their_own():
    assert len(FUNCTIONS) > 10
    assert FUNCTIONS.keys() - vars(reference).keys() == OF_KERNELS_ALONE


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - OF_KERNELS_ALONE))
def test_heads_agree(name):
    """A kernel may take more, by name and with a default: which variant, which dtype."""
    wanted, given = (
        [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(reference, name), FUNCTIONS[name])
    )
    assert given[: len(wanted)] == wanted
    assert all(extra.default is not extra.empty for extra in given[len(wanted) :])
