"""CONTRIBUTING.md's table of layers is that of pyproject.toml, and both are the tree's."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", re.MULTILINE)


def layers() -> list[set[str]]:
    """Return the layers of the first contract, lowest first."""
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert contract["type"] == "layers" and contract["exhaustive"]
    return [set(re.findall(r"\w+", layer)) for layer in reversed(contract["layers"])]


def table() -> list[set[str]]:
    """Return the rows of the table of layers, topmost first."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## The layers") : text.index("## How to add")]
    return [set(re.findall(r"\w+", names)) for names, about in ROW.findall(section) if about]


def test_the_table_is_that_of_the_linter():
    assert table() == layers()


def test_every_module_of_the_tree_has_a_row_and_every_row_a_module():
    package = ROOT / "halfbyte"
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    named = [name for row in table() for name in row]
    assert sorted(named) == sorted(modules - {"__init__", "version"})  # what exhaustive_ignores leaves out


def test_no_rule_names_a_module_that_is_not_there():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        for name in (*contract.get("source_modules", ()), *contract.get("modules", ())):
            path = ROOT / name.replace(".", "/")
            assert path.with_suffix(".py").is_file() or path.is_dir(), name


def test_every_folder_of_kernels_has_a_page_that_says_so():
    kernels, pages = ROOT / "halfbyte" / "kernels", ROOT / "docs" / "internals"
    texts = {page.stem: page.read_text(encoding="utf-8") for page in pages.glob("*.md")}
    for folder in sorted(path.parent for path in kernels.glob("*/__init__.py")):
        (page,) = (name for name, text in texts.items() if f"he folder `kernels/{folder.name}`" in text)
        assert f"internals/{page}.md" in (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"`(\w+\.py)`", texts["device"])
    assert sorted(named) == sorted(path.name for path in (kernels / "device").glob("*.py") if path.stem != "__init__")
