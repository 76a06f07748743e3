"""Numbers of E2M1 without a conversion: `casts.rounded_value` and `nearest_value`, in Triton's interpreter."""

import numpy as np
import pytest
import torch
import triton.language as tl

from halfbyte.kernels.device import casts
from halfbyte.kernels.launch import jit

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
HALFWAY = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
BLOCK = 1 << 16


@jit
def rounded_values_test_kernel(x_ptr, rounded_ptr, nearest_ptr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(rounded_ptr + i, casts.rounded_value(x * UNIT, UNIT))
    tl.store(nearest_ptr + i, casts.nearest_value(x))


def rounded(x: np.ndarray, unit: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    given = torch.from_numpy(np.resize(x, -(-len(x) // BLOCK) * BLOCK))
    found = torch.empty_like(given), torch.empty_like(given)
    rounded_values_test_kernel[(len(given) // BLOCK,)](given, *found, UNIT=unit, BLOCK=BLOCK)
    return found[0].numpy()[: len(x)], found[1].numpy()[: len(x)]


def definition(x: np.ndarray) -> np.ndarray:
    """Return the nearest number of E2M1, of two the one with the even code."""
    above, reached = ((compare(x[:, None], HALFWAY)).sum(-1) for compare in (np.greater, np.greater_equal))
    return VALUES[np.where(above % 2 == 0, above, reached)]


def below_seven() -> np.ndarray:
    """Return 400 neighbours on either side of every number, halfway point and power of two, and any others."""
    places = np.concatenate([VALUES, HALFWAY, 2.0 ** np.arange(-126, 3), [7]]).astype(np.float32).view(np.int32)
    beside = (places[:, None] + np.arange(-400, 401)).ravel()
    others = np.random.default_rng(0).integers(0, np.float32(7).view(np.int32), 1 << 18)
    x = np.concatenate([beside, others]).clip(0).astype(np.int32).view(np.float32)
    return x[x < 7]


@pytest.mark.parametrize("unit", (1.0, 2.0**-14))
def test_what_rounds_to_a_code(unit):
    x = below_seven()
    np.testing.assert_array_equal(rounded(x, unit)[0], definition((x * np.float32(unit)) / np.float32(unit)) * unit)


def test_what_lies_beyond_the_last_code():
    x = np.concatenate([below_seven(), np.float32([6.5, 7, 7.5, 8, 9, 1e3, 2.0**106, 3e38, np.inf])])
    np.testing.assert_array_equal(rounded(x)[1], definition(x))
