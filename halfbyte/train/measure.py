"""What a run costs: memory at its peak, bytes saved for the backward pass, and what it ran on."""

from __future__ import annotations

import contextlib
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from halfbyte.functional.group import waited
from halfbyte.train import parallel
from halfbyte.version import __version__

RESET_PEAK = "5"
"""Written to /proc/self/clear_refs, Linux sets the process's peak resident size back to the present one (proc(5))."""


class Pace:
    """Speeds of a process between readings of the loss.

    Their median leaves out what happens once: compiling, capturing a graph, first pages of the data.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, int]] = []

    def add(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` of all ranks took `seconds`."""
        self._spans.append((tokens / seconds, tokens))

    def median(self) -> float | None:
        """Return the speed, in tokens a second, below which half of the tokens were trained; None if none was."""
        half, below = sum(tokens for _, tokens in self._spans) / 2, 0
        for speed, tokens in sorted(self._spans):
            below += tokens
            if below >= half:
                return speed
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of `peak_memory`; on a CPU only where Linux allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use since `reset_peak_memory`: tensors on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def saved_activation_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the bytes that `forward` keeps for the backward pass, parameters and buffers not counted.

    Every storage counts once and whole, however many saved tensors look at it. Nor do parameters count that FSDP2
    gathers for the forward of a module.
    """
    owned: set[int] = set()

    def own(module: nn.Module, *inputs: object) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            owned.update(part.untyped_storage().data_ptr() for part in parallel.parts(tensor))

    own(model)
    # What FSDP2 gathers for a block has no bytes after its forward; what it gathers for the rest stays.
    hooks = [model.register_forward_pre_hook(own)] if parallel.is_gathered(model) else []
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        here = waited(parallel.local(tensor.detach()))
        pointer = here.untyped_storage().data_ptr()
        if pointer not in owned:
            saved[pointer] = here  # keeps the storage alive, so that no other takes its address
        return tensor.detach()  # with its history, the graph would hold itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    for hook in hooks:
        hook.remove()
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del loss
    return total


def package_versions() -> dict:
    """Return the releases of what computes."""
    return {"python": platform.python_version(), "halfbyte": __version__, "torch": str(torch.__version__)}


def environment(device: torch.device) -> dict:
    """Return the facts of the machine that a reader of the figures needs."""
    facts = {
        **package_versions(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
    }
    return facts


def processor() -> str:
    """Return the name of the CPU, whose pace is that of small models on a GPU too."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "cpu"
