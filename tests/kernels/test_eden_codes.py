"""MS-EDEN's device functions in Triton's interpreter: the corrected scale at its edges, and golden vectors."""

from fractions import Fraction

import eden_checks
import numpy as np
import pytest
import quantize_checks as checks
from test_stochastic_codes import CODES

GOLDEN = [case for case in checks.EDEN_VECTORS if case.entry["name"] != "empty"][1::2]


def fused(a, b, c):
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    beside = (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf)))
    return min(beside, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def test_scales_beside_their_thresholds():
    eden_checks.check_stored_codes("cpu")


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.id)
def test_golden(case):
    checks.check_golden(case)


def test_numbers_in_fp16_hold_their_codes():
    """What CODE_PAIR does on a GPU: fp16 has E2M1's steps where its subnormals end."""
    codes = (CODES.astype(np.float16) * np.float16(2.0**-14)).view(np.uint16)
    np.testing.assert_array_equal(codes, 512 * np.arange(8))


def test_scales_on_a_gpu_are_rounded_quotients():
    """The corrections of `stored_code` with PTX, a fused multiply-add in exact arithmetic, against one division."""
    random = np.random.default_rng(5)
    for _ in range(2000):
        products, squares = (np.float32(np.exp(random.uniform(-3, 9))) for _ in range(2))
        reciprocal = np.float32(1) / products
        found = squares * reciprocal
        for _ in range(2):
            rest = fused(-found, products, squares)
            found = fused(reciprocal, rest, found)
        assert found == squares / products
