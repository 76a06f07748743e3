"""What PTX instructions compute, on the bits that registers hold: numpy arrays with an entry for every thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

BITS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
SIGNED = {np.uint8: np.int8, np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}
FLAT = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def raw(value: np.ndarray) -> np.ndarray:
    """Return the bits of a float."""
    value = np.asarray(value)
    return value.view(BITS[str(value.dtype.itemsize * 8)])


def bits_of(value: Any, dtype: type) -> np.ndarray:
    """Return raw bits in a register of `dtype`."""
    if isinstance(value, int):
        return np.array(value % 2 ** (8 * np.dtype(dtype).itemsize), dtype)
    return np.asarray(value).astype(dtype)


def typed(value: Any, kind: str) -> np.ndarray:
    """Return an operand as a type says: "f32", "s32", "u64", "b16"; bf16 as fp32."""
    if kind == "bf16":
        return (bits_of(value, np.uint32) << np.uint32(16)).view(np.float32)
    raw = bits_of(value, BITS[kind[1:]])
    if kind in FLAT:
        return raw.view(FLAT[kind])
    return raw.view(SIGNED[raw.dtype.type]) if kind[0] == "s" else raw


def _halves(value: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return both values of a word, as fp32."""
    raw = bits_of(value, np.uint32)
    parts = (raw & np.uint32(0xFFFF), raw >> np.uint32(16))
    if dtype == "bf16":
        return tuple((part << np.uint32(16)).view(np.float32) for part in parts)  # type: ignore[return-value]
    return tuple(part.astype(np.uint16).view(np.float16).astype(np.float32) for part in parts)  # type: ignore


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of fp32 numbers in fp64, rounded to odd: rounding it again to less than 52 bits is exact."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    even = np.isfinite(total) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    # Toward the error: away from zero where both have one sign.
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, bits + step, bits).view(np.float64)


def _toward_zero(exact: np.ndarray, dtype: type) -> np.ndarray:
    """Round fp64 to a narrower type toward zero."""
    rounded = exact.astype(dtype)
    beyond = np.abs(rounded.astype(np.float64)) > np.abs(exact)
    return np.where(beyond, np.nextafter(rounded, dtype(0)), rounded)


def _to_bf16(exact: np.ndarray) -> np.ndarray:
    """Return the bits of fp64 numbers in bf16, nearest even; fp32 in between is rounded to odd."""
    single = _toward_zero(exact.astype(np.float64), np.float32)
    bits = single.view(np.uint32)
    bits = np.where((single.astype(np.float64) != exact) & np.isfinite(exact), bits | np.uint32(1), bits)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(exact), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _refuse_others(rest: list[str], known: set[str]) -> None:
    """Refuse what changes a result and is not computed here: `sat`, `ftz`, other roundings."""
    if rest[-1] in FLAT and set(rest[:-1]) - known:
        raise NotImplementedError(f"PTX modifiers {'.'.join(rest)} are not emulated")


def _packed(function: Callable) -> Callable:
    """Return `function` that takes pairs of fp32 in 64 bits too."""

    def apply(rest: list[str], operands: list) -> np.ndarray:
        if rest[-1] != "f32x2":
            return function(rest, operands)
        words = [bits_of(o, np.uint64) for o in operands]
        low, high = (
            function([*rest[:-1], "f32"], [(w >> np.uint64(at)).astype(np.uint32) for w in words]) for at in (0, 32)
        )
        return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))

    return apply


def _arithmetic(operation: Callable) -> Callable:
    def apply(rest: list[str], operands: list) -> np.ndarray:
        kind = rest[-1]
        _refuse_others(rest, {"rn"})
        if kind in ("bf16x2", "f16x2"):
            raise NotImplementedError(f"packed {kind} is not emulated here")
        a, b = (typed(o, kind) for o in operands)
        if rest[0] == "wide":
            wide = np.int64 if kind[0] == "s" else np.uint64
            return operation(a.astype(wide), b.astype(wide)).view(np.uint64)
        value = operation(a, b)
        return raw(value) if kind in FLAT else value.view(BITS[kind[1:]])

    return apply


