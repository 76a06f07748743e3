"""Measured constants of the step time: what of a GPU's peaks kernels reach, each with the record that says so.

All come from one H200 (`bench/results`); other GPUs are assumed to reach the same shares of their own peaks.
`tests/plan/test_calibration.py` computes every value from its records again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A measured number.

    Args:
        value: as used, in units of the H200.
        means: what it is.
        record: time and commit of the file in bench/results; "" for an assumption, which `means` then says.
    """

    value: float
    means: str
    record: str

    @property
    def date(self) -> str:
        """Year, month and day of the measurement."""
        return f"{self.record[:4]}-{self.record[4:6]}-{self.record[6:8]}" if self.record else ""


BF16_SHARE = Constant(
    value=0.8078,
    means="of the dense bf16 peak in a GEMM of 8192 x 8192 x 8192; fp8 and fp4 are assumed to reach the same of theirs",
    record="20261121T214910-1b13719473",
)
COPY_SHARE = Constant(
    value=0.8836,
    means="of the memory's bandwidth in a copy of 1 GiB; kernels that move bytes reach that, and have a tail",
    record="20261121T214910-1b13719473",
)
TAIL = Constant(
    value=4.2e-6,
    means="seconds that a kernel takes beside its bytes: quantize/1x16 at 8192 x 8192 twice, less 16384 x 8192",
    record="20261121T184154-b024189928",
)
STOCHASTIC = Constant(
    value=7.09e11,
    means="elements a second quantized stochastically or rotated (row_col/sr+sr-rht, 16384 x 8192)",
    record="20261121T184154-b024189928",
)
GROUP_RAMP = Constant(
    value=170.0,
    means="tokens of an expert at which its GEMMs reach half of a dense one's rate (bf16 of grouped/linear)",
    record="20261121T235123-a45ff07e79",
)
NVLINK_SHARE = Constant(
    value=0.606,
    means="of one direction of NVLink in a gather of 5.8 GB over 4 GPUs, nothing beside it",
    record="20261121T153223-f5ecbed4af",
)
ATTENTION_SHARE = Constant(
    value=0.35,
    means="of the dense bf16 peak in causal attention, forward and backward: assumed",
    record="",
)
NETWORK_SHARE = Constant(
    value=0.8, means="of the network adapter's rate in collectives between nodes: assumed", record=""
)
EAGER_TRAFFIC = Constant(
    value=1.6,
    means="bytes between GEMMs run op by op, of those compiled: counted on the ops of a block of 1b, not timed",
    record="",
)
STEP_SHARE = Constant(
    value=0.864,
    means="of a measured step (train/1b in bf16) that the above explains; clocks under load and gaps take the rest",
    record="20261121T214910-1b13719473",
)
