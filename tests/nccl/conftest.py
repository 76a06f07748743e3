"""Ranks with a GPU each, over NCCL: what tests/distributed and tests/scale check, which must be found, by ranks too."""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
FOLDERS = [str(TESTS / "distributed"), str(TESTS / "scale"), str(TESTS), str(TESTS.parent)]

sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]
# Processes that a forkserver starts get their path from here; asking NVML for GPUs leaves it fit to be forked.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*FOLDERS, os.environ.get("PYTHONPATH"))))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from jobs import Begun  # noqa: E402  from the path above


def pytest_addoption(parser):
    parser.addoption("--on", default="cuda", choices=("cuda", "cpu"), help="cpu: over gloo, to see that tests work")
    parser.addoption("--processes", type=int, default=max(2, os.cpu_count() - 2), help="ranks that run at once")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def begun(request):
    """What runs for the tests that were chosen and have GPUs enough."""
    device, gpus = request.config.getoption("--on"), _gpus()
    chosen = {
        item.nodeid: item.callspec.params["found"] for item in request.session.items if "begun" in item.fixturenames
    }
    jobs = {test: one for test, one in chosen.items() if device == "cpu" or one.world <= gpus}
    running = Begun(jobs, device, gpus, request.config.getoption("--processes"))
    yield running
    running.stop()


@pytest.fixture
def found(request, begun):
    """What the ranks of a test returned."""
    if request.config.getoption("--on") == "cuda" and request.param.world > _gpus():
        pytest.skip(f"needs {request.param.world} GPUs, and torch sees {_gpus()}")
    return begun.answer(request.node.nodeid)
