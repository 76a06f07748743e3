"""Kernels of a request that is worked out are compiled side by side, by threads that are gone when it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

MAX_COMPILERS = 8
"""Kernels of a request that are compiled at once; ranks of a machine compile beside each other."""


class Compilers(ThreadPoolExecutor):
    """Threads. Where none can begin, as when the interpreter ends or a process has no more, whoever asks computes."""

    def submit(self, function: Callable[[], Any], /) -> Future:  # type: ignore[override]  # all that Triton asks for
        try:
            return super().submit(function)
        except RuntimeError:
            computed: Future = Future()
            try:
                computed.set_result(function())
            except Exception as error:  # who asks for the result is told
                computed.set_exception(error)
            return computed


@contextmanager
def compiling_together(device: torch.device) -> Iterator[None]:
    """Compile what is run with `warmup` inside in threads of their own; whoever launches it waits for it alone.

    After an error or ctrl-C only what has begun is compiled.
    """
    try:
        from triton.runtime import _async_compile
    except ImportError:  # a release without it compiles one after the other
        yield
        return
    if device.type != "cuda" or _async_compile.active_mode.get() is not None:
        yield
        return
    try:
        with (
            Compilers(MAX_COMPILERS) as compilers,
            _async_compile.AsyncCompileMode(compilers, ignore_errors=True) as mode,  # who launches it is told
        ):
            try:
                yield
            except BaseException:
                compilers.shutdown(wait=False, cancel_futures=True)
                _forget_cancelled(mode)
                raise
    finally:
        _async_compile.active_mode.set(None)  # also after ctrl-C while it waits


def _forget_cancelled(mode: Any) -> None:
    """Take what was cancelled from what the end of `mode` waits for: nobody would tell it of that."""
    cancelled = [future for future in mode.raw_futures if future.cancelled()]
    mode.raw_futures = [future for future in mode.raw_futures if not future.cancelled()]
    for future in cancelled:
        mode.future_kernels[future._key].result(ignore_errors=True)  # Triton 3.9 then compiles it when it is asked for
