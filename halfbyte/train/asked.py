"""Options of the command line as dataclasses. What cannot be used is one line, as all that the commands refuse.

tyro draws a box of several lines, which wraps at 80 columns, and exits; every rank of a torchrun would draw its own.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Options = TypeVar("Options")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
BOX = "╭╮╰╯│─- "
OWN_CHECK = re.compile(r"Error parsing (?!-)[\w.]+: ")
"""Before what a dataclass said of its values; its field is of no use to who typed an option."""
PATHS = ConstructorRegistry()


@PATHS.primitive_rule
def path_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """Read paths as tyro does, but for "", which `Path` takes for the folder that the command runs in."""
    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=_path,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def _path(texts: list[str]) -> Path:
    if not texts[0].strip():
        raise ValueError("the path is empty, as a variable of a shell is that nothing set; . is the folder here")
    return Path(texts[0])


def read_options(read: Callable[[], Options], prog: str) -> Options:
    """Return the options that the arguments of a command say.

    Args:
        read: calls `tyro.cli`.
        prog: how the command is called.

    Raises:
        ValueError: an option or its value cannot be used.
        SystemExit: help was asked for.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), PATHS:
            found = read()
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(said.getvalue(), prog)) from None
    sys.stderr.write(said.getvalue())
    return found


def _one_line(box: str, prog: str) -> str:
    """Return what a box of tyro's says: below its title, above the help of the argument and the footer."""
    lines = _whole_words(COLOURS.sub("", box).splitlines())
    first = next(at for at, line in enumerate(lines) if line) + 1
    while not lines[first]:
        first += 1
    text = " ".join(lines[first : lines.index("", first)])
    own = OWN_CHECK.match(text)
    return text[own.end() :] if own else f"{text.rstrip('.')}; {prog} --help says what can be given"


def _whole_words(box: list[str]) -> list[str]:
    """Return the lines of a box without its frame, empty ones for rules; what was cut at its edge is whole again."""
    inside = [line.strip(BOX.replace("-", "")) for line in box]
    width = max(len(line.strip("│ ")) for line in box if not line.strip("│ ─-"))
    lines, is_cut = [""], False
    for line in [line if line.strip(BOX) else "" for line in inside]:
        together = len(lines[-1].rpartition(" ")[2]) + len(line.partition(" ")[0])
        lines = [*lines[:-1], lines[-1] + line] if is_cut and together > width else [*lines, line]
        is_cut = len(line) == width
    return lines
