"""Pages of the documentation as their code blocks.

    ```python   runs, in the order of the page, in one namespace of the page
    ```sh       runs, line by line
    ```text     is no code: a formula, a file, or what the block above prints if `<!-- printed -->` stands before it

`<!-- not run: REASON -->` on the line before a block keeps it from running; a python block still has to compile.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "bench/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
PRINTED = "<!-- printed -->"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its page, the line of its fence, its language, its text, and the mark on the line before it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def place(self) -> str:
        return f"{name(self.page)}:{self.line}"

    @property
    def reason(self) -> str:
        """Why it is not run; "" if it is."""
        found = NOT_RUN.fullmatch(self.mark)
        return found.group(1) if found else ""

    @property
    def is_printed(self) -> bool:
        return self.mark == PRINTED


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    source = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(source):
        before = source[: fence.start()].rstrip().splitlines()
        text = "\n".join(line.removeprefix(fence.group(1)) for line in fence.group(3).splitlines()) + "\n"
        mark = before[-1].strip() if before and before[-1].strip().startswith("<!--") else ""
        line = source.count("\n", 0, fence.start()) + 1
        found.append(Block(page=page, line=line, language=fence.group(2), text=text, mark=mark))
    return found


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block: its lines without comments, those that end in a backslash joined."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines) if line]


ALL = [block for page in PAGES for block in blocks(page)]
