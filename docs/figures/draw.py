"""The figures of docs/concepts.md, of tensors that this library quantizes: python docs/figures/draw.py [FOLDER].

The tensors are those of tensors.safetensors (capture.py says where they come from). Quantization is defined to the last
bit, and sums are taken in fp64 and shown with few digits, so every machine draws the same files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from svg import WIDTH, Drawing, Plot

import halfbyte as hb
from halfbyte.formats import E2M1
from halfbyte.reference.hadamard import rotate

HERE = Path(__file__).parent
OUT = HERE.parent / "assets" / "concepts"
TENSORS = {name: tensor.float() for name, tensor in load_file(HERE / "tensors.safetensors").items()}
GRID = [E2M1.decode(code) for code in range(8)]
NEAREST, TILES = hb.NVFP4(), hb.NVFP4(block=(16, 16))
SIX = hb.NVFP4(e4m3_max=256.0)
FOUR_OVER_SIX = hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0)


def values(x: torch.Tensor, spec: hb.NVFP4 = NEAREST, rng: hb.Philox | None = None) -> torch.Tensor:
    """Return what is left of x after quantization, fp32."""
    return hb.quantize(x, spec, rng=rng).dequantize(torch.float32)


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


def scales(x: torch.Tensor, spec: hb.NVFP4 = NEAREST) -> torch.Tensor:
    """Return the factor that decodes each block, fp32 [rows, blocks]: block scale times outer scale."""
    q = hb.quantize(x, spec)
    return q.block_scale.view(torch.float8_e4m3fn).float() * (q.amax / (spec.e4m3_max * spec.fp4_max))


def grid() -> Drawing:
    """E2M1's eight magnitudes, and where each number between them goes."""
    drawing = Drawing(250, "A staircase: numbers from 0 to 7 and the E2M1 magnitude that each is rounded to")
    plot = Plot(drawing=drawing, left=60, top=20, width=660, height=190, x=(0, 7), y=(0, 6.4))
    plot.ticks(GRID)
    x = torch.arange(0, 7, 1 / 64)
    rows = torch.cat(
        (x.view(-1, 1), torch.full((len(x), 1), 6.0), torch.zeros(len(x), 14)), dim=1
    )  # 6 makes the scale 1
    fixed = hb.quantize(rows, NEAREST, amax=torch.tensor(448 * 6.0))
    plot.line(x.tolist(), fixed.dequantize(torch.float32)[:, 0].clamp(max=6).tolist(), "a-line")
    plot.line([0, 6.4], [0, 6.4], "plain-line dashed")
    for value in GRID:
        drawing.dot(*plot.at(value, value), "b")
        drawing.text(plot.at(value, 0)[0], 232, f"{value:g}", "small", "middle")
    drawing.text(plot.at(5, 0)[0], 246, "a gap of 2", "small", "middle")
    return drawing


