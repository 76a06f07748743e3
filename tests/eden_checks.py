"""The corrected scale of MS-EDEN at its edges, for Triton's interpreter and a GPU alike."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
import triton.language as tl

from halfbyte.kernels.device import eden
from halfbyte.kernels.launch import jit

BLOCK = 1024
E4M3 = sorted(float(v) for v in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
"""What a scale may be, by its code."""


@jit
def stored_code_test_kernel(scale_ptr, squares_ptr, products_ptr, word_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(word_ptr + i).to(tl.uint32)
    code = eden.stored_code(tl.load(scale_ptr + i), tl.load(squares_ptr + i), tl.load(products_ptr + i), word)
    tl.store(out_ptr + i, code.to(tl.int32))


def stored_codes(scale, squares, products, words, device: str) -> np.ndarray:
    """Run the device function on fp32 arrays and words, integers."""
    count = len(scale)
    padded = -(-count // BLOCK) * BLOCK
    tensors = []
    for values, kind in ((scale, np.float32), (squares, np.float32), (products, np.float32), (words, np.int64)):
        tensors.append(torch.from_numpy(np.resize(np.asarray(values, kind), padded)).to(device))
    out = torch.empty(padded, dtype=torch.int32, device=device)
    stored_code_test_kernel[(padded // BLOCK,)](*tensors, out, BLOCK=BLOCK, enable_fp_fusion=False)
    return out.cpu().numpy()[:count]


def code_of_the_definition(scale: float, squares: float, products: float, word: int) -> int:
    """Return the code in exact arithmetic, each operation rounded as docs/numerics.md section 5 says."""
    if products == 0:
        return 0
    with np.errstate(all="ignore"):
        t = np.float32(scale) * (np.float32(squares) / np.float32(products))
    if not t < 448:
        return 126
    exact = Fraction(float(t))
    low = max(code for code, value in enumerate(E4M3) if Fraction(value) <= exact)
    step = Fraction(E4M3[low + 1]) - Fraction(E4M3[low])
    return low + int(exact - Fraction(E4M3[low]) > Fraction(word >> 8, 1 << 24) * step)


def edges() -> list[tuple[float, float, float, int]]:
    """Return (scale, sum of squares, sum of products, word): draws beside the threshold, all binades, no number."""
    found = [(1.0, 0.0, 0.0, 0), (448.0, 4.0, 0.0, 0), (448.0, np.inf, np.inf, 0), (2.0**-9, 3e38, 1e-3, 0xFFFFFFFF)]
    found += [(2.0**-9, 2.0**100, 2.0**53, 0), (2.0**-9, np.nextafter(np.float32(2.0**100), 0), 2.0**97, 7)]
    found += [(2.0**-9, 0.5 * (1 - 2.0**-23), 1 + 2.0**-23, word << 8) for word in (0, 1, 2, (1 << 24) - 1)]
    # Half a unit of the draw below 2^-10.
    found += [(2.0**-9, (2.0**24 - 1) * 2.0**-25, 1.0, word << 8) for word in (8388606, 8388607, 8388608)]
    random = np.random.default_rng(3)
    for scale in E4M3[1:]:
        for _ in range(3):
            products = float(np.float32(np.exp(random.uniform(-2, 6))))
            squares = float(np.float32(products * random.choice((0.51, 1.0, random.uniform(0.6, 1.4), 2.0))))
            t = Fraction(float(np.float32(scale) * (np.float32(squares) / np.float32(products))))
            if t >= 448:
                found.append((scale, squares, products, 0))
                continue
            low = max(value for value in E4M3 if Fraction(value) <= t)
            step = Fraction(E4M3[E4M3.index(low) + 1]) - Fraction(low)
            threshold = int((t - Fraction(low)) / step * (1 << 24))
            near = (threshold - 1, threshold, threshold + 1, 0, (1 << 24) - 1)
            found += [(scale, squares, products, (u << 8) + 0x5A) for u in near if 0 <= u < 1 << 24]
    return found


def check_stored_codes(device: str) -> None:
    cases = edges()
    expected = np.array([code_of_the_definition(*case) for case in cases])
    np.testing.assert_array_equal(stored_codes(*zip(*cases, strict=True), device), expected)
