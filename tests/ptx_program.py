"""PTX as text, to a program: statements whose registers have names of their own, and labels."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Statement(NamedTuple):
    """guard: the predicate that it needs and whether negated, or None."""

    guard: tuple[str, bool] | None
    opcode: str
    operands: list[Any]


class Program(NamedTuple):
    """A kernel: statements, where labels stand, the types of its parameters in order."""

    statements: list[Statement]
    labels: dict[str, int]
    parameters: list[tuple[str, str]]


def parse(text: str) -> Program:
    """Return the program of one kernel in PTX."""
    text = re.sub(r"//[^\n]*", "", text)
    head, _, body = text[text.index(".entry") :].partition("{")
    body = body[: body.rindex("}")]
    body = re.sub(r"^\s*\.(loc|file)[^\n]*$", "", body, flags=re.MULTILINE)
    parameters = re.findall(r"\.param \.(\w+)[^,)]*?(\w+)\s*[,)]", head)
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = [{}]
    fresh = 0
    # Braces stand for scopes between statements, for vectors within one.
    body = re.sub(r"(\$L\w+):", r"label \1;", body)
    for token in re.findall(r"[^;{}]*\{[^;{}]*\}[^;{}]*;|[{}]|[^;{}]+;", body):
        token = token.strip().rstrip(";").strip()
        if token == "{":
            scopes.append({})
        elif token == "}":
            scopes.pop()
        elif token.startswith("label "):
            labels[token[6:]] = len(statements)
        elif token.startswith(".reg"):
            for name in token.split(None, 2)[2].split(","):
                if "<" not in name:
                    fresh += 1
                    scopes[-1][name.strip()] = f"{name.strip()}#{fresh}"
        elif token and not token.startswith("."):
            statements.append(_statement(token, scopes))
    return Program(statements, labels, [(name, kind) for kind, name in parameters])


def _statement(token: str, scopes: list[dict[str, str]]) -> Statement:
    guard = None
    if token.startswith("@"):
        name, token = token[1:].split(None, 1)
        guard = (_name(name.lstrip("!"), scopes), name.startswith("!"))
    opcode, _, rest = token.partition(" ")
    if "\t" in opcode:
        opcode, _, rest = token.partition("\t")
    operands = []
    for operand in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest):
        if operand.startswith("{"):
            operands.append([_name(part.strip(), scopes) for part in operand[1:-1].split(",")])
        elif operand.startswith("["):
            operands.append("[" + "+".join(_name(part.strip(), scopes) for part in operand[1:-1].split("+")) + "]")
        else:
            operands.append(_name(operand, scopes))
    return Statement(guard, opcode, operands)


def _name(name: str, scopes: list[dict[str, str]]) -> str:
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return name
