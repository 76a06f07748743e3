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


SOURCES = {
    "h100": "NVIDIA H100 datasheet, SXM5: 3.35 TB/s, 80 GB, NVLink 900 GB/s; DGX H100: 400 Gb/s a GPU",
    "h200": "NVIDIA H200 datasheet, SXM: 4.8 TB/s, 141 GB, NVLink 900 GB/s; DGX H200: 400 Gb/s a GPU",
    "b200": "NVIDIA Blackwell architecture technical brief, HGX B200: 8 TB/s, NVLink 1.8 TB/s; DGX B200: 400 Gb/s each",
    "gb300": "NVIDIA GB300 NVL72 product page, a 72nd of the rack: 1,080 PFLOP/s dense FP4, 576 TB/s; 800 Gb/s a GPU",
}


def _gpu(
    name: str, memory_GiB: float, hbm: float, tera: dict[str, float], domain: int, links: tuple[int, int]
) -> Hardware:
    """Return a GPU from figures as they are published: TB/s, TFLOP/s, GB/s of NVLink and of the network."""
    nvlink, network = (rate * GIGA for rate in links)
    flops = {precision: rate * TERA for precision, rate in tera.items()}
    rates = {"hbm": hbm * TERA, "flops": flops, "nvlink": nvlink, "network": network}
    return Hardware(name=name, memory_GiB=memory_GiB, domain=domain, source=SOURCES[name], **rates)


# fp8 is absent on Hopper: halfbyte multiplies MXFP8 there as decoded bf16, as it does NVFP4.
H100 = _gpu("h100", 79.1, 3.35, {"bf16": 989.4}, 8, (450, 50))
H200 = _gpu("h200", 139.8, 4.8, {"bf16": 989.4}, 8, (450, 50))
B200 = _gpu("b200", 178.0, 8.0, {"bf16": 2250, "fp8": 4500, "fp4": 9000}, 8, (900, 50))
GB300 = _gpu("gb300", 260.0, 8.0, {"bf16": 2500, "fp8": 5000, "fp4": 15_000}, 72, (900, 100))
HARDWARE = {hardware.name: hardware for hardware in (H100, H200, B200, GB300)}


def find_hardware(name: str) -> Hardware:
    """Return the hardware called `name`.

    Raises:
        ValueError: none has that name; the message lists those that exist.
    """
    if name not in HARDWARE:
        raise ValueError(f"hardware={name!r} is not known; use one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
