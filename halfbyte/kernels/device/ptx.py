"""Whether a device function may say PTX: it asks the compiler, which knows its target (`kernels.target`)."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from halfbyte.kernels.target import CUDA


def has_ptx(_semantic: Any = None) -> tl.constexpr:
    """Say, while a kernel is compiled, whether its target has PTX; never in the interpreter, which compiles nothing."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == CUDA)


setattr(has_ptx, tl.core.TRITON_BUILTIN, True)  # evaluated by the compiler, which says what it compiles for
