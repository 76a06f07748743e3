"""Every code block of the documentation runs, on a CPU and small; those that do not say why, and are counted."""

import contextlib
import gzip
import io
import json
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from pages import ALL, PAGES, ROOT, Block, blocks, commands, name

from halfbyte import cli

MOST_NOT_RUN = 14
"""Raise it only with a reason that holds for everybody: a GPU, a package that is not there, minutes of time."""
SMALL = "--steps 2 --sequence 32 --batch 2 --eval-batches 1 --warmup 0 --decay 0 --tokenizer bytes --device cpu"
"""What is added to `halfbyte train` and `halfbyte compare`: the last value of an option counts."""
TEXT = "A page of text that the commands of the documentation train on, twice over and once more.\n" * 200
LANGUAGES = ("python", "sh", "text")
LOOKS_LIKE_CODE = re.compile(
    r"^(import \w|from \w+(\.\w+)* import|halfbyte \w|make \w|pip install|.*\bhb\.\w+\()", re.M
)


def has(language: str) -> list[Path]:
    return [page for page in PAGES if any(b.language == language and not b.reason for b in blocks(page))]


def run_python(block: Block, namespace: dict) -> str:
    """Run a block and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + block.text, name(block.page), "exec"), namespace)  # our own pages
    return printed.getvalue()


def as_pattern(text: str) -> str:
    """Return what matches printed text in which a line of three dots stands for any lines."""
    lines = (
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(line.rstrip()) + r" *\n" for line in text.splitlines()
    )
    return "".join(lines)


@pytest.mark.parametrize("page", has("python"), ids=name)
def test_python_runs_in_the_order_of_the_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # a page may read what the repository holds there
    namespace: dict = {"__name__": "docs"}
    printed = ""
    with torch._dynamo.config.patch(recompile_limit=8):
        for block in blocks(page):
            if block.language == "python" and not block.reason:
                printed = run_python(block, namespace)
            elif block.is_printed:
                assert re.fullmatch(as_pattern(block.text), printed), f"{block.place}: it prints\n{printed}"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with the texts that commands of the documentation name."""
    for texts in ("texts", "my_texts"):
        (tmp_path / texts).mkdir()
        (tmp_path / texts / "page.txt").write_text(TEXT)
    with gzip.open(tmp_path / "wiki.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": TEXT}) + "\n" for _ in range(3))
    pyarrow.parquet.write_table(pyarrow.table({"story": [TEXT, TEXT]}), tmp_path / "stories.parquet")
    return tmp_path


def run_command(line: str) -> int:
    """Run a command of halfbyte, made small, and return its exit status."""
    program, *arguments = shlex.split(line)
    assert Path(program).name == "halfbyte", f"{line}: only commands of halfbyte run here; mark the block `not run`"
    if arguments[:1] in (["train"], ["compare"]):
        arguments += SMALL.split() if "--model" in arguments else [*SMALL.split(), "--model", "tiny"]
    try:
        return cli.main(arguments)
    except SystemExit as stop:  # --help
        return stop.code or 0


@pytest.mark.parametrize("page", has("sh"), ids=name)
def test_shell_commands_run(page, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for block in blocks(page):
        for line in commands(block) if block.language == "sh" and not block.reason else ():
            assert run_command(line) == 0, f"{block.place}: {line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_blocks_say_what_they_are(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: {block.language!r} is none of {LANGUAGES}"
        assert block.language != "text" or not LOOKS_LIKE_CODE.search(block.text), f"{block.place}: code called text"
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_commands_of_make_exist():
    """They are what continuous integration itself runs, so they are marked; their names are looked up."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line for block in ALL if block.language == "sh" for line in commands(block) if line.startswith("make ")]
    assert lines and {line.split()[1] for line in lines} <= {*targets}


def test_few_blocks_are_not_run():
    left = [block for block in ALL if block.reason]
    assert len(left) <= MOST_NOT_RUN, [block.place for block in left]
    assert all(len(block.reason.split()) >= 3 for block in left)


class TestItself:
    """The collector sees what it should, and a block that fails fails."""

    def page(self, tmp_path, text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    def test_marks_languages_and_lines(self, tmp_path):
        text = "a\n\n```python\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n```sh\nmake a  # b\nb \\\n  c\n```\n"
        python, shell = blocks(self.page(tmp_path, text))
        assert (python.language, python.text, python.line, python.reason) == ("python", "x = 1\n", 3, "")
        assert (shell.language, shell.reason, commands(shell)) == ("sh", "needs a GPU", ["make a", "b c"])

    def test_an_indented_block_is_a_block(self, tmp_path):
        (block,) = blocks(self.page(tmp_path, "- item\n\n    ```python\n    x = 1\n    ```\n"))
        assert block.text == "x = 1\n"

    @pytest.mark.parametrize("text", ["1 / 0", "assert False", "absent"])
    def test_a_wrong_block_fails(self, tmp_path, text, monkeypatch):
        monkeypatch.setattr("test_blocks.name", str)
        (block,) = blocks(self.page(tmp_path, f"```python\n{text}\n```\n"))
        with pytest.raises((ZeroDivisionError, AssertionError, NameError)):
            run_python(block, {})

    def test_printed_text_is_compared(self):
        assert re.fullmatch(as_pattern("a\n...\nc"), "a  \nb\nb\nc\n")
        assert not re.fullmatch(as_pattern("a\n...\nc"), "a\nb\nd\n") and not re.fullmatch(as_pattern("a.b"), "acb\n")

    @pytest.mark.parametrize("text", ["import halfbyte", "y = hb.quantize(x)", "halfbyte env", "pip install x"])
    def test_code_is_known_as_code(self, text):
        assert LOOKS_LIKE_CODE.search(text)
