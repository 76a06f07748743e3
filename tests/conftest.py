"""Settings that every test needs before torch and Triton are imported."""

import datetime
import gc
import importlib.util
import os

import pytest
import sampling
import torch

if not torch.cuda.is_available():
    # Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    import fast_interpreter

    fast_interpreter.install()

# Two test processes share two cores; more threads only wait for each other.
torch.set_num_threads(1)

if importlib.util.find_spec("hypothesis"):  # tests/gpu runs on machines without it
    import hypothesis

    hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50, database=None)
    hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser):
    today = datetime.datetime.now(datetime.UTC).date()
    parser.addoption("--day", default=today.isoformat(), help="whose draw from sampled.txt and long.txt to run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    sampling.mark(items, config.getoption("--day"))


def pytest_collection_finish():
    """What tests are made of stays to the end: no collection of garbage looks at it again, a second each time."""
    gc.collect()
    gc.freeze()
