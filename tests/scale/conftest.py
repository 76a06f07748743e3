"""Tests of several processes use what tests/distributed and tests have: the folders must be found, by ranks too."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
FOLDERS = [str(TESTS / "distributed"), str(TESTS)]

sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]
# Processes that a forkserver starts get their path from here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*FOLDERS, os.environ.get("PYTHONPATH"))))