def block() -> Drawing:
    """16 neighbours, the scale that they share, and what is left of them."""
    row, column = 5, 48
    x = TENSORS["w"][row : row + 1]
    kept, scale = values(x)[0, column : column + 16], float(scales(x)[0, column // 16])
    original = x[0, column : column + 16]
    most = float(original.abs().max())
    drawing = Drawing(270, "Bars of 16 weights and of the values that their E2M1 codes and shared scale stand for")
    plot = Plot(drawing=drawing, left=70, top=30, width=660, height=200, x=(-0.3, 15.9), y=(-1.1 * most, 1.1 * most))
    for magnitude in GRID:
        for sign in (1, -1):
            (left, y), right = plot.at(-0.3, sign * magnitude * scale), plot.left + plot.width
            drawing.line(left, y, right, y, "faint")
            if magnitude >= 2 or sign * magnitude == 0 < sign:
                drawing.text(left - 6, y + 4, f"{sign * magnitude:g}", "small", "end")
    plot.bars(original.tolist(), "plain")
    plot.bars(kept.tolist(), "a", shift=0.32)
    drawing.text(70, 18, "16 weights", "bold")
    drawing.text(170, 18, f"and their codes times the scale {scale:.5f}, which maps the largest, {most:.4f}, to 6", "")
    drawing.text(70, 258, f"relative error of this block {relative_error(original, kept):.3f}", "small")
    return drawing


def two_levels() -> Drawing:
    """Maxima of the blocks of a gradient, and what an E4M3 scale reaches with and without the outer one."""
    dy = TENSORS["dy"]
    amax = float(dy.abs().max())
    wanted = (dy.view(-1, 16).abs().amax(1) / 6).log2().sort().values
    outer = torch.log2(torch.tensor(amax / 2688)).item()
    drawing = Drawing(
        300, "Scales that the blocks of a gradient need, and the reach of E4M3 with and without the outer scale"
    )
    plot = Plot(drawing=drawing, left=70, top=34, width=430, height=236, x=(0, len(wanted)), y=(-31, 11))
    plot.ticks(range(-30, 11, 10), "2^{}")
    plot.line(range(len(wanted)), wanted.tolist(), "b-line")
    below = float((wanted < -9).double().mean())
    for low, high, left, css, name in (
        (-9.0, 8.81, 520, "pale", "E4M3 alone"),
        (outer - 9, outer + 8.81, 640, "a", "with the amax"),
    ):
        top, bottom = plot.at(0, high)[1], plot.at(0, low)[1]
        drawing.box(left, top, 60, bottom - top, css)
        drawing.text(left + 30, plot.top + plot.height + 16, name, "small", "middle")
    drawing.text(70, 20, f"scales that {len(wanted)} blocks of a gradient need, sorted", "bold")
    drawing.text(70, 296, f"{100 * below:.0f} % of them are too small for E4M3 alone", "small")
    return drawing


def outlier_group() -> torch.Tensor:
    """Return the 16 tokens of one feature of x whose largest stands out most."""
    groups = TENSORS["x"].T.reshape(-1, 16)
    return groups[(groups.abs().amax(1) / groups.norm(dim=1)).argmax()]


def rotation() -> Drawing:
    """What the random Hadamard transform does to a block with an outlier."""
    x = outlier_group()[None]
    spec = hb.NVFP4(rotation=hb.Hadamard())
    kept, turned, y = values(x), values(x, spec), rotate(x, spec.rotation).float()
    drawing = Drawing(280, "A block with an outlier and its rotation, each with what quantization leaves of it")
    for left, original, left_over, title in ((50, x, kept, "as it is"), (420, y, turned, "rotated")):
        most = float(original.abs().max())
        plot = Plot(drawing=drawing, left=left, top=40, width=320, height=190, x=(0, 16), y=(-1.05 * most, 1.05 * most))
        zero = plot.at(0, 0)[1]
        drawing.line(left, zero, left + 320, zero, "faint")
        plot.bars(original[0].tolist(), "plain", width=0.4)
        plot.bars(left_over[0].tolist(), "a", shift=0.44, width=0.4)
        lost = int(((left_over == 0) & (original != 0)).sum())
        drawing.text(left, 22, f"{title}: largest {most:.2f}", "bold")
        drawing.text(left, 254, f"{lost} of 16 become zero", "small")
        drawing.text(
            left,
            270,
            f"error of the small ones {relative_error(small(original), small(left_over, original)):.2f}",
            "small",
        )
    return drawing


def small(values_: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    """Return a block without its largest element, that of `by` if given."""
    largest = (values_ if by is None else by).abs().argmax()
    return torch.cat((values_.flatten()[:largest], values_.flatten()[largest + 1 :]))


def rounding() -> Drawing:
    """The same small gradient, added up over many steps."""
    steps, dy = 2000, TENSORS["dy"][:1, :128]
    nearest = values(dy)
    at = int(torch.where(nearest[0] == 0, dy[0].abs(), 0.0).argmax())  # the largest that nearest makes zero
    truth = float(dy[0, at])
    stochastic = hb.NVFP4(rounding="stochastic")
    drawn = [float(values(dy, stochastic, hb.Philox(1, step))[0, at]) for step in range(steps)]
    sums = torch.tensor(drawn, dtype=torch.float64).cumsum(0) / truth
    drawing = Drawing(
        290, "Sums of a small gradient over 2000 steps: exact, rounded stochastically, rounded to nearest"
    )
    plot = Plot(drawing=drawing, left=60, top=20, width=560, height=230, x=(0, steps), y=(-100, 2200))
    plot.ticks((0, 500, 1000, 1500, 2000))
    plot.line((0, steps), (0, steps), "plain-line dashed")
    plot.line(range(0, steps, 8), sums[::8].tolist(), "b-line")
    plot.line((0, steps), (0, 0), "a-line")
    drawing.text(630, plot.at(0, float(sums[-1]))[1] + 10, "stochastic", "small")
    drawing.text(630, plot.at(0, steps)[1] - 6, "exact", "small")
    drawing.text(630, plot.at(0, 0)[1] + 4, "nearest", "small")
    drawing.text(60, 278, "steps; the sum in units of the gradient", "small")
    return drawing


def tiles() -> Drawing:
    """A tile of a weight, quantized along rows and along columns."""
    w = TENSORS["w"][:, :128]
    drawing = Drawing(
        260, "How far the row and the column orientation of a weight are apart, in blocks of 1x16 and in 16x16 tiles"
    )
    for left, spec, title in ((60, NEAREST, "1×16"), (420, TILES, "16×16")):
        row, column = values(w, spec), values(w.T.contiguous(), spec).T
        apart = (row - column)[:16, :16].abs() / w[:16, :16].abs().max()
        for i in range(16):
            for j in range(16):
                drawing.box(left + 12 * j, 40 + 12 * i, 11, 11, "pale")
                if apart[i, j] > 0:
                    side = 11 * min(1.0, 0.25 + 6 * float(apart[i, j]))
                    drawing.box(left + 12 * j + (11 - side) / 2, 40 + 12 * i + (11 - side) / 2, side, side, "b")
        share = float((row != column).double().mean())
        drawing.text(left, 24, f"{title}: {100 * share:.0f} % of the values differ", "bold")
        drawing.text(left, 252, f"error of the weight {relative_error(w, row):.3f}", "small")
    return drawing


def four_over_six() -> Drawing:
    """A block whose maximum is better mapped to 4 than to 6."""
    x = TENSORS["x"]
    six, chosen = values(x, SIX).view(-1, 16), values(x, FOUR_OVER_SIX).view(-1, 16)
    blocks = x.view(-1, 16)
    gain = (six - blocks).abs().double().sum(1) - (chosen - blocks).abs().double().sum(1)
    index = int((gain / blocks.abs().double().sum(1).clamp_min(0.5)).argmax())
    share = float((scales(x, FOUR_OVER_SIX) > 1.2 * scales(x, SIX)).double().mean())
    drawing = Drawing(270, "Errors of the 16 elements of a block with its maximum mapped to 6 and to 4")
    errors = [(kept[index] - blocks[index]).abs() for kept in (six, chosen)]
    most = float(torch.cat(errors).max())
    plot = Plot(drawing=drawing, left=60, top=50, width=660, height=170, x=(0, 16), y=(0, 1.05 * most))
    plot.bars(errors[0].tolist(), "plain", shift=0.1, width=0.38)
    plot.bars(errors[1].tolist(), "a", shift=0.52, width=0.38)
    drawing.line(60, 220, 720, 220)
    for i, value in enumerate(blocks[index].tolist()):
        drawing.text(plot.at(i + 0.5, 0)[0], 236, f"{value:.2f}", "small", "middle")
    to_six, to_four = (float(error.double().sum()) for error in errors)
    drawing.text(60, 22, f"maximum to 6: error {to_six:.3f}", "bold")
    drawing.text(300, 22, f"maximum to 4: error {to_four:.3f}, chosen", "bold")
    drawing.text(60, 260, f"{100 * share:.0f} % of the blocks of this activation take 4", "small")
    return drawing


def matrix(drawing: Drawing, at: tuple[float, float], size: tuple[int, int], spec: hb.NVFP4 | None, name: str) -> None:
    """Draw an operand [rows, contraction] with its blocks: strips along the contraction, or tiles."""
    (left, top), (rows, cols) = at, size
    tall = 1 if spec is not None and spec.block == (1, 16) else 2
    for i in range(0, rows, tall):
        for j in range(0, cols, 2):
            drawing.box(left + 15 * j + 1, top + 15 * i + 1, 28, 15 * tall - 2, "a" if tall == 1 else "c")
    drawing.text(left, top - 8, name, "small")


def gemms() -> Drawing:
    """The three GEMMs of the recipe `nvfp4`: what each sums over, and how its operands lie."""
    recipe = hb.recipes.nvfp4()
    m, n, k = 8, 4, 6
    drawing = Drawing(
        330,
        "The three GEMMs of a linear layer: in each, the blocks of both operands lie along what it sums over",
    )
    rows = (
        ("fprop  y = x · wᵀ", recipe.fprop, ("x [M, K]", (m, k)), ("w [N, K]", (n, k)), "sums over K, features in"),
        ("dgrad  dx = dy · w", recipe.dgrad, ("dy [M, N]", (m, n)), ("wᵀ [K, N]", (k, n)), "sums over N, features out"),
        ("wgrad  dw = dyᵀ · x", recipe.wgrad, ("dyᵀ [N, M]", (n, m)), ("xᵀ [K, M]", (k, m)), "sums over M, tokens"),
    )
    for index, (title, gemm, a, b, note) in enumerate(rows):
        left = 20 + 245 * index
        drawing.text(left, 22, title, "bold")
        drawing.text(left, 40, note, "small")
        for (name, size), spec, top in ((a, gemm.a, 80), (b, gemm.b, 230)):
            notes = [
                word
                for word, says in (("stochastic", spec.rounding == "stochastic"), ("rotated", spec.rotation))
                if says
            ]
            matrix(drawing, (left, top), size, spec, " · ".join((name, *notes)))
    assert drawing.height < WIDTH
    return drawing


def orientations() -> Drawing:
    """Which values of an activation become zero in blocks along features, and in blocks along tokens."""
    x, rows, cols, side, top = TENSORS["x"], 32, 48, 7, 48
    loudest = int(x.double().square().sum(0).argmax())
    first = min(max(0, loudest // 16 * 16 - 16), x.shape[1] - cols)
    lost = [(kept == 0) & (x != 0) for kept in (values(x), values(x.T.contiguous()).T)]
    drawing = Drawing(324, "Values of an activation that become zero in blocks along features and along tokens")
    for left, gone, (tall, wide), title, note in (
        (20, lost[0], (1, 16), "row: blocks along features", "for fprop"),
        (390, lost[1], (16, 1), "col: blocks along tokens", "for wgrad"),
    ):
        drawing.text(left, 20, title, "bold")
        drawing.text(left, 37, f"{note}; {100 * float(gone.double().mean()):.0f} % of all values become zero", "small")
        for i in range(0, rows, tall):
            for j in range(0, cols, wide):
                drawing.box(left + side * j, top + side * i, side * wide - 1, side * tall - 1, "pale")
        for i, j in gone[:rows, first : first + cols].nonzero().tolist():
            drawing.box(left + side * j + 1, top + side * i + 1, side - 3, side - 3, "b")
        at = left + side * (loudest - first) + side / 2
        drawing.text(at, top + side * rows + 16, f"feature {loudest}, the loudest", "small", "middle")
    drawing.text(20, 314, f"{rows} tokens, one a line, and {cols} features; a block is grey in one piece", "small")
    return drawing


FIGURES = (grid, block, two_levels, rotation, rounding, tiles, four_over_six, gemms, orientations)


def main(out: Path = OUT) -> None:
    """Draw every figure into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        figure().save(out / f"{figure.__name__}.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
