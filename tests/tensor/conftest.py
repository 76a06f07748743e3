"""A torch function that falls back where a test does not expect it is an error."""

import warnings

import pytest

from halfbyte.tensor import DequantizeWarning
from halfbyte.tensor.aten import _warn_once


@pytest.fixture(autouse=True)
def _warn_again():
    """Let every test see its own first warning of each function."""
    _warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DequantizeWarning)
        yield
