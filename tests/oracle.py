"""Quantization once more, one element at a time, written from docs/numerics.md alone: what the package must equal.

Nothing here is vectorised and nothing comes from the package but the specs. Numbers are np.float32 scalars, so every
operation is rounded once to fp32; constants are exact fractions rounded once; codes are found by search.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from fractions import Fraction
from typing import NamedTuple

import numpy as np

F = np.float32
FLT_MAX = F(np.finfo(np.float32).max)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNS = "+++-+------+-+--"


def _fp8_values(exponent_bits: int, mantissa_bits: int, top: float) -> list[float]:
    bias, one = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = [m * 2.0 ** (1 - bias - mantissa_bits) for m in range(one)]
    values += [(one + m) * 2.0 ** (e - bias - mantissa_bits) for e in range(1, 2**exponent_bits) for m in range(one)]
    return [v for v in values if v <= top]


FP8 = {"e4m3": _fp8_values(4, 3, 448.0), "e5m2": _fp8_values(5, 2, 57344.0)}


class Result(NamedTuple):
    """codes [rows][padded cols], scale bytes [rows][blocks], amax: one or one per row (None for MXFP8)."""

    codes: list[list[int]]
    scales: list[list[int]]
    amax: list[np.float32] | None


class Place(NamedTuple):
    seed: int = 0
    offset: int = 0
    first_block: int = 0
    blocks_per_row: int | None = None


def constant(value: Fraction) -> np.float32:
    """Round an exact positive fraction once to fp32, to nearest even."""
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length() - 25, -149)
    while value / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while exponent > -149 and value / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    return F(math.ldexp(round(value / Fraction(2) ** exponent), exponent))


def minimum(a: np.float32, b: np.float32) -> np.float32:
    """IEEE's minimum of two numbers: 0 * Inf on one side gives the other."""
    return b if math.isnan(a) else min(a, b)


def nearest(magnitude: float, values) -> int:
    """Return the code of the value nearest to a magnitude, an even code on ties, the last beyond the end."""
    magnitude = min(float(magnitude), values[-1])
    above = bisect_left(values, magnitude)
    return min((max(above - 1, 0), above), key=lambda code: (abs(values[code] - magnitude), code % 2))


def e2m1(v: np.float32) -> int:
    return nearest(abs(v), E2M1) + (8 if math.copysign(1, v) < 0 else 0)


def e2m1_stochastic(v: np.float32, byte: int) -> int:
    a = min(abs(v), F(6))  # beyond 6 every byte gives 6

    def step(value):
        return F(2) if value >= 4 else F(1) if value >= 2 else F(0.5)

    t = a + F(byte) / F(256) * step(a)
    q = min(F(math.floor(t / step(t))) * step(t), F(6))
    return E2M1.index(float(q)) + (8 if math.copysign(1, v) < 0 else 0)


def e2m1_value(code: int) -> np.float32:
    return F(E2M1[code % 8]) * F(-1 if code >= 8 else 1)


def e4m3_value(code: int) -> np.float32:
    return F(math.nan) if code == 0x7F else F(FP8["e4m3"][code])


