"""The corrected scale of MS-EDEN at its edges, for Triton's interpreter and a GPU alike."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl

from halfbyte.kernels.device import eden
from halfbyte.kernels.launch import jit

BLOCK = 1024
WARP = 32
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


@jit
def projected_block_test_kernel(
    pairs_ptr, largest_ptr, encode_ptr, scale_ptr, word_ptr, out_ptr, COUNT: tl.constexpr, APART: tl.constexpr
):
    i = tl.arange(0, COUNT)
    pairs = ()
    for k in tl.static_range(8):
        pairs = pairs + (tl.load(pairs_ptr + i * 8 + k).to(tl.uint32, bitcast=True),)  # noqa: RUF005  # Triton has no *
    largest, encode, scale = tl.load(largest_ptr + i), tl.load(encode_ptr + i), tl.load(scale_ptr + i)
    word = tl.load(word_ptr + i).to(tl.uint32)
    low, high, code = eden.projected_block(pairs, largest, encode, scale, word, APART)
    tl.store(out_ptr + i * 3, low.to(tl.int64))
    tl.store(out_ptr + i * 3 + 1, high.to(tl.int64))
    tl.store(out_ptr + i * 3 + 2, code.to(tl.int64))


class Blocks(NamedTuple):
    """Values [N, 16] in bf16, each block's encode and scale, fp32, and its random word."""

    x: np.ndarray
    encode: np.ndarray
    scale: np.ndarray
    word: np.ndarray


def sums_of(blocks: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes [N, 16] with signs, and each block's sums of y * y and y * q, every step rounded to fp32."""
    halfway = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])  # between codes; the even one has it
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    with np.errstate(all="ignore"):
        y = np.abs(blocks.x) * blocks.encode[:, None]
        above, reached = ((compare(y[..., None], halfway)).sum(-1) for compare in (np.greater, np.greater_equal))
        codes = np.where(above % 2 == 0, above, reached)
        squares, products = y[:, 0] * y[:, 0], y[:, 0] * values[codes[:, 0]]
        for i in range(1, 16):
            squares, products = squares + y[:, i] * y[:, i], products + y[:, i] * values[codes[:, i]]
    return codes + 8 * np.signbit(blocks.x), squares, products


def near_thresholds(x: np.ndarray, encode: np.ndarray, scale: np.ndarray, random: np.random.Generator) -> Blocks:
    """Return five of each block, with draws beside the threshold of its scale, the least and the largest."""
    _, squares, products = sums_of(Blocks(x, encode, scale, scale))
    last, words = (1 << 24) - 1, []
    for one in zip(scale, squares, products, strict=True):
        low, high = 0, last  # the largest draw that rounds up, by halving
        up = code_of_the_definition(*map(float, one), 0)
        while low < high:
            middle = (low + high + 1) // 2
            is_up = code_of_the_definition(*map(float, one), middle << 8) == up
            low, high = (middle, high) if is_up else (low, middle - 1)
        draws = low, min(low + 1, last), max(low - 1, 0), 0, last
        words.append([(u << 8) + int(random.integers(256)) for u in draws])
    return Blocks(*(np.repeat(part, 5, axis=0) for part in (x, encode, scale)), np.array(words).ravel())


def block_cases() -> dict[str, Blocks]:
    """Return blocks as most are, those that are none, and both in every warp."""
    random = np.random.default_rng(7)

    def blocks(count: int, scales: list[float], largest: tuple[float, float]) -> Blocks:
        x = random.standard_normal((count, 16)) * np.exp(random.standard_normal((count, 16)))
        x[::3] = np.round(x[::3] * 4) / 4  # ties
        x[random.random((count, 16)) < 0.1] *= 0
        x = torch.from_numpy(x.astype(np.float32)).bfloat16().float().numpy()
        y = random.uniform(*np.log(largest), count)
        encode = np.where(np.arange(count) % 3 == 0, 1.0, np.exp(y) / np.maximum(np.abs(x).max(1), 1e-3))
        encode = np.minimum(encode, 6.9 / np.maximum(np.abs(x).max(1), 1e-3)) if largest[1] < 7 else encode
        scale = random.choice(np.array(scales), count)
        return near_thresholds(x, encode.astype(np.float32), scale.astype(np.float32), random)

    normal = [v for v in E4M3 if v >= 2.0**-5]
    plain, beside = blocks(128, normal, (1.0, 6.9)), blocks(64, normal, (7.0, 7.9))
    below_eight = np.abs(beside.x).max(1) * beside.encode < 8
    beside = Blocks(*(part[below_eight] for part in beside))
    held = blocks(64, E4M3[1:], (7.0, 1e25))
    small = blocks(128, [v for v in E4M3[1:] if v <= 2.0**-5], (0.1, 6.9))
    zeros = Blocks(*(part[:WARP].copy() for part in small))
    zeros.x[:] *= 0
    mixed = Blocks(*(np.concatenate(parts) for parts in zip(plain, held, small, zeros, strict=True)))
    order = random.permutation(len(mixed.word))
    return {
        "plain": plain,
        "beside 7": beside,
        "held": held,
        "small": small,
        "mixed": Blocks(*(v[order] for v in mixed)),
    }


def expected_block(blocks: Blocks) -> np.ndarray:
    """Return [N, 3]: two words of codes and the code of the scale."""
    codes, *sums = sums_of(blocks)
    shifted = codes.reshape(-1, 2, 8).astype(np.int64) << (4 * np.arange(8))
    scales = [
        code_of_the_definition(*map(float, one), int(word))
        for *one, word in zip(blocks.scale, *sums, blocks.word, strict=True)
    ]
    return np.concatenate([shifted.sum(-1), np.array(scales)[:, None]], axis=1)


def found_block(blocks: Blocks, apart: bool, device: str) -> np.ndarray:
    """Run the device function, a warp for 32 of the blocks."""
    x = blocks.x.reshape(-1, 4, 2, 2).swapaxes(2, 3) if apart else blocks.x
    words = torch.from_numpy(x.reshape(-1, 16).astype(np.float32)).bfloat16().view(torch.int32)
    numbers = [torch.from_numpy(v.astype(np.float32)) for v in (np.abs(blocks.x).max(1), blocks.encode, blocks.scale)]
    given, found = [words.to(device), *(v.to(device) for v in numbers), torch.from_numpy(blocks.word).to(device)], []
    for first in range(0, len(blocks.word) // WARP * WARP, WARP):
        out = torch.empty((WARP, 3), dtype=torch.int64, device=device)
        part = [value[first : first + WARP].contiguous() for value in given]
        projected_block_test_kernel[(1,)](*part, out, COUNT=WARP, APART=apart, num_warps=1, enable_fp_fusion=False)
        found.append(out.cpu().numpy())
    return np.concatenate(found)


def check_blocks(device: str) -> None:
    """Codes and corrected scales of whole blocks, where there is PTX."""
    for name, blocks in block_cases().items():
        for apart in (False, True):
            found = found_block(blocks, apart, device)
            assert len(found) >= 4 * WARP
            np.testing.assert_array_equal(found, expected_block(blocks)[: len(found)], err_msg=name)


def check_stored_codes(device: str) -> None:
    cases = edges()
    expected = np.array([code_of_the_definition(*case) for case in cases])
    np.testing.assert_array_equal(stored_codes(*zip(*cases, strict=True), device), expected)
