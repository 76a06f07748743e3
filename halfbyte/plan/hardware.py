"""What GPUs can do at most, each figure with its public source.

Rates are dense (without structured sparsity) and of one GPU; links are of one direction.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU and how it is linked to others.

    Args:
        name: as `--hardware` takes it.
        memory_GiB: what torch can allocate at most.
        hbm: bytes a second of its memory.
        flops: multiplications and additions a second by the operands' precision; without "fp8" or "fp4" those
            operands are decoded and multiplied in bf16.
        domain: GPUs that NVLink joins.
        nvlink, network: bytes a second in one direction, within the domain and beyond it.
        source: where the figures are published.
    """

    name: str
    memory_GiB: float
    hbm: float
    flops: dict[str, float]
    domain: int
    nvlink: float
    network: float
    source: str

    @property
    def multiplies_fp4(self) -> bool:
        """Whether NVFP4 operands are multiplied as they are."""
        return "fp4" in self.flops


# fp8 is absent on Hopper: halfbyte multiplies MXFP8 there as decoded bf16, as it does NVFP4.
H100 = Hardware(
    name="h100",
    memory_GiB=79.1,
    hbm=3.35 * TERA,
    flops={"bf16": 989.4 * TERA},
    domain=8,
    nvlink=450 * GIGA,
    network=50 * GIGA,
    source="NVIDIA H100 datasheet, SXM5: 3.35 TB/s, 80 GB, NVLink 900 GB/s; DGX H100: 400 Gb/s a GPU",
)
H200 = Hardware(
    name="h200",
    memory_GiB=139.8,
    hbm=4.8 * TERA,
    flops={"bf16": 989.4 * TERA},
    domain=8,
    nvlink=450 * GIGA,
    network=50 * GIGA,
    source="NVIDIA H200 datasheet, SXM: 4.8 TB/s, 141 GB, NVLink 900 GB/s; DGX H200: 400 Gb/s a GPU",
)
B200 = Hardware(
    name="b200",
    memory_GiB=178.0,
    hbm=8.0 * TERA,
    flops={"bf16": 2250 * TERA, "fp8": 4500 * TERA, "fp4": 9000 * TERA},
    domain=8,
    nvlink=900 * GIGA,
    network=50 * GIGA,
    source="NVIDIA Blackwell architecture technical brief, HGX B200: 8 TB/s, NVLink 1.8 TB/s; DGX B200: 400 Gb/s a GPU",
)
GB300 = Hardware(
    name="gb300",
    memory_GiB=260.0,
    hbm=8.0 * TERA,
    flops={"bf16": 2500 * TERA, "fp8": 5000 * TERA, "fp4": 15_000 * TERA},
    domain=72,
    nvlink=900 * GIGA,
    network=100 * GIGA,
    source="NVIDIA GB300 NVL72 product page, a 72nd of the rack: 1,080 PFLOP/s dense FP4, 576 TB/s; 800 Gb/s a GPU",
)
HARDWARE = {hardware.name: hardware for hardware in (H100, H200, B200, GB300)}


def find_hardware(name: str) -> Hardware:
    """Return the hardware called `name`.

    Raises:
        ValueError: none has that name; the message lists those that exist.
    """
    if name not in HARDWARE:
        raise ValueError(f"hardware={name!r} is not known; use one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
