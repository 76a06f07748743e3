"""What kernels are launched for, as a value: which GPU it is and what it has. The only place that asks the machine.

Recordings (`record`) say another one: they launch for GPUs that are not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

CUDA, HIP, NOTHING = "cuda", "hip", "interpreter"
"""What Triton compiles with: NVIDIA's backend, AMD's, or nothing."""

OLDEST = 80
STOCHASTIC_CAPABILITIES = (100, 103)
TMA_CAPABILITIES = range(90, 120)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU, or Triton's interpreter.

    Args:
        name: as "sm_90", "gfx942".
        backend: CUDA, HIP or NOTHING, which is interpreted. Device functions ask the compiler the same (`device.ptx`).
        warp: threads of a warp.
        capability: of an NVIDIA GPU, 90 for sm_90; 0 for others.
        multiprocessors: how many it has; AMD says compute units.
        fp8: kernels use its conversions to FP8.
        pdl: kernels take their places while the kernel before drains (`device.overlap`).
        e2m1: kernels use its conversion to E2M1, nearest even.
        stochastic_e2m1: it has one that rounds by random bits; `halfbyte verify` compares it, nothing uses it.
        fp4_products: tensor cores multiply FP4 (`gemm.native`).
        tma: GEMMs read by tensor maps. Not on sm_120, whose shared memory is too small for their tiles.
    """

    name: str
    backend: str
    warp: int = 32
    capability: int = 0
    multiprocessors: int
    fp8: bool = False
    pdl: bool = False
    e2m1: bool = False
    stochastic_e2m1: bool = False
    fp4_products: bool = False
    tma: bool = False

    @property
    def ptx(self) -> bool:
        """Whether kernels say in PTX what Triton has no word for; everywhere else they are portable."""
        return self.backend == CUDA

    @property
    def level(self) -> int:
        """Up to which capability kernels use what it has: 100 with E2M1, 90 with `pdl`, 89 with FP8, else 0."""
        return 100 if self.e2m1 else 90 if self.pdl else 89 if self.fp8 else 0

    @property
    def interpreter(self) -> bool:
        """Whether operations are computed one by one on the host, which makes large tiles the fast ones."""
        return self.backend == NOTHING

    @property
    def problem(self) -> str | None:
        """Say why kernels are not chosen here by themselves, and what to do; None where they are."""
        if self.ptx:
            return f"{self.name} is older than sm_{OLDEST}" if self.capability < OLDEST else None
        if self.backend == HIP:
            compiled = f"the kernels compile ({', '.join(AMD)}) but on which"
            if self.name not in AMD:
                compiled = f"nobody has compiled the kernels, as for {' and '.join(AMD)}, and on which"
            return (
                f"{self.name} is an AMD GPU, for which {compiled} nobody has compared their bytes: run `halfbyte "
                "verify --force`, and where it passes give backend='portable'"
            )
        return None


def nvidia(capability: int, multiprocessors: int) -> Target:
    """Return an NVIDIA GPU by its compute capability."""
    return Target(
        name=f"sm_{capability}",
        backend=CUDA,
        multiprocessors=multiprocessors,
        capability=capability,
        fp8=capability >= 89,
        pdl=capability >= 90,
        e2m1=capability >= 100,
        fp4_products=capability >= 100,
        stochastic_e2m1=capability in STOCHASTIC_CAPABILITIES,
        tma=capability in TMA_CAPABILITIES,
    )


def amd(name: str, multiprocessors: int) -> Target:
    """Return an AMD GPU by its architecture, gfx942 for one: nothing that it alone has is used.

    Raises:
        ValueError: that is none.
    """
    if not (name.startswith("gfx") and name[3:-2].isdecimal()):
        raise ValueError(
            f"torch {torch.__version__} calls the architecture of this AMD GPU {name!r}, where names such as gfx942 "
            "tell what it has: install a torch for it, or give backend='reference'"
        )
    # gfx10 and later are RDNA, whose warps have 32 threads; the last two letters are no part of the generation.
    return Target(name=name, backend=HIP, multiprocessors=multiprocessors, warp=64 if int(name[3:-2]) < 10 else 32)


AMD = ("gfx942", "gfx950")
"""Architectures that launches are recorded and compiled for: MI300, MI355."""

INTERPRETER = Target(name="interpreter", backend=NOTHING, multiprocessors=4, tma=True)
"""Few programs, which share work as on a GPU; tensor maps are interpreted, so that the tests reach their kernels."""


def find(device: torch.device) -> Target:
    """Return the GPU at `device`, a CUDA device: torch calls AMD's so too.

    `torch.compile` looks into this function, so it keeps nothing.
    """
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return amd(facts.gcnArchName.split(":")[0], facts.multi_processor_count)
    return nvidia(10 * facts.major + facts.minor, facts.multi_processor_count)


_assumed: ContextVar[Target | None] = ContextVar("assumed target", default=None)


@lru_cache(maxsize=64)
def _target_of(device: torch.device) -> Target:
    from halfbyte.kernels.device.decode import INTERPRETED  # imports Triton

    if INTERPRETED:
        return INTERPRETER
    if device.type != "cuda":
        raise ValueError(f"device {device}: Triton kernels run on a GPU; TRITON_INTERPRET=1 interprets them on a CPU")
    return find(device)


def target_of(device: torch.device) -> Target:
    """Return what kernels on `device` are launched for.

    Raises:
        ValueError: no kernel runs there.
    """
    return _assumed.get() or _target_of(device)


@contextmanager
def assumed(target: Target) -> Iterator[None]:
    """Let every launcher choose for `target`, whatever the device: for recordings."""
    token = _assumed.set(target)
    try:
        yield
    finally:
        _assumed.reset(token)
