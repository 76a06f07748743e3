"""Scales chosen by quick errors: the bytes of the reference, and how far quick errors are from the defined ones."""

import itertools

import numpy as np
import pytest
import quick_checks as checks
import torch
import triton
import triton.language as tl

from halfbyte.kernels.device import quick_errors as quick
from halfbyte.kernels.quantize import route

E4M3 = np.array([(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1], np.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bf16") for name in checks.SPECS] + [("rotated-mae", "fp16"), ("rotated-mse", "fp32")],
)
def test_bytes_are_those_of_the_reference(name, dtype):
    checks.check_bytes(name, checks.DTYPES[dtype], torch.device("cpu"))


@pytest.mark.parametrize("name", ["tiles-mae", pytest.param("tiles-mse", marks=pytest.mark.full)])
def test_scales_of_tiles_are_stored_together(name):
    checks.check_tiles_together(name, torch.device("cpu"))


# Of 24 steps in rows of 8 the last 4 are programs of their own, 4 times 2 lie before, and 3 times 4. A row of 6 has no
# place for programs of four, one of 5 none of two.
NEIGHBOURS = [((48, 512), 3, 4), ((32, 384), 0, 4), ((16, 320), 0, 0)]


@pytest.mark.parametrize(
    "name,shape,four,two",
    [("tiles-mae", *NEIGHBOURS[0])]
    + [pytest.param("tiles-mae", *case, marks=pytest.mark.full) for case in NEIGHBOURS[1:]]
    + [pytest.param("tiles-mse", *NEIGHBOURS[0], marks=pytest.mark.full)],
)
def test_neighbours_of_whole_tiles(name, shape, four, two):
    checks.check_neighbours(name, torch.device("cpu"), shape, four, two)


@pytest.mark.parametrize("wave", [4, 4224])
@pytest.mark.parametrize("in_row", [1, 5, 6, 8, 12, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 512])
def test_steps_are_all_taken_and_no_program_leaves_its_row(rows, in_row, wave):
    count = rows * in_row
    four, two = route.shares_by_length(count, in_row, wave)
    lengths = [4] * four + [2] * two + [1] * (count - 4 * four - 2 * two)
    ends = list(itertools.accumulate(lengths))
    assert ends[-1] == count and min(four, two) >= 0
    assert all((end - n) // in_row == (end - 1) // in_row for end, n in zip(ends, lengths, strict=True))
    if in_row % 2 == 0:
        assert len(lengths) - four - two == min(count, wave), "as many short programs as have place at once"


SHAPES = {
    "two": (64, 64),
    "codes": (64, 128),
    "plain": (60, 72),
    "values": (48, 128),
    "rows": (80, 64),
    "columns": (64, 64),
}


@pytest.mark.parametrize("name", checks.PAIRS)
def test_bytes_of_both_orientations_are_those_of_the_reference(name):
    checks.check_pair(name, torch.device("cpu"), SHAPES[name])


@pytest.mark.parametrize("name", ["two", "codes"])
def test_bytes_of_groups_are_those_of_the_defined_errors(name):
    checks.check_groups(name, torch.device("cpu"), (100, 136), (20, 20, 90))


@triton.jit
def quick_error_kernel(x_ptr, step_ptr, out_ptr, SQUARED: tl.constexpr, N: tl.constexpr):
    """out [N] = the quick error of a block x [16, N] of shifted values and a step [N]."""
    block = tl.arange(0, N)
    xs = ()
    for i in tl.static_range(16):
        xs = xs + (tl.load(x_ptr + i * N + block),)  # noqa: RUF005  # Triton knows no other way
    step = tl.load(step_ptr + block)
    one = tl.full((), 1, tl.uint32)
    tl.store(out_ptr + block, quick.quick_error(xs, step, quick.pm.quick_reciprocal(step), one, True, SQUARED))


def blocks_near_ties(random, A, unit, scale):
    """Return |x| [16, N] in fp32: half of it any, half beside the ties between E2M1's numbers, and s [N] in fp64."""
    s = scale.astype(np.float64) * A / unit
    ties = random.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], (16, scale.size))
    near = ties * (1 + random.integers(-40, 41, ties.shape) * 2.0**-24)
    any_value = random.uniform(0, 7.3, ties.shape)
    return np.where(random.random(ties.shape) < 0.5, near, any_value) * s, s


@pytest.mark.parametrize("squares", [False, True])
def test_quick_errors_keep_their_distance(squares):
    """Both errors of a million blocks: the defined one in fp32 as section 5 says it, step by step in numpy."""
    random, worst = np.random.default_rng(3), 0.0
    relative = (quick.SQUARES_RELATIVE if squares else quick.MAGNITUDES_RELATIVE).value
    absolute = (quick.SQUARES_ABSOLUTE if squares else quick.MAGNITUDES_ABSOLUTE).value
    f = np.float32
    for m8 in (448, 256):
        for A in np.exp2(random.uniform(-43, 59, 24)).astype(f):
            unit, N = f(6 * m8), 1 << 13
            scale = random.choice(E4M3, N)
            exact, s = blocks_near_ties(random, A, unit, scale)
            x = exact.astype(f)
            if A % 2 == 0 or random.random() < 0.5:  # half of them bf16, where ties are exact
                x = torch.from_numpy(x).bfloat16().float().numpy()
            S = f(unit / A)
            D = f(1 / S)
            encode = (f(1) / (scale * D).astype(f)).astype(f)
            a = np.minimum((x * encode).astype(f), f(6))
            binade = np.exp2(np.floor(np.log2(np.maximum(a, 1)))).astype(f)
            q = (np.round(a / (binade / 2)) * (binade / 2)).astype(f)
            d = np.abs(((q * scale * A).astype(f) / unit).astype(f) - x)
            defined = np.zeros(N, f)
            for i in range(16):
                defined = defined + (d[i] * d[i] if squares else d[i])
            shift = f(2.0) ** (-30 - int(np.floor(np.log2(A))))
            step = (scale * (D * shift * f(2.0**126))).astype(f)
            out = torch.empty(N)
            given = torch.from_numpy(x * shift), torch.from_numpy(step)
            quick_error_kernel[(1,)](*given, out, SQUARED=squares, N=N)
            unshifted = out.double().numpy() / float(shift) ** (2 if squares else 1)
            allowed = relative / 2 * unshifted + absolute / 2 * (s**2 if squares else s)
            worst = max(worst, float((np.abs(unshifted - defined.astype(np.float64)) / allowed).max()))
    assert 0.05 < worst < 1, "beyond what is taken for certain, or nowhere near it"
