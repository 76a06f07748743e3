"""The site builds without a warning, documents every public name, and every link of the pages leads somewhere."""

import re
import runpy
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown.extensions.toc import slugify
from pages import PAGES, ROOT, name

import halfbyte as hb

FENCES = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULES = {
    "halfbyte": hb,
    "halfbyte.nn": hb.nn,
    "halfbyte.distributed": hb.distributed,
    "halfbyte.export": hb.export,
    "halfbyte.stats": hb.stats,
    "halfbyte.tensor": hb.tensor,
}
PAGES_OF_THEIR_OWN = {"__version__", "distributed", "export", "layout", "nn", "stats"}
"""Public names that are a version or a module whose members are documented one by one."""


class Page(HTMLParser):
    """The ids of a page and the addresses that it links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found["id"]} if found.get("id") else set()
        self.links += [value for key in ("href", "src") if (value := found.get(key))]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return the folder of a site that was built with every warning an error (--quiet would let warnings pass)."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def parsed(site) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def missing(address: str, page: Path, pages: dict[Path, Page]) -> bool:
    """Whether a page of the site, a file or an anchor that an address names is not there."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
        return False
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return True
    return bool(parts.fragment) and target in pages and unquote(parts.fragment) not in pages[target].ids


def test_every_link_of_the_site_leads_somewhere(parsed):
    assert len(parsed) == len([page for page in PAGES if ROOT / "docs" in page.parents])
    wrong = {
        f"{path.parent.name}: {link}"
        for path, page in parsed.items()
        for link in page.links
        if missing(link, path, parsed)
    }
    assert not wrong


def test_every_public_name_is_documented(site):
    """In objects.inv, what other sites link to."""
    inventory = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]
    documented = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    public = {f"{path}.{item}" for path, module in MODULES.items() for item in module.__all__}
    same = {"halfbyte.tensor.QuantTensor": "halfbyte.QuantTensor"}  # one object under two names
    for path in ("tensor", "nn", "stats"):
        same |= {
            f"halfbyte.{path}.{item}": f"halfbyte.{item}"
            for item in MODULES[f"halfbyte.{path}"].__all__
            if item in hb.__all__
        }
    left = {same.get(item, item) for item in public} - documented
    assert left == {f"halfbyte.{item}" for item in PAGES_OF_THEIR_OWN}
    assert {f"halfbyte.recipes.{preset}" for preset in hb.recipes.PRESETS} <= documented


def anchors(page: Path) -> set[str]:
    text = FENCES.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {slugify(re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading), "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_the_repository_lead_somewhere(page):
    """Relative ones, as they stand in the sources; of others only that they are https."""
    for address in LINK.findall(FENCES.sub("", page.read_text(encoding="utf-8"))):
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            assert parts.scheme == "https" and parts.netloc, address
            continue
        target = page.parent / parts.path if parts.path else page
        assert target.exists(), address
        assert not parts.fragment or parts.fragment in anchors(target), address


class TestItself:
    def test_a_link_into_nothing_is_found(self, tmp_path):
        one, two = tmp_path / "one.html", tmp_path / "two.html"
        one.write_text('<h1 id="a">x</h1><a href="two.html#b">y</a><img src="absent.png">')
        two.write_text('<h1 id="b">x</h1><a href="one.html#c">y</a><a href="https://example.org/">z</a>')
        pages = {path: Page(path) for path in (one, two)}
        assert [link for path, page in pages.items() for link in page.links if missing(link, path, pages)] == [
            "absent.png",
            "one.html#c",
        ]

    def test_anchors_are_those_of_headings_outside_of_code(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text("# A `b` c\n\n```sh\n# no heading\n```\n\n## torch.compile, and [x](y)\n")
        assert anchors(page) == {"a-b-c", "torchcompile-and-x"}

    def test_parameters_that_share_a_text_are_documented_one_by_one(self):
        split = runpy.run_path(str(ROOT / "docs" / "split_parameters.py"))["split"]
        text = "It does.\n\nArgs:\n    a, b: text\n        that goes on.\n    c: d, e: f.\n\nReturns:\n    x, y: z."
        alone = "    a: text\n        that goes on.\n    b: text\n        that goes on.\n    c: d, e: f.\n"
        assert split(text) == f"It does.\n\nArgs:\n{alone}\nReturns:\n    x, y: z."