def bf16(value: np.float32) -> np.float32:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return F(math.nan)
    bits += 0x7FFF + (bits >> 16 & 1)
    return F(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def _halves(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32


def random_words(place: Place, block: int) -> list[int]:
    return philox((*_halves(block), *_halves(place.offset)), _halves(place.seed))


def random_bytes(place: Place, block: int) -> bytes:
    return struct.pack("<4I", *random_words(place, block))


def fresh_signs(place: Place, size: int) -> list[int]:
    low, high = _halves(place.offset)
    words = philox((0, 0, low, high ^ 0x80000000), _halves(place.seed))
    return [-1 if words[i // 32] >> i % 32 & 1 else 1 for i in range(size)]


def rotate(row: list[np.float32], size: int, signs: list[int]) -> list[np.float32]:
    """Rotate one row, padded with zeros to whole groups."""
    row = [bf16(v) for v in row] + [F(0)] * (-len(row) % size)
    out = []
    for start in range(0, len(row), size):
        y = [v * F(s) for v, s in zip(row[start : start + size], signs, strict=True)]
        stride = 1
        while stride < size:
            for i in range(size):
                if i // stride % 2 == 0:
                    y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
            stride *= 2
        y = [v * F(1 / math.sqrt(size)) for v in y]
        out += [bf16(F(0) if v == 0 else v) for v in y]
    return out


def rotated(x: np.ndarray, rotation, place: Place) -> list[list[np.float32]]:
    rows = [list(row) for row in x.astype(F)]
    if rotation is None:
        return rows
    given = {"fixed": SIGNS, "none": "+", "fresh": ""}.get(rotation.signs, rotation.signs)
    signs = [-1 if given[i % len(given)] == "-" else 1 for i in range(rotation.size)] if given else None
    signs = signs or fresh_signs(place, rotation.size)
    return [rotate(row, rotation.size, signs) for row in rows]


class _Factors(NamedTuple):
    a: np.float32
    s: np.float32
    d: np.float32


def _factors(amax: np.float32, spec) -> _Factors:
    m8_m4 = Fraction(spec.e4m3_max) * Fraction(spec.fp4_max)
    a = max(amax, constant(m8_m4 / Fraction(float(FLT_MAX))))
    s = F(1) if amax == 0 else min(constant(m8_m4) / a, FLT_MAX)
    return _Factors(a, s, F(1) / s)


def _encode(scale_code: int, f: _Factors) -> np.float32:
    return minimum(F(1) / (e4m3_value(scale_code) * f.d), FLT_MAX)


def _finite_max(values) -> np.float32:
    return max((abs(v) for v in values if math.isfinite(v)), default=F(0))


def _tiles(rows: int, height: int):
    return [range(start, min(start + height, rows)) for start in range(0, rows, height)]


def _amaxes(rows, spec, given) -> list[np.float32]:
    if given is not None:
        return [F(v) for v in given]
    if spec.outer == "row":
        return [_finite_max(row) for row in rows]
    return [_finite_max(v for row in rows for v in row)]


def token_mean(x: np.ndarray, narrow: bool = False) -> np.ndarray:
    """The mean of each column, in the order of section 2: fp32 [cols]. narrow: x holds bf16 values."""
    rows, cols = x.shape
    out = np.zeros(cols, F)
    with np.errstate(all="ignore"):
        for c in range(cols):
            groups = []
            for start in range(0, rows, 16):
                groups.append(F(0))
                for r in range(start, min(start + 16, rows)):
                    groups[-1] = groups[-1] + F(x[r, c])
            lanes = [F(0)] * 32
            for g, value in enumerate(groups):
                lanes[g % 32] = lanes[g % 32] + value
            while len(lanes) > 1:
                lanes = [lanes[i] + lanes[i + 1] for i in range(0, len(lanes), 2)]
            mean = lanes[0] / F(rows) if rows else F(0)
            mean = bf16(mean) if narrow and math.isfinite(mean) else mean
            out[c] = mean if math.isfinite(mean) else F(0)
    return out


def residual(x: np.ndarray, mean: np.ndarray, narrow: bool = False) -> np.ndarray:
    """x [rows, cols] without its mean: fp32, or bf16 values where x holds such."""
    out = np.zeros(x.shape, F)
    with np.errstate(all="ignore"):
        for r, c in np.ndindex(*x.shape):
            d = F(x[r, c]) - mean[c]
            out[r, c] = bf16(d) if narrow and math.isfinite(d) else d
    return out


ORIGIN = Place()


def quantize(x: np.ndarray, spec, place: Place = ORIGIN, sign_place: Place = ORIGIN, amax=None) -> Result:
    """Quantize a matrix in NVFP4: every rule of sections 2 to 5 and 7.

    Args:
        x: fp32 [rows, cols]; bf16 and fp16 inputs as their exact values.
        spec: an NVFP4 value.
        place, sign_place: where random bytes and fresh signs are.
        amax: replaces the computed ones; a list of 1 or rows.
    """
    with np.errstate(all="ignore"):
        rows = rotated(x, spec.rotation, sign_place)
        cols = len(rows[0]) if rows else -(-x.shape[1] // spec.alignment) * spec.alignment
        blocks = -(-cols // 16)
        rows = [row + [F(0)] * (blocks * 16 - cols) for row in rows]
        amaxes = _amaxes(rows, spec, amax)
        codes = [[0] * (blocks * 16) for _ in rows]
        scales = [[0] * blocks for _ in rows]
        for tile in _tiles(len(rows), spec.block[0]):
            for block in range(blocks):
                values = [rows[r][16 * block : 16 * block + 16] for r in tile]
                top = amaxes[tile[0] if spec.outer == "row" else 0]
                bad = not (math.isfinite(top) and top >= 0) or not all(math.isfinite(v) for row in values for v in row)
                first = [_linear_index(place, r, blocks) + block for r in tile]
                tile_codes, scale = ([[0] * 16 for _ in tile], 0x7F) if bad else _tile(values, spec, top, place, first)
                for r, row in zip(tile, tile_codes, strict=True):
                    codes[r][16 * block : 16 * block + 16] = row
                    scales[r][block] = scale
    return Result(codes, scales, amaxes)


def _linear_index(place: Place, row: int, blocks: int) -> int:
    return place.first_block + row * (blocks if place.blocks_per_row is None else place.blocks_per_row)


def _tile(values, spec, top, place, indices) -> tuple[list[list[int]], int]:
    """Return codes and the scale byte of one 1×16 block or 16×16 tile of finite values."""
    f = _factors(top, spec)
    block_amax = _finite_max(v for row in values for v in row)
    if hasattr(spec.scaling, "candidates"):
        return _choose(values, spec, f, block_amax)
    folded = f.s * constant(1 / Fraction(spec.fp4_max))
    scale = nearest(minimum(block_amax * folded, FLT_MAX), FP8["e4m3"])
    if spec.scaling.key == "eden":
        return _eden(values[0], scale, f, random_words(place, indices[0])[0])
    enc = _encode(scale, f)
    if spec.rounding == "nearest":
        return [[e2m1(v * enc) for v in row] for row in values], scale
    out = []
    for index, row in zip(indices, values, strict=True):
        drawn = random_bytes(place, index) if spec.rounding == "stochastic" else bytes(16)
        out.append([e2m1_stochastic(v * enc, byte) for v, byte in zip(row, drawn, strict=True)])
    return out, scale


def _eden(row, scale: int, f: _Factors, word: int) -> tuple[list[list[int]], int]:
    """MS-EDEN: the corrected scale between the two values of E4M3 that enclose it."""
    scale = max(scale, 1)
    enc = _encode(scale, f)
    ys = [x * enc for x in row]
    codes = [e2m1(y) for y in ys]
    squares, products = ys[0] * ys[0], ys[0] * e2m1_value(codes[0])
    for y, code in zip(ys[1:], codes[1:], strict=True):
        squares, products = squares + y * y, products + y * e2m1_value(code)
    if products == 0:
        return [codes], 0
    grid = FP8["e4m3"]
    t = float(minimum(e4m3_value(scale) * (squares / products), F(448)))  # from here on exact
    low = max(code for code, value in enumerate(grid) if value <= t)
    if low + 1 == len(grid):
        return [codes], low
    chance = (Fraction(t) - Fraction(grid[low])) / (Fraction(grid[low + 1]) - Fraction(grid[low]))
    return [codes], low + (Fraction(word >> 8, 2**24) < chance)


def _choose(values, spec, f: _Factors, block_amax) -> tuple[list[list[int]], int]:
    base = (block_amax / F(6)) * f.s
    best = None
    for ratio in sorted(spec.scaling.candidates, key=lambda r: (r != 1, r)):
        scale = nearest(min(base * F(ratio), F(448)), FP8["e4m3"])
        enc = _encode(scale, f)
        codes = [[e2m1(v * enc) for v in row] for row in values]
        sums = [_row_error(row, c, e4m3_value(scale), spec, f) for row, c in zip(values, codes, strict=True)]
        if spec.block[0] == 16:
            sums += [F(0)] * (16 - len(sums))
            for half in (8, 4, 2, 1):
                sums = [sums[r] + sums[r + half] for r in range(half)]
        if best is None or sums[0] < best[0]:
            best = sums[0], codes, scale
    return best[1:]


def _row_error(values, codes, scale, spec, f: _Factors) -> np.float32:
    total = None
    for x, code in zip(values, codes, strict=True):
        decoded = e2m1_value(code) * scale
        if spec.scaling.error_math == "exact":
            d = decoded * f.a / constant(Fraction(6) * Fraction(spec.e4m3_max)) - x
        else:
            d = decoded - x * f.s
        term = abs(d) if spec.scaling.error == "mae" else d * d
        total = term if total is None else total + term
    return total


def dequantize(result: Result, spec) -> np.ndarray:
    """Return fp32 [rows, padded cols]."""
    inverse = constant(1 / (Fraction(spec.e4m3_max) * Fraction(spec.fp4_max)))
    smallest = constant(Fraction(spec.e4m3_max) * Fraction(spec.fp4_max) / Fraction(float(FLT_MAX)))
    out = np.zeros((len(result.codes), len(result.codes[0]) if result.codes else 0), F)
    with np.errstate(all="ignore"):
        for r, row in enumerate(result.codes):
            amax = result.amax[r if spec.outer == "row" else 0]
            a = amax if math.isnan(amax) else max(amax, smallest)
            for c, code in enumerate(row):
                scale = e4m3_value(result.scales[r][c // 16])
                if a >= 2.0**100:
                    factor = scale * F(2.0**-16) * a * (inverse * F(2.0**16))
                else:
                    factor = scale * a * inverse
                out[r, c] = e2m1_value(code) * factor
    return out


def quantize_mxfp8(x: np.ndarray, element: str) -> Result:
    """Quantize a matrix in MXFP8 (section 6)."""
    values = FP8[element]
    sign_bit = 0x80
    codes, scales = [], []
    with np.errstate(all="ignore"):
        for row in x.astype(F):
            row = [*row, *[F(0)] * (-len(row) % 32)]
            codes.append([])
            scales.append([])
            for start in range(0, len(row), 32):
                block = row[start : start + 32]
                if not all(math.isfinite(v) for v in block):
                    codes[-1] += [0] * 32
                    scales[-1].append(0xFF)
                    continue
                top = float(_finite_max(block) * constant(1 / Fraction(values[-1])))
                e = next(e for e in range(255) if 2.0 ** (e - 127) >= top)
                scaled = [v * F(2.0 ** (127 - e)) for v in block]
                signs = [sign_bit if math.copysign(1, v) < 0 else 0 for v in scaled]
                codes[-1] += [nearest(abs(v), values) + s for v, s in zip(scaled, signs, strict=True)]
                scales[-1].append(e)
    return Result(codes, scales, None)
