"""One short number for all bytes: equal on every machine, because a spec and an input determine every byte.

The input is made of integers by Philox, so it does not depend on any library's random numbers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.reference.philox import block_bytes
from halfbyte.rng import Philox
from halfbyte.sides import Side
from halfbyte.verify.matrix import MAIN_SPECS, MORE_SPECS, draws

EXPECTED = "c0d416607c60"
"""Of the reference, whose bytes tests/golden fixes."""

ROWS, COLS = 48, 144


def fixed_input(rows: int = ROWS, cols: int = COLS) -> Tensor:
    """Return bf16 [rows, cols] with magnitudes over twelve binades, the same on every machine."""
    draw = Philox(seed=0x68616C66, offset=0x62797465).on(torch.device("cpu"))
    count = rows * cols
    words = block_bytes(torch.arange((3 * count + 15) // 16), draw).to(torch.int32).T.flatten()[: 3 * count]
    low, high, exponent = words.view(3, count)
    mantissa = (high << 8) + low - (1 << 15)  # 16 bits, signed
    return torch.ldexp(mantissa.float(), exponent % 12 - 20).to(torch.bfloat16).view(rows, cols)


def fingerprint(device: torch.device, backend: str | None = None) -> str:
    """Return 12 hexadecimal digits over codes, scales and amax of every spec, quantized on `device`."""
    x = fixed_input().to(device)
    digest = hashlib.sha256()
    for name, spec in (MAIN_SPECS | MORE_SPECS).items():
        blocks = ops.quantize(x, Side(spec, **draws(spec, None, device)), backend=backend)
        digest.update(name.encode())
        for tensor in blocks:
            digest.update(
                bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist())
            )  # numpy is no dependency
    return digest.hexdigest()[:12]
