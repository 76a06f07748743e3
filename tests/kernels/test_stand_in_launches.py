"""Repeated launches pass the driver what Triton's own do: grid, flags and every byte of every argument."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import triton

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def given(folder: Path, beside: list[Path], script: str = "stand_in_launches.py") -> dict:
    """Run a script with what comes first on the path; return what it prints."""
    include = next(path for path in (*beside, Path(triton.__file__).parents[1]) if (path / "triton").is_dir())
    library = folder / "libcuda.so.1"
    build = ["gcc", "-shared", "-fPIC", "-O1", "-I", str(include / "triton/backends/nvidia/include")]
    subprocess.run([*build, "-o", str(library), str(HERE / "stand_in_driver.c")], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join(map(str, (*beside, ROOT))),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, str(HERE / script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict) -> None:
    assert found["supported"]
    assert set(found["given"]) == {f"{case}, watched={n}" for case in ("mixed", "described") for n in (0, 1)}
    for case, (own, again) in found["given"].items():
        assert again == own, case
        grid, block = own["words"][:3], own["words"][3:6]
        assert (grid, block) == (([3, 2, 1], [64, 1, 1]) if "mixed" in case else ([5, 1, 1], [128, 1, 1])), case
        assert own["words"][7] == 77 and len(own["params"]) > 2 * 40, case


def test_this_triton(tmp_path):
    found = given(tmp_path, [])
    assert found["triton"] == triton.__version__
    check(found)


def test_kernels_of_a_request_are_compiled_side_by_side(tmp_path):
    check_together(given(tmp_path, [], "compiling_together.py"))


def check_together(found: dict) -> None:
    assert found["together"] == "none"  # each of two waited until the other was being compiled as well
    assert found["launches"] == [2, 4]  # worked out, then repeated
    assert "no size is negative" in found["wrong"] and found["stopped"] == "KeyboardInterrupt: "
    assert found["after both"], "kernels of others would wait for compilers that are gone"
    assert found["first wrong"] == "ValueError: the first of them"
    assert found["begun"] < 24, "an error is heard before the rest is compiled"
    assert found["parsing"] == 1
    assert found["again"] == found["at the end"] == "none"
