"""The arithmetic of a GPU's stochastic codes, step by step in numpy, against the definition of docs/numerics.md."""

import numpy as np

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def cut_to_fp32(x):
    """Round fp64 x >= 0 toward zero to fp32."""
    near = x.astype(np.float32)
    return np.where(near > x, np.nextafter(near, np.float32(0)), near)


def cut_to_fp16_bits(x):
    """Round fp32 x >= 0 toward zero to fp16; return its bits."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float16)
    return near.view(np.uint16).astype(np.int64) - (near.astype(np.float64) > x)


def codes_of_the_kernel(a, byte):
    line = cut_to_fp16_bits(cut_to_fp32(a.astype(np.float64) * 2.0**-14 + 2.0**-40))
    return (np.minimum(line, 7 * 512) + 2 * byte) >> 9


def step(a):
    return np.where(a >= 4, 2.0, np.where(a >= 2, 1.0, 0.5)).astype(np.float32)


def codes_of_the_definition(a, byte):
    t = a + np.float32(byte / 256) * step(a)
    q = np.minimum(np.floor(t / step(t)) * step(t), 6)
    return np.searchsorted(CODES, q)


def values():
    """Return fp32 values: beside every multiple of 1/512, at distances from 2^-20 to 2^-49, tiny, large, random."""
    grid = (np.arange(8 * 512) / 512).astype(np.float32)
    found, below, above = [grid], grid, grid
    for _ in range(3):
        below, above = np.nextafter(below, np.float32(0)), np.nextafter(above, np.float32(9))
        found += [below, above]
    for exponent in range(20, 50):
        found += [np.maximum(grid - 2.0**-exponent, 0), grid + 2.0**-exponent]
    random = np.random.default_rng(0).uniform(-40, 5, 20000)
    found += [np.exp(random), np.array([1e-45, 1e-38, 65504, 1e30, 3e38])]
    return np.unique(np.concatenate([part.astype(np.float32) for part in found]))


def test_codes_are_those_of_the_definition():
    a = values()
    for byte in (0, 1, 2, 127, 128, 129, 254, 255, *range(5, 250, 17)):
        np.testing.assert_array_equal(codes_of_the_kernel(a, byte), codes_of_the_definition(a, byte))
