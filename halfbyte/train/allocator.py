"""What the C library does with large blocks of memory that a CPU's training frees many times a step."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt in glibc's malloc.h
_LARGEST_TRIM = 2**31 - 1
_LARGEST_MMAP = 32 << 20  # glibc refuses more


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, for its next tensors; return whether that was possible.

    glibc gives temporaries of more than 128 KiB back to the system, which hands them out again page by page, zeroed:
    thousands of faults a step of a small model (docs/internals/cpu.md). For a process of ours only, never for a user's.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _LARGEST_TRIM)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP))
