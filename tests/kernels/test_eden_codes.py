"""MS-EDEN's device functions in Triton's interpreter: the corrected scale at its edges, and golden vectors."""

import eden_checks
import pytest
import quantize_checks as checks

GOLDEN = [case for case in checks.EDEN_VECTORS if case.entry["name"] != "empty"][1::2]


def test_scales_beside_their_thresholds():
    eden_checks.check_stored_codes("cpu")


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.id)
def test_golden(case):
    checks.check_golden(case)
