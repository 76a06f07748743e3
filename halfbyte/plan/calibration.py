"""Measured constants of the step time: what of a GPU's peaks kernels reach, each with the record that says so.

All come from one H200 (`bench/results`); other GPUs are assumed to reach the same shares of their own peaks.
`tests/plan/test_plan_time.py` computes every value from its records again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A measured number.

    Args:
        value: as used, in units of the H200.
        record: time and commit of the file in bench/results; ASSUMED for an assumption, which `means` then says.
        means: what it is.
    """

    value: float
    record: str
    means: str

    @property
    def date(self) -> str:
        """Year, month and day of the measurement."""
        return f"{self.record[:4]}-{self.record[4:6]}-{self.record[6:8]}" if self.record else ""


STEPS, KERNELS = "20261121T214910-1b13719473", "20261121T184154-b024189928"
EXPERTS, SHARDED = "20261121T235123-a45ff07e79", "20261121T153223-f5ecbed4af"
FSDP2, MIXTURES = "20261127T060438-4e0f5ff", "20261127T164355-70dfffc"
COMPILED, COMPILED_SMALL = "20261129T203933-69d19d8c", "20261129T203746-69d19d8c"  # of 1b and of 300m
ASSUMED = ""

BF16_SHARE = Constant(0.8078, STEPS, "of the dense bf16 peak, GEMM of 8192 x 8192 x 8192; fp8, fp4 of theirs: assumed")
COPY_SHARE = Constant(0.8836, STEPS, "of the memory's bandwidth, copying 1 GiB; kernels that move bytes: and a tail")
TAIL = Constant(4.2e-6, KERNELS, "seconds of a kernel beside its bytes: quantize/1x16, 8192 x 8192 twice less 16384")
STOCHASTIC = Constant(7.09e11, KERNELS, "elements a second, drawn or rotated (row_col/sr+sr-rht, 16384 x 8192)")
GROUP_RAMP = Constant(170.0, EXPERTS, "tokens of an expert at which its GEMMs reach half of a dense one's rate (bf16)")
NVLINK_SHARE = Constant(0.606, SHARDED, "of one direction of NVLink, 5.8 GB gathered over 4 GPUs, nothing beside it")
ATTENTION_SHARE = Constant(0.35, ASSUMED, "of the dense bf16 peak in causal attention, forward and backward: assumed")
NETWORK_SHARE = Constant(0.8, ASSUMED, "of the network adapter's rate in collectives between nodes: assumed")
EAGER_TRAFFIC = Constant(1.6, ASSUMED, "bytes between GEMMs op by op, of those compiled: counted for 1b, not timed")
STEP_SHARE = Constant(0.864, STEPS, "of a step (train/1b, bf16) that the above explains; rest: clocks under load, gaps")
HOST_CODES = Constant(
    12.5e-3, FSDP2, "seconds of the host for a block, not compiled, under FSDP2 over codes (1b, 300m, 2 H100s)"
)
HOST_VALUES = Constant(11.3e-3, FSDP2, "the same where it gathers bf16 (1b and 300m)")
HOST_COMPILED = Constant(
    9.74e-3, COMPILED, "the same, compiled, bf16 (1b; 300m: 20261129T203746-69d19d8c); over codes 9.45 ms, 2 H200s"
)
HOST_EXPERTS = Constant(
    4.94e-3, MIXTURES, "seconds of the host for a block of experts, eager, bf16 (moe-60m and moe-300m)"
)
