"""Tests of several processes use what tests/distributed and tests have: the folders must be found, by ranks too."""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
FOLDERS = [str(TESTS / "distributed"), str(TESTS)]

sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]
# Processes that a forkserver starts get their path from here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*FOLDERS, os.environ.get("PYTHONPATH"))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n, let a worker have all tests of what one set of processes found: another would start them again."""
    import workers
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return workers.unit(nodeid)

    return Units(config, log)
