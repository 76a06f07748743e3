"""Several processes share the GPU tests: most of the time goes into compiling, one kernel at a time in a process."""

import re
import time
from pathlib import Path
from urllib.parse import quote
from zlib import crc32

import pytest

NEEDS_GPU = "needs a CUDA GPU, and torch sees none"
RAN = pytest.StashKey[bool]()
SLOW_FIRST = ("auto", "grouped", "graphs", "fused", "transient", "quantize")
"""Files in the order of what their kernels take to compile; the others follow."""
LONG = (
    "test_golden[edge_nvfp4-",
    "test_figures_are_those_of_the_cpu[",
    "test_row_col[",
    "test_recomputing_everything_changes_no_loss",
    "test_a_schedule_is_compiled_and_captured_again",
)
"""Tests that take minutes where nothing is compiled: begun last, they would be waited for."""
LONGEST = 200  # characters of the name of a file that claims a test; file systems take 255
SAME_KERNELS = ("shape", "groups")
"""Parameters that choose no other kernels: tests that differ in these alone run in one process."""


def pytest_addoption(parser):
    parser.addoption("--claims", help="a folder that processes share: each runs what none has claimed (run.py)")


def _work(item: pytest.Function) -> str:
    """Name the tests that use the same kernels."""
    name = f"{item.path.stem}-{item.name}"
    for parameter in SAME_KERNELS:
        value = getattr(item, "callspec", None) and item.callspec.params.get(parameter)
        name = re.sub(rf"(?<=[\[-]){value if isinstance(value, str) else parameter + '[0-9]+'}(?=[\]-])", "", name)
    name = quote(name, safe="")
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{crc32(name.encode()):08x}"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--claims") is None and not _sees_gpu():  # run.py asked before it started processes
        for item in items:
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))
    if config.getoption("--claims"):
        order = {f"test_gpu_{name}": place for place, name in enumerate(SLOW_FIRST)}

        # What stands together in a file is much alike: in this order processes seldom compile the same at once.
        def place(item: pytest.Function) -> tuple[bool, int, int]:
            is_long = item.name.startswith(LONG)
            return not is_long, order.get(item.path.stem, len(order)), crc32(_work(item).encode())

        items.sort(key=place)


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if report.when == "call" and not report.skipped:
        item.stash[RAN] = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Run what no other process has claimed; each test ends alone, since which one follows is not known before."""
    folder, claimed = session.config.getoption("--claims"), set()
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None
    for item in session.items:
        work = _work(item)
        if work not in claimed:
            try:
                Path(folder, work).touch(exist_ok=False)
            except FileExistsError:
                continue
            claimed.add(work)
        start = time.monotonic()
        with Path(folder, work).open("a") as record:  # run.py reads what runs and what took long
            record.write(f"{item.nodeid}\t")
            record.flush()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            record.write(f"{time.monotonic() - start:.1f}\t{'ran' if item.stash.get(RAN, False) else 'skipped'}\n")
        if session.shouldfail or session.shouldstop:
            break
    return True
