"""Quantize kernels as GPUs run them, PTX and all, beside the reference: no GPU is needed (`make test-targets`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))
SAMPLE = (
    "activation", "activation/values", "gradient", "gradient/loops", "gradient/places", "six_pair/row_values",
    "four_candidates", "four_exact", "rotated_64_rows", "stochastic_128/turned", "eden", "grouped/gradient/loops",
    "sums", "logits", "row", "near", "eden/large", "eden_scales", "eden_magnitudes",
)  # fmt: skip
"""Of what rounds, rotates, draws and chooses scales, one each; `make test-targets-full` runs all."""
OTHERS = {"sm_80": "activation", "sm_89": "gradient", "sm_100": "activation", "sm_120": "six_scaled"}
"""Without FP8, without launches that overlap, with conversions to E2M1, and a case that is in the sample of each."""
ON_OTHERS = (
    "nearest", "activation", "gradient", "six_scaled", "six_pair", "six_pair/values", "eden", "backward",
    "rotated_128/turned", "mxfp8", "four_candidates", "eden_128/turned", "sums", "logits", "row", "near",
)  # fmt: skip
NEAR = "tuple(text.replace({!r}, {!r}) for text in module.DECISIONS.value)"
EDEN = "tuple(text.replace({!r}, {!r}) for text in module.BLOCK.value)"
FAULT = """
import ptx_checks
from halfbyte.kernels.device import {module} as module
import triton.language as tl
changed = {expression}
assert changed != module.{name}.value
module.{name} = tl.constexpr(changed)
print(ptx_checks.check({case!r}, "sm_90") or "equal")
"""


def run(*command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def cases() -> list:
    """Return all cases on sm_90 and some on other targets."""
    import ptx_checks

    assert set(SAMPLE) <= set(ptx_checks.CASES), "a case that is not there would be sampled by nobody"
    found = [("sm_90", case, case in SAMPLE) for case in ptx_checks.CASES]
    found += [(target, case, case == mine) for target, mine in OTHERS.items() for case in ON_OTHERS]
    return [pytest.param(*one, marks=() if is_sample else pytest.mark.full) for *one, is_sample in found]


@pytest.mark.parametrize(("target", "case"), cases())
def test_a_kernel_makes_the_bytes_of_the_reference(target, case):
    assert run(str(TESTS / "ptx_checks.py"), target, case) == f"{case} on {target}: equal"


@pytest.mark.parametrize(
    ("module", "name", "expression", "case"),
    [
        ("nearest", "LIMIT_PAIRS", "module.LIMIT_PAIRS.value.replace('0f00C00000', '0f0082AB1E')", "nearest"),
        ("near_errors", "DECISIONS", NEAR.format("6175", "31"), "near"),
        *(
            pytest.param("near_errors", "DECISIONS", NEAR.format(*others), "near", marks=pytest.mark.full)
            for others in (("setp.lt.or", "setp.le.or"), ("add.u32 t, left, -1", "mov.u32 t, 0"))
        ),
        *(
            pytest.param("eden", "BLOCK", EDEN.format(*others), "eden_scales", marks=marks)
            for others, marks in (
                (("0f39E00000", "0f3A000000"), ()),  # what a y reaches where it has to be held: 8 in place of 7
                (("0f3D000000", "0f3B800000"), pytest.mark.full),  # below which a scale may be subnormal: 2^-8
                (("0x40FFFFFF", "0x40FFFFFE"), pytest.mark.full),
            )
        ),
        ("philox", "LOW_BLOCKS", "module.LOW_BLOCKS.value << 1", "gradient/places"),
        ("casts", "MAX_OF_HALVES", "module.MAX_OF_HALVES.value.replace('0x1032', '0x3210')", "nearest"),
    ],
)
def test_a_fault_is_seen(module, name, expression, case):
    script = FAULT.format(module=module, name=name, expression=expression, case=case)
    assert run("-c", script).startswith("['")


STORES_NOTHING = """
import ptx_checks, ptx_emulator
ptx_emulator._Machine._move_bytes = lambda self, name, *rest, move=ptx_emulator._Machine._move_bytes: (
    None if name == "st" and rest[0].base is not self.shared else move(self, name, *rest)
)
print(ptx_checks.check("nearest", "sm_90") or "equal")
"""
LAUNCHES_NOTHING = """
import ptx_checks
from halfbyte import ops
from halfbyte.kernels.quantize import one
one.quantize_side = lambda x, side: ops.quantize(x, side, backend="reference")
print(ptx_checks.check("nearest", "sm_90")[0])
"""


def test_what_is_not_stored_or_not_launched_is_seen():
    assert run("-c", STORES_NOTHING).startswith("['whole: ")
    assert run("-c", LAUNCHES_NOTHING) == "whole: no kernel was launched"


SMALLER_TILES = """
import ptx_requests
from halfbyte.kernels.quantize import both_route
both_route.tile_for = lambda row, col: both_route.PairTile(32, 64, 2)
print(ptx_requests.requests("gradient").written)
"""


def test_requests_are_a_line_for_each_row_and_column_of_a_tile():
    lines = run(str(TESTS / "ptx_requests.py"), "gradient", "activation").splitlines()
    tiles = {"gradient": (64, 64), "activation": (64, 128)}
    for line, (case, (rows, cols)) in zip(lines, tiles.items(), strict=True):
        name, first, _, written = re.fullmatch(
            r"(\w+): ([\d.]+) read, ([\d.]+) read again, ([\d.]+) written", line
        ).groups()
        assert name == case
        assert 0 <= float(first) - 1024 * 2 / 128 < 1  # x once, amaxes and draws
        assert float(written) == 1024 * (2 / rows + 2 / cols)  # codes and scales both ways
    assert float(run("-c", SMALLER_TILES)) == 1024 * (2 / 32 + 2 / 64)


@pytest.mark.parametrize(
    ("name", "modifiers"), [("add", "rn.ftz.f32"), ("mul", "rn.sat.f32"), ("fma", "rn.ftz.f32"), ("min", "ftz.f32")]
)
def test_modifiers_that_are_not_emulated_are_refused(name, modifiers):
    from ptx_arithmetic import FUNCTIONS

    with pytest.raises(NotImplementedError, match=f"PTX modifiers {modifiers} are not emulated"):
        FUNCTIONS[name](modifiers.split("."), [0, 0, 0])


def test_pairs_of_fp32_are_two_numbers():
    import numpy as np
    from ptx_arithmetic import FUNCTIONS

    words = [np.array([low, high], np.float32).view(np.uint64) for low, high in ((3, -0.0), (5, 2), (0.25, -0.0))]
    for name, expected in (("add", (8, 2)), ("sub", (-2, -2)), ("mul", (15, -0.0)), ("fma", (15.25, -0.0))):
        given = words if name == "fma" else words[:2]
        found = FUNCTIONS[name](["rn", "f32x2"], given)
        assert found.tobytes() == np.array(expected, np.float32).tobytes(), name
