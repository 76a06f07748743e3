"""Several processes share the GPU tests: most of the time goes into compiling, one kernel at a time in a process."""

from zlib import crc32


def pytest_addoption(parser):
    parser.addoption("--share", default="0/1", help="I/N: run the tests that fall to share I of N (tests/gpu/run.py)")


def pytest_collection_modifyitems(config, items):
    index, count = map(int, config.getoption("--share").split("/"))
    kept = [item for item in items if crc32(item.nodeid.encode()) % count == index]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
