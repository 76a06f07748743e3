"""Some functions of a file that cannot be imported here, because what it imports is a build for a GPU: those alone."""

from __future__ import annotations
import __future__

import ast
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any


def load_alone(path: Path, names: Sequence[str], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the definitions of some names of a Python file, and nothing else of it.

    Args:
        path: the file.
        names: functions, methods (as plain functions, without decorators) and assigned names, wherever in the file.
        given: what they use besides each other.

    Returns:
        name -> function or value.

    Raises:
        ValueError: the file is no Python, or does not define one of them.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:  # null bytes, where they are a ValueError
        raise ValueError(f"{path}: is no Python ({error}); give the file that the wheel holds") from error
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    found = {name: node for node in statements for name in _names(node) if name in names}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"{path}: defines no {', '.join(missing)}; give the file of the version that docs/agreement.md names"
        )
    body = sorted(set(found.values()), key=lambda node: node.lineno)
    for node in body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    space = dict(given)
    flags = __future__.annotations.compiler_flag  # what is in annotations need not exist
    exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec", flags=flags, dont_inherit=True), space)
    return MappingProxyType({name: space[name] for name in names})


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def file_digest(path: Path) -> str:
    """Return the first 12 hexadecimal digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
