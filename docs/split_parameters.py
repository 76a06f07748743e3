"""For the API reference: `a, b: text` under Args documents two parameters, each with its own type and default."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SECTION = re.compile(r"^( *)Args:\n((?:\1 +.*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^( *)((?:\*{0,2}\w+, )+\*{0,2}\w+)(:.*\n(?:\1 +.*\n)*)", re.MULTILINE)


def split(docstring: str) -> str:
    """Return a docstring in which every parameter has an entry of its own; those of one entry share its text."""

    def entries(found: re.Match[str]) -> str:
        indent, names, text = found.groups()
        return "".join(f"{indent}{name}{text}" for name in names.split(", "))

    def section(found: re.Match[str]) -> str:
        return found.group(0).replace(found.group(2), ENTRY.sub(entries, found.group(2)))

    return SECTION.sub(section, docstring + "\n").removesuffix("\n")


class SplitParameters(Extension):
    """Splits the docstrings of what griffe collects."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = split(obj.docstring.value)