def _multiply(rest: list[str], operands: list) -> np.ndarray:
    if rest[-1] == "f16x2":
        (a, b), (c, d) = (_halves(o, "f16") for o in operands)
        return joined(raw((a * c).astype(np.float16)), raw((b * d).astype(np.float16)))
    if rest[0] == "hi":
        a, b = (typed(o, rest[-1]).astype(np.uint64) for o in operands)
        return ((a * b) >> np.uint64(32)).astype(np.uint32)
    return _arithmetic(np.multiply)(rest, operands)


def _fma(rest: list[str], operands: list) -> np.ndarray:
    kind = rest[-1]
    if kind in ("bf16x2", "f16x2"):
        values = [_halves(o, kind[:-2]) for o in operands]
        exact = [_to_odd(*(v[i] for v in values)) for i in range(2)]
        if kind == "bf16x2":
            return joined(_to_bf16(exact[0]), _to_bf16(exact[1]))
        return joined(raw(exact[0].astype(np.float16)), raw(exact[1].astype(np.float16)))
    _refuse_others(rest, {"rn", "rz"})
    a, b, c = np.broadcast_arrays(*(typed(o, kind) for o in operands))
    if kind == "f64":  # of fp32 numbers alone, whose products are exact
        if rest[0] != "rn" or not all(((t == t.astype(np.float32)) | np.isnan(t)).all() for t in (a, b)):
            raise NotImplementedError(f"fma.{'.'.join(rest)} of numbers that fp32 does not hold is not emulated")
        return raw(a * b + c)
    exact = _to_odd(a, b, c)
    return raw(_toward_zero(exact, np.float32) if rest[0] == "rz" else exact.astype(np.float32))


def _multiply_add(rest: list[str], operands: list) -> np.ndarray:
    product = _multiply(rest, operands[:2])
    return product + bits_of(operands[2], product.dtype.type)


def _extremum(greater: bool) -> Callable:
    def of_floats(a: np.ndarray, b: np.ndarray, rest: list[str]) -> np.ndarray:
        """-0 is less than +0; a number wins over NaN unless NaN is asked for."""
        sign_a, sign_b = np.signbit(a), np.signbit(b)
        first = np.where(a == b, sign_b >= sign_a if greater else sign_a >= sign_b, a > b if greater else a < b)
        value = np.where(np.isnan(b) | (first & ~np.isnan(a)), a, b)
        if "NaN" in rest:
            value = np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), value)
        return value

    def apply(rest: list[str], operands: list) -> np.ndarray:
        kind = rest[-1]
        if kind in ("bf16x2", "f16x2"):
            parts = []
            for a, b in zip(*(_halves(o, kind[:-2]) for o in operands), strict=True):
                sign = np.signbit(a) ^ np.signbit(b)
                if "abs" in rest:
                    a, b = np.abs(a), np.abs(b)
                value = of_floats(a, b, rest)
                if "xorsign" in rest:
                    value = np.where(sign, -np.abs(value), np.abs(value))
                parts.append((raw(value) >> np.uint32(16)) if kind == "bf16x2" else raw(value.astype(np.float16)))
            return joined(*parts)
        _refuse_others(rest, {"NaN"})
        a, b = (typed(o, kind) for o in operands)
        if kind == "bf16":
            return (raw(of_floats(a, b, rest)) >> np.uint32(16)).astype(np.uint16)
        if kind in FLAT:
            return raw(of_floats(a, b, rest))
        return (np.maximum if greater else np.minimum)(a, b).view(BITS[kind[1:]])

    return apply


def _logic(operation: Callable) -> Callable:
    def apply(rest: list[str], operands: list) -> np.ndarray:
        if rest[-1] == "pred":
            return operation(*(np.asarray(o) != 0 for o in operands))
        return operation(*(bits_of(o, BITS[rest[-1][1:]]) for o in operands))

    return apply


def _shift(rest: list[str], operands: list, left: bool) -> np.ndarray:
    kind = rest[-1]
    value, amount = typed(operands[0], kind), bits_of(operands[1], np.uint32)
    width = int(kind[1:])
    capped = np.minimum(amount, width - 1).astype(value.dtype)
    shifted = (value << capped) if left else (value >> capped)
    filled = value >> value.dtype.type(width - 1) if not left else np.zeros_like(value)
    return np.where(amount >= width, filled, shifted).view(BITS[kind[1:]])


