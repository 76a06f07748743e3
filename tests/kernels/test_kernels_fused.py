"""Norm and activation kernels against the reference in Triton's interpreter, bit for bit."""

from itertools import product

import fused_checks as checks
import pytest
import torch

from halfbyte.arithmetic import FUNCTIONS, Normed
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.fused import norm_gradient
from halfbyte.kernels.launch import watching
from halfbyte.spec import NVFP4, Hadamard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = ((BF16, BF16), (FP32, BF16), (FP32, FP32))


@pytest.mark.parametrize("wish", checks.WISHES)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm(centered, wish):
    for dtypes in DTYPES:
        checks.check_norm((5, 40), "cpu", checks.WISHES[wish], centered, dtypes)


def test_signs_that_are_given():
    checks.check_norm((18, 40), "cpu", checks.GIVEN, False, (BF16, BF16), bad=True)
    checks.check_norm((5, 40), "cpu", checks.GIVEN, True, (FP32, BF16))


def test_norm_of_several_groups_and_lanes():
    checks.check_norm((18, 530), "cpu", checks.ROTATED, True, (BF16, BF16))
    checks.check_norm((33, 530), "cpu", checks.BY_ROW, False, (FP32, FP32))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm_of_whole_tiles(centered):
    checks.check_norm((32, 1024), "cpu", checks.ROTATED, centered, (BF16, BF16))
    checks.check_norm((32, 3072), "cpu", checks.PLAIN, centered, (BF16, BF16))
    checks.check_norm((16, 5120), "cpu", checks.PLAIN, centered, (BF16, FP32))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_gradients_of_rows_that_a_program_holds(centered):
    """Even widths and odd ones, in whole tiles of lanes or not; groups of rows that are not whole; streams of fp32."""
    for shape in ((18, 40), (18, 41), (16, 512), (18, 1024), (33, 768), (17, 1026)):
        for dtypes in ((BF16, BF16, BF16), (BF16, FP32, BF16), (FP16, FP16, FP16)):
            checks.check_residual(shape, "cpu", checks.NOTHING, centered, dtypes, bad=shape[0] == 18)
    checks.check_norm((17, 1025), "cpu", checks.NOTHING, centered, (FP32, BF16))
    checks.check_norm((16, 1536), "cpu", checks.NOTHING, centered, (BF16, FP32))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_gradients_of_other_rows(centered):
    """Wider than a program holds: whole groups of whole tiles and not."""
    for shape in ((16, 4608), (16, 4612), (5, 4612), (3, 4099)):
        checks.check_residual(shape, "cpu", checks.NOTHING, centered, (BF16, BF16, BF16), bad=shape[0] == 5)
    checks.check_norm((18, 4612), "cpu", checks.NOTHING, centered, (FP32, BF16))


def launched_for(
    monkeypatch, cols: int, dtype=BF16, misplaced: str = "", centered: bool = False
) -> tuple[str, bool | None, bool | int]:
    """Return which kernel takes the gradient of a norm of 16 rows, if in words, and what it loads ahead.

    misplaced: the tensor that begins within a word.
    """
    seen = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **options: seen.append((self.name, options.get("PAIRED"), options["AHEAD"]))

    def tensor(name):
        room = torch.randn(16 * cols + 1).to(dtype)
        return (room[1:] if name == misplaced else room[:-1]).view(16, cols)

    for name in ("norm_backward_kernel", "norm_backward_held_kernel", "group_sum_kernel"):
        monkeypatch.setattr(norm_gradient, name, Kernel(name))
    statistics = torch.empty(0), torch.ones(16)
    normed = Normed(tensor("x"), torch.ones(cols, dtype=dtype), statistics, centered, centered)
    norm_gradient.norm_backward(tensor("dy"), normed, tensor("dtotal"))
    assert len(seen) == 2 and seen[1][0] == "group_sum_kernel"
    return seen[0]


def test_rows_are_held_where_they_fit_and_in_words_where_they_are_words(monkeypatch):
    for cols in (2, 512, 4096):
        assert launched_for(monkeypatch, cols)[:2] == ("norm_backward_held_kernel", True), cols
        assert launched_for(monkeypatch, cols, FP32)[:2] == ("norm_backward_held_kernel", False), cols
    for cols in (1, 513, 4095):
        assert launched_for(monkeypatch, cols)[:2] == ("norm_backward_held_kernel", False), cols
    for cols in (4097, 8192):
        assert launched_for(monkeypatch, cols)[:2] == ("norm_backward_kernel", None), cols
    for name in ("x", "dy", "dtotal"):
        assert launched_for(monkeypatch, 512, misplaced=name)[:2] == ("norm_backward_held_kernel", False), name


def test_the_next_row_is_loaded_ahead_where_that_was_faster(monkeypatch):
    """docs/internals/fused.md has the times."""
    rms = {cols: launched_for(monkeypatch, cols)[2] for cols in (512, 768, 1024, 1030, 2048, 4096)}
    assert rms == {512: True, 768: False, 1024: True, 1030: False, 2048: True, 4096: True}
    layer = {cols: launched_for(monkeypatch, cols, centered=True)[2] for cols in (40, 512, 768, 1024, 4096)}
    assert layer == {40: False, 512: False, 768: True, 1024: True, 4096: True}


