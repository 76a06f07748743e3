"""The wheel and the sdist build, hold what they should, and work in an empty environment: `make test-package`.

`python -m build` makes the wheel from the unpacked sdist, so a file that the sdist lacks is one that the wheel lacks.
The installed package runs outside of the checkout, in interpreters that see no PYTHONPATH.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from halfbyte.version import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = ("matplotlib", "numpy", "rich", "tensorboard", "tokenizers", "tyro")
"""What the core must not bring along; `halfbyte[train]` does."""


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Run a command and return what it prints, both streams; `status` is the exit status to expect."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    printed = done.stdout + done.stderr
    assert done.returncode == status, printed
    return printed


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return a folder with a fresh sdist and the wheel made from it.

    They are built from a copy: an *.egg-info of before lists files that no rule includes any longer, and setuptools
    believes it.
    """
    out = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "halfbyte"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "site", "runs"))
    run(sys.executable, "-m", "build", "--outdir", out, source, cwd=out)
    return out


class Environment:
    """A virtual environment that begins with pip alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)

    def install(self, wheel: Path, extra: str) -> None:
        options = ("--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt")
        self.python("-m", "pip", "install", *options, f"{wheel}{extra}")
        self.python("-m", "pip", "check")

    def python(self, *arguments: str | Path) -> str:
        return run(self.bin / "python", "-I", *arguments, cwd=self.folder)  # -I: no PYTHONPATH, no current folder

    def halfbyte(self, *arguments: str, status: int = 0) -> str:
        return run(self.bin / "python", "-I", self.bin / "halfbyte", *arguments, cwd=self.folder, status=status)


@pytest.fixture(scope="module")
def core(built, tmp_path_factory) -> Environment:
    """Return an environment with the wheel and what it depends on."""
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(only(built, "*.whl"), "")
    return environment


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "halfbyte").rglob("*.py")}
    assert names == sources | {"halfbyte/py.typed"}


def test_the_sdist_has_the_documents_of_a_release(built):
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "constraints.txt"} <= names
    assert not [name for name in names if name.startswith(("tests", "bench", "docs", ".ci"))]


def test_what_the_wheel_says_of_itself(built):
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(path).decode())
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert (metadata["Name"], metadata["Version"]) == ("halfbyte", __version__)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    core = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.split(r"[^\w]", line)[0] for line in core] == ["torch", "triton"]


def test_the_core_runs_and_brings_no_extra(core):
    code = f"""
import importlib.util, json, halfbyte as hb, torch
q = hb.quantize(torch.arange(16) / 8, hb.NVFP4())
found = [name for name in {EXTRAS!r} if importlib.util.find_spec(name)]
print(json.dumps([hb.__file__, hb.__version__, q.qdata.tolist(), found]))
"""
    file, version, codes, found = json.loads(core.python("-c", code).splitlines()[0])
    assert core.folder in Path(file).parents and version == __version__ and not found
    assert bytes(codes[0]).hex() == "1022435465667677"  # docs/numerics.md, section 10
    assert "backend reference: runs here" in core.halfbyte("env")
    assert core.halfbyte("verify").count("PASSED in") == 1
    assert core.halfbyte("--version").splitlines()[0] == f"halfbyte {__version__}"  # torch warns below: it has no numpy
    assert "pip install 'halfbyte[train]'" in core.halfbyte("train", status=2)


def test_the_extra_trains(core, built):
    core.install(only(built, "*.whl"), "[train]")
    small = ("--preset", "tiny", "--steps", "3")
    assert "nvfp4: held-out loss" in core.halfbyte("train", *small, "--out", "run")
    assert "losses.png" in core.halfbyte("compare", *small, "--recipes", "bf16,nvfp4", "--out", "compared")
    assert (core.folder / "compared" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_newcomers_path(core, built):
    """The wheel with transformers: a model is converted, trained for 50 steps, exported, loaded, and writes."""
    core.install(only(built, "*.whl"), "[transformers]")
    script = core.folder / "finetune_transformers.py"
    shutil.copy(ROOT / "examples" / script.name, script)
    printed = core.python(script)
    before, after, loaded = map(float, re.search(r"loss before (\S+), after (\S+), loaded (\S+)\n", printed).groups())
    assert loaded == after < before - 1.5 and "\ndef main(" in printed
    assert ": 0 % of the quantized bytes differ from the trained ones" in printed


def test_its_types_are_seen_by_a_checker(core):
    """The checker reads the installed package, finds `py.typed` and knows what a function returns."""
    source = core.folder / "typed.py"
    source.write_text(
        "import halfbyte as hb\n\nwrong: int = hb.recipes.nvfp4()\nright: hb.Recipe = hb.recipes.nvfp4()\n"
    )
    checker = (
        sys.executable,
        "-m",
        "pyrefly",
        "check",
        "--preset",
        "default",
        "--python-interpreter-path",
        core.bin / "python",
        source,
    )
    printed = run(*checker, cwd=core.folder, status=1)
    assert "`Recipe` is not assignable to `int`" in printed and "1 error" in printed