def _funnel(rest: list[str], operands: list) -> np.ndarray:
    low, high, amount = (bits_of(o, np.uint32).astype(np.uint64) for o in operands)
    assert rest == ["l", "wrap", "b32"], rest
    return ((((high << np.uint64(32)) | low) << (amount & np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def _three_inputs(rest: list[str], operands: list) -> np.ndarray:
    a, b, c = (bits_of(o, np.uint32) for o in operands[:3])
    value = np.zeros((), np.uint32)
    for i in range(8):
        if operands[3] >> i & 1:
            value = value | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return value


def _permute(rest: list[str], operands: list) -> np.ndarray:
    a, b, selector = (bits_of(o, np.uint32).astype(np.uint64) for o in operands)
    both, value = a | (b << np.uint64(32)), np.zeros((), np.uint32)
    for i in range(4):
        select = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((select & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        byte = np.where(select >= 8, np.where(byte >= 128, 255, 0), byte).astype(np.uint32)
        value = value | (byte << np.uint32(8 * i))
    return value


def _extract(rest: list[str], operands: list) -> np.ndarray:
    kind = rest[-1]
    value, start, length = bits_of(operands[0], np.uint32), int(operands[1]), int(operands[2])
    value = (value >> np.uint32(start)) & np.uint32((1 << length) - 1)
    if kind[0] == "s":
        sign = (value >> np.uint32(length - 1)) & np.uint32(1)
        value = np.where(sign != 0, value | np.uint32(2**32 - (1 << length)), value)
    return value


def _convert(rest: list[str], operands: list) -> np.ndarray:
    to, origin = rest[-2], rest[-1]
    if to in ("bf16x2", "f16x2"):
        high, low = (typed(o, origin).astype(np.float64) for o in operands)
        if to == "bf16x2":
            return joined(_to_bf16(low), _to_bf16(high))
        if rest[0] == "rz":
            return joined(*(raw(_toward_zero(v, np.float16)) for v in (low, high)))
        return joined(*(raw(v.astype(np.float32).astype(np.float16)) for v in (low, high)))
    if to in ("e4m3x2", "e5m2x2"):
        high, low = (_fp8(typed(o, origin), to[:4]) for o in operands)
        return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))
    if to == "bf16":
        return _to_bf16(typed(operands[0], origin).astype(np.float64))
    if origin == "bf16":
        return raw(typed(operands[0], origin).astype(FLAT[to]))
    if to == "e2m1x2":
        high, low = (_e2m1(typed(o, origin)) for o in operands)
        return (low | high << np.uint32(4)).astype(np.uint16)
    value = typed(operands[0], origin)
    if to in FLAT and origin in FLAT:
        return raw(TO_INTEGER.get(rest[0], np.positive)(value).astype(FLAT[to]))
    if to in FLAT:
        return raw(value.astype(np.float64).astype(FLAT[to]))
    if origin in FLAT:
        rounded = TO_INTEGER[rest[0]](value.astype(np.float64))
        wide = np.iinfo(np.dtype(SIGNED[BITS[to[1:]]] if to[0] == "s" else BITS[to[1:]]))
        rounded = np.where(np.isnan(rounded), 0, np.clip(rounded, wide.min, wide.max))
        return rounded.astype(wide.dtype).view(BITS[to[1:]])
    return value.astype(SIGNED[BITS[to[1:]]] if to[0] == "s" else BITS[to[1:]]).view(BITS[to[1:]])


def _fp8(value: np.ndarray, kind: str) -> np.ndarray:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    most = torch.finfo(dtype).max
    shape = np.shape(value)
    held = torch.from_numpy(np.array(value, np.float32).reshape(-1))
    return held.clamp(-most, most).to(dtype).view(torch.uint8).numpy().reshape(shape)


def _e2m1(value: np.ndarray) -> np.ndarray:
    """Return codes of E2M1, nearest even; NaN becomes the largest."""
    magnitude = np.where(np.isnan(value), 6.0, np.abs(value)).astype(np.float64)
    codes = np.minimum(
        np.minimum(np.rint(magnitude * 2), np.rint(magnitude) + 2), np.minimum(np.rint(magnitude / 2) + 4, 7)
    )
    return codes.astype(np.uint32) | np.where(np.signbit(value), np.uint32(8), np.uint32(0))


def _select(rest: list[str], operands: list) -> np.ndarray:
    dtype = BITS[rest[-1][1:]]
    return np.where(operands[2], bits_of(operands[0], dtype), bits_of(operands[1], dtype))


def _reciprocal(rest: list[str], operands: list) -> np.ndarray:
    value = typed(operands[0], "f32")
    if "ftz" in rest:
        value = np.where(np.abs(value) < 2.0**-126, np.copysign(np.float32(0), value), value)
    result = np.float32(1) / value
    if "ftz" in rest:
        result = np.where(np.abs(result) < 2.0**-126, np.copysign(np.float32(0), result), result)
    return raw(result.astype(np.float32))


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide; integers toward zero."""
    if a.dtype.kind == "f":
        return a / b
    quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) == (b < 0), quotient, -quotient).astype(a.dtype)


def _sign(operation: Callable) -> Callable:
    def apply(rest: list[str], operands: list) -> np.ndarray:
        kind = rest[-1]
        if kind in ("bf16x2", "f16x2"):
            word = bits_of(operands[0], np.uint32)
            return word & np.uint32(0x7FFF7FFF) if operation is np.abs else word ^ np.uint32(0x80008000)
        value = operation(typed(operands[0], kind))
        if kind == "bf16":
            return (raw(value) >> np.uint32(16)).astype(np.uint16)
        return raw(value) if kind in FLAT else value.view(BITS[kind[1:]])

    return apply


def _count_ones(rest: list[str], operands: list) -> np.ndarray:
    word = bits_of(operands[0], BITS[rest[0][1:]])
    return np.unpackbits(word.reshape(-1, 1).view(np.uint8), axis=1).sum(1).astype(np.uint32).reshape(word.shape)


def _bits_of_word(operand: Any) -> np.ndarray:
    """Return the 32 bits of each word, the lowest first."""
    word = bits_of(operand, np.uint32).reshape(-1)
    return (word[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)


def _reversed(rest: list[str], operands: list) -> np.ndarray:
    assert rest == ["b32"], rest
    bits = _bits_of_word(operands[0]) << np.arange(31, -1, -1, dtype=np.uint32)
    return bits.sum(axis=1, dtype=np.uint32).reshape(np.shape(operands[0]))


def _leading_zeros(rest: list[str], operands: list) -> np.ndarray:
    assert rest == ["b32"], rest
    ones = np.cumsum(_bits_of_word(operands[0])[:, ::-1], axis=1)
    return (ones == 0).sum(axis=1, dtype=np.uint32).reshape(np.shape(operands[0]))


FUNCTIONS: dict[str, Callable] = {
    "add": _packed(_arithmetic(np.add)),
    "sub": _packed(_arithmetic(np.subtract)),
    "mul": _packed(_multiply),
    "mad": _multiply_add,
    "fma": _packed(_fma),
    "div": _arithmetic(_divide),
    "rem": _arithmetic(lambda a, b: a - _divide(a, b) * b),
    "min": _extremum(False),
    "max": _extremum(True),
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "xor": _logic(np.bitwise_xor),
    "not": _logic(np.invert),
    "shl": lambda rest, operands: _shift(rest, operands, True),
    "shr": lambda rest, operands: _shift(rest, operands, False),
    "shf": _funnel,
    "lop3": _three_inputs,
    "prmt": _permute,
    "popc": _count_ones,
    "brev": _reversed,
    "clz": _leading_zeros,
    "bfe": _extract,
    "cvt": _convert,
    "selp": _select,
    "rcp": _reciprocal,
    "ex2": lambda rest, operands: raw(np.exp2(typed(operands[0], "f32").astype(np.float64)).astype(np.float32)),
    "abs": _sign(np.abs),
    "neg": _sign(np.negative),
}
