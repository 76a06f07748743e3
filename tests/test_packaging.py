"""What the package says of itself agrees: version, licence, and the versions that it claims with those that ran."""

import re
import tomllib
from pathlib import Path

import pytest

from halfbyte import cli
from halfbyte.version import __version__

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def machines() -> list[str]:
    """Return the versions of every row of docs/hardware.md's table of machines that ran `halfbyte verify`."""
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    section = page[page.index("## Machines that ran it") : page.index("## Machines that have not run it")]
    return [line.split("|")[2] for line in section.splitlines() if "fingerprint" not in line and line.count("|") > 3][
        1:
    ]


def test_only_python_versions_that_ran_are_claimed():
    ran = {found.group(1) for row in machines() if (found := re.search(r"Python (3\.\d+)", row))}
    claimed = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert claimed and claimed <= ran
    assert PROJECT["requires-python"] == f">={min(claimed, key=lambda v: int(v.split('.')[1]))}"


def test_the_least_torch_is_one_that_ran():
    ran = {found.group(1) for row in machines() if (found := re.search(r"torch (\d+\.\d+)", row))}
    (least,) = re.findall(r"torch>=(\S+?)\"", str(PROJECT["dependencies"]).replace("'", '"'))
    assert least in ran


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["cff-version"] == "1.2.0" and citation["title"] and citation["authors"] and citation["message"]


def test_the_page_on_citing_says_what_the_file_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    page = (ROOT / "docs" / "citing.md").read_text(encoding="utf-8")
    entry = dict(re.findall(r"^  (\w+) += \{+(.*?)\}+,?$", page, re.MULTILINE))
    assert (entry["title"], entry["version"], entry["license"]) == tuple(
        citation[key] for key in ("title", "version", "license")
    )
    assert entry["author"] == citation["authors"][0]["name"]


def test_the_changelog_begins_with_this_version():
    heading = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    assert re.fullmatch(rf"{re.escape(__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading)


def test_the_version_is_semantic():
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", __version__)


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md")), ids=lambda form: form.stem)
def test_forms_have_a_head_and_name_commands_that_exist(form):
    _, head, body = form.read_text(encoding="utf-8").split("---\n", 2)
    assert set(yaml.safe_load(head)) == {"name", "about", "labels"}
    assert set(re.findall(r"`halfbyte (\w+)", body)) <= set(cli.COMMANDS)


@pytest.mark.parametrize("page", ["RELEASING.md", "SECURITY.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_pages_name_targets_of_make_and_files_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"".join(found) for found in re.findall(r"`make ([\w-]+)|^make ([\w-]+)", text, re.MULTILINE)} <= {*targets}
    for path in re.findall(r"`((?:docs|halfbyte|tests|\.github)/[\w./]+)`|\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / "".join(path)).exists(), path