@pytest.mark.parametrize("wish", checks.WISHES)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm_of_a_sum(centered, wish):
    for dtypes in ((BF16, BF16, BF16), (FP16, FP16, FP16), (FP32, FP32, BF16), (BF16, FP32, BF16)):
        checks.check_residual((5, 40), "cpu", checks.WISHES[wish], centered, dtypes)


def test_norm_of_a_sum_of_several_groups_and_lanes():
    checks.check_residual((18, 530), "cpu", checks.ROTATED, True, (BF16, BF16, BF16))
    checks.check_residual((33, 2600), "cpu", checks.PLAIN, False, (BF16, BF16, BF16))
    checks.check_residual((33, 530), "cpu", checks.BY_ROW, False, (FP32, BF16, FP32))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm_of_a_sum_of_whole_tiles(centered):
    checks.check_residual((32, 1024), "cpu", checks.ROTATED, centered, (BF16, BF16, BF16))
    checks.check_residual((16, 5120), "cpu", checks.NOTHING, centered, (BF16, FP32, FP32))


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
def test_last_tile_that_does_columns_again(bad):
    """Whole groups of rows, and columns that are no multiple of a tile: it begins before the one before it ends."""
    checks.check_residual((16, 600), "cpu", checks.ROTATED, False, (BF16, FP32, BF16), bad=bad)
    checks.check_residual((16, 768), "cpu", checks.BY_ROW, True, (BF16, BF16, BF16), bad=bad)
    checks.check_norm((16, 1100), "cpu", checks.ROTATED, False, (BF16, BF16), bad=bad)
    checks.check_activation((16, 1290), "cpu", checks.ROTATED, "silu", True, BF16, bad=bad)
    checks.check_activation((16, 650), "cpu", checks.BY_ROW, "relu2", False, FP32, bad=bad)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm_of_a_sum_that_is_not_finite(centered, dtype):
    checks.check_residual((18, 40), "cpu", checks.ROTATED, centered, (dtype, dtype, dtype), bad=True)


@pytest.mark.parametrize("wish", checks.WISHES)
def test_not_finite_values_stay_out_of_the_amaxes(wish):
    checks.check_norm((18, 40), "cpu", checks.WISHES[wish], False, (BF16, BF16), bad=True)
    checks.check_activation((18, 40), "cpu", checks.WISHES[wish], "silu", True, BF16, bad=True)


@pytest.mark.parametrize("gated", [False, True], ids=["alone", "gated"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_activation(function, gated):
    for dtype in (BF16, FP32):
        checks.check_activation((5, 40), "cpu", checks.ROTATED, function, gated, dtype)


@pytest.mark.parametrize("wish", checks.WISHES)
def test_activation_of_several_tiles(wish):
    checks.check_activation((17, 530), "cpu", checks.WISHES[wish], "relu2", True, BF16)


@pytest.mark.parametrize("wish", checks.WISHES)
def test_activation_of_whole_tiles(wish):
    checks.check_activation((32, 512), "cpu", checks.WISHES[wish], "silu", True, BF16)


class Launches(list):
    """All that are told."""

    def launched(self, launch):
        self.append((launch.kernel.__name__, getattr(launch.arguments.get("WANTED"), "group", None)))


def launches_of(wish: checks.Wish) -> tuple[set[str], set[int]]:
    """Return what a norm and an activation launch there and back, and how many rows those hold that collect maxima."""
    with watching(launches := Launches()):
        checks.check_norm((18, 40), "cpu", wish, False, (BF16, BF16))
        checks.check_activation((18, 40), "cpu", wish, "silu", True, BF16)
    return {name for name, _ in launches}, {rows for _, rows in launches if rows is not None}


def test_no_kernel_holds_the_rows_of_a_wide_rotation():
    """For 64 the assembler spills, for 128 compilers take half an hour."""
    for size, signs in product((64, 128), ("fixed", "fresh")):
        wish = checks.Wish("tensor", NVFP4(rotation=Hadamard(size=size, signs=signs)))
        names, rows = launches_of(wish)
        assert rows == {16} and "amax_rotated_kernel" in names
    names, rows = launches_of(checks.Wish("row", checks.FRESH))
    assert rows == {32} and "amax_rotated_kernel" not in names


def test_the_workspace_is_left_as_zeros():
    """The next launch starts from it."""
    checks.check_activation((19, 40), "cpu", checks.ROTATED, "silu", True, BF16)
    assert not rm.workspace(rm.wanted_of(*checks.ROTATED), torch.device("cpu")).any()


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_empty_tensors_are_never_launched(shape, monkeypatch):
    for module, name in ((checks.norm, "norm_kernel"), (checks.activation, "activation_kernel")):
        monkeypatch.setattr(module, name, None)
    x = torch.zeros(shape)
    arguments = x, (torch.ones(shape[1]), None), (1e-5, False, FP32), "tensor", None, None
    y, total, _, amaxes = checks.norm.norm_with_amaxes(*arguments)
    assert y.shape == shape and total is None and amaxes[0] == 0
    y, total, _, amaxes = checks.norm.norm_with_amaxes(*arguments, x.bfloat16())
    assert y.shape == total.shape == shape and total.dtype == FP32 and amaxes[0] == 0
    for col in (checks.RHT, checks.WIDE.col):
        h, amaxes = checks.activation.activation_with_amaxes(x, x, "silu", "tensor", col, checks.PLACE)
        assert h.shape == shape and amaxes[0] == amaxes[1] == 0
