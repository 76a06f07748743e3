"""Which tests of several processes belong to one worker of pytest-xdist: its own groups do nothing under pytest 9.2."""

from __future__ import annotations

FILES = ("test_fsdp_matrix.py",)
"""All of whose tests ask for what one run of ranks found."""
FAMILIES = ("test_4_bit_gather_is_bf16_gather_and_local_quantization",)
"""Whose cases of as many ranks, which their first parameter says, do."""


def unit(nodeid: str) -> str:
    """Return the name of what is run by one worker: of a test, itself, where it shares nothing."""
    path, _, case = nodeid.partition("::")
    name, _, parameters = case.partition("[")
    if path.endswith(FILES):
        return path
    return f"{path}::{name}[{parameters.partition('-')[0]}" if name in FAMILIES else nodeid
