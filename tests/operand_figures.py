"""What hb.collect_stats should say of an operand, in numpy's fp64 of bytes that the element-by-element oracle made.

Sums are those of one operand; the figures of several together are those of their sums.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import oracle

import halfbyte as hb

STREAMS = {"x": 0, "w": 2, "dy": 4}
SIGNS = {"x.row": 6, "w.row": 6, "dy.row": 7, "w.col": 7, "dy.col": 8, "x.col": 8}


def values(t: np.ndarray, spec, name: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return v and q, fp64 [rows, padded], and the scale bytes."""
    offset = STREAMS[name.partition(".")[0]] + name.endswith("col")
    place, sign_place = oracle.Place(seed, offset), oracle.Place(seed, SIGNS[name])
    padded = np.pad(t, ((0, 0), (0, -t.shape[1] % spec.alignment)))
    if spec.format.has_amax:
        result = oracle.quantize(t, spec, place, sign_place)
        q = oracle.dequantize(result, spec).astype(np.float64)
        v = np.array(oracle.rotated(t, spec.rotation, sign_place), np.float64)
        v = np.pad(v, ((0, 0), (0, q.shape[1] - v.shape[1])))
    else:
        result, v = oracle.quantize_mxfp8(t, spec.element), padded.astype(np.float64)
        top = np.array(oracle.FP8[spec.element])
        codes, scales = np.array(result.codes), np.array(result.scales)
        q = np.where(codes >= 128, -1, 1) * top[codes % 128] * np.repeat(2.0 ** (scales - 127), 32, axis=1)
    return v, q, np.array(result.scales)


def standard_scales(t: np.ndarray, spec, name: str, seed: int) -> np.ndarray:
    """Return the scale bytes that the only candidate 1 gives."""
    plain = dataclasses.replace(spec, scaling=dataclasses.replace(spec.scaling, candidates=(1.0,)))
    return np.array(oracle.quantize(t, plain, sign_place=oracle.Place(seed, SIGNS[name])).scales)


def limits(spec, scales: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the largest magnitude that each element's block can hold."""
    if not spec.format.has_amax:
        return np.repeat(2.0 ** (scales - 127.0), 32, axis=1) * spec.format.element.max
    amax = np.abs(v).max(axis=1, keepdims=True) if spec.has_row_amax else np.abs(v).max()
    scale = np.vectorize(lambda byte: float(oracle.e4m3_value(byte)))(scales)
    return np.repeat(scale, 16, axis=1) * 6 * amax / (spec.e4m3_max * spec.fp4_max)


def sums_of(t: np.ndarray, spec, name: str, seed: int) -> dict[str, float]:
    """Return the sums over one operand, and its amax."""
    v, q, scales = values(t, spec, name, seed)
    d, block = q - v, spec.block_length
    maxima = np.abs(v).reshape(v.shape[0], -1, block).max(2)
    beyond = (np.abs(v) > 1.001 * limits(spec, scales, v)) & (np.repeat(scales, block, axis=1) != 0)
    found = {
        "amax": np.abs(v).max(),
        "signal": (v**2).sum(),
        "noise": (d**2).sum(),
        "magnitude": np.abs(v).sum(),
        "deviation": np.abs(d).sum(),
        "nonzero": (v != 0).sum(),
        "underflow": ((v != 0) & (q == 0)).sum(),
        "saturated": beyond.sum(),
        "blocks": (maxima > 0).sum(),
        "scale_underflow": ((maxima > 0) & (scales == 0)).sum(),
        "chosen": math.nan,
        "other_noise": math.nan,
    }
    tries = isinstance(getattr(spec, "scaling", None), hb.FourOverSix)
    if tries:
        found["chosen"] = ((scales != standard_scales(t, spec, name, seed)) & (maxima > 0)).sum()
    if spec.format.has_amax and not spec.is_tile and (tries or not spec.tries_candidates):
        other = dataclasses.replace(spec, rotation=None if spec.rotation else hb.Hadamard())
        w, r, _ = values(t, other, name, seed)
        found["other_noise"] = ((r - w) ** 2).sum()
    return found


def figures_of(sums: dict[str, float], spec) -> dict[str, float]:
    """Return what one operand, or several together, should show."""
    noises = sums["other_noise"], sums["noise"]
    without, rotated = noises if spec.rotation else noises[::-1]
    return {
        "amax": sums["amax"],
        "snr_db": 10 * math.log10(sums["signal"] / sums["noise"]),
        "relative_error": sums["deviation"] / sums["magnitude"],
        "underflow_share": sums["underflow"] / sums["nonzero"],
        "saturation_share": sums["saturated"] / sums["nonzero"],
        "scale_underflow_share": sums["scale_underflow"] / sums["blocks"],
        "four_over_six_share": sums["chosen"] / sums["blocks"],
        "rht_gain_db": math.nan if math.isnan(noises[0]) else 10 * math.log10(without / rotated),
    }


def inputs(recipe: hb.Recipe, tensors: tuple, seed: int) -> dict[str, tuple[np.ndarray, object]]:
    """Return what is quantized of x, w, dy as each operand, and how."""
    x, w, dy = tensors
    gemms = [getattr(recipe, name) or hb.GemmSpec() for name in ("fprop", "dgrad", "wgrad")]
    names = ("x.row", "w.row", "dy.row", "w.col", "dy.col", "x.col")
    specs = dict(zip(names, (spec for gemm in gemms for spec in (gemm.a, gemm.b)), strict=True))
    if recipe.activation_mean == "split":
        x = x - oracle.token_mean(x)
    of = {"x": x, "w": w, "dy": dy}
    found = {name: (of[name[:-4]] if name.endswith("row") else of[name[:-4]].T, spec) for name, spec in specs.items()}
    if recipe.backward == "dequantized":
        for name in ("x", "w"):
            t, spec = found[f"{name}.row"]
            q = values(t, spec, f"{name}.row", seed)[1][:, : t.shape[1]].astype(np.float32)
            found[f"{name}.col"] = q.T, specs[f"{name}.col"]
    return {name: (t, spec) for name, (t, spec) in found.items() if spec is not None}
