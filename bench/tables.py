"""Every figure of the docs that comes from bench/results: `python -m bench.tables` prints them, `--write` renews pages.

A page holds a table between `<!-- results: NAME -->` and `<!-- /results -->`; tests/bench/test_tables.py compares them.
Which record counts is said in bench/records.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType

from bench import (
    computed_tables,
    counters_tables,
    full_size_tables,
    gather_tables,
    instructions,
    keep,
    listing_tables,
    lora_tables,
    loss_tables,
    machines,
    parallel_tables,
    qat,
    several_tables,
    study_tables,
    zero_tables,
)
from bench.markdown import percent, recorded, rows
from bench.records import Record, counting, failed, load
from bench.registry import Shape

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->)(.*?)(<!-- /results -->)", re.DOTALL)
WIDE: tuple[Shape, ...] = ((8192, 8192), (16384, 8192))
EXPERTS: tuple[Shape, ...] = ((8, 32768, 7168, 2048), (64, 32768, 7168, 2048))
SMALL_GROUPS: tuple[Shape, ...] = ((60, 8192, 2048, 1408),)
Renderer = Callable[[Sequence[Record]], str]

KERNELS = (
    ("1×16 nearest", "quantize/1x16"),
    ("1×16 nearest, SWIZZLED scales", "quantize/1x16-swizzled"),
    ("1×16 nearest, an amax a row", "quantize/1x16-row-scaled"),
    ("16×16 nearest", "quantize/16x16"),
    ("MXFP8 E4M3", "quantize/mxfp8"),
    ("1×16 stochastic", "quantize/1x16-sr"),
    ("4over6 MAE, exact error", "quantize/4over6"),
    ("4over6 MAE, scaled error", "quantize/4over6-scaled"),
    ("4over6 MAE, exact error, 16×16", "quantize/4over6-16x16"),
    ("four candidates, likewise", "quantize/search"),
    ("four candidates, 16×16", "quantize/search-16x16"),
    ("rotation of 16", "quantize/rht16"),
    ("rotation of 32", "quantize/rht32"),
    ("rotation of 64", "quantize/rht64"),
    ("rotation of 128", "quantize/rht128"),
    ("row + rotated column, nearest", "row_col/1x16+rht"),
    ("row + rotated column, stochastic", "row_col/sr+sr-rht"),
    ("row, nearest + rotated column, stochastic", "row_col/1x16+sr-rht"),
    ("row + column, an amax of each", "row_col/row-scaled"),
    ("row as values + rotated column, nearest", "row_col/1x16+rht-values"),
    ("row + rotated column, both as values, stochastic", "row_col/sr+sr-rht-values"),
    ("NVFP4 row + MXFP8 column", "row_col/1x16+mxfp8"),
    ("16×16 in both orientations, codes", "row_col/16x16"),
    ("MS-EDEN", "quantize/eden"),
    ("MS-EDEN rotated by 128, fresh signs", "quantize/eden-rht128"),
    ("the same of x.T", "quantize/eden-rht128-col"),
    ("MS-EDEN row + column rotated by 16", "row_col/eden+eden-rht"),
    ("MS-EDEN in both orientations as in quartet2", "row_col/eden-rht128"),
    ("amax", "amax/tensor"),
    ("amax of x and of the rotated columns, one pass", "amax/tensor+rht"),
    ("dequantize", "dequantize/linear"),
    ("dequantize, SWIZZLED scales", "dequantize/swizzled"),
    ("dequantize MXFP8", "dequantize/mxfp8"),
    ("packed transpose", "transpose/16x16"),
)
UNPACK = tuple(line for line in KERNELS if line[1].startswith(("dequantize/", "transpose/")))
MAXIMA = tuple(line for line in KERNELS if line[1].startswith("amax/"))
WIDE_ROTATIONS = tuple(line for line in KERNELS if line[1] in ("quantize/rht64", "quantize/rht128"))
WIDTHS = (
    ("1×16 nearest", "quantize/1x16"),
    ("16×16 nearest", "quantize/16x16"),
    ("16×16 in both orientations", "row_col/16x16"),
    ("NVFP4 row + MXFP8 column", "row_col/1x16+mxfp8"),
    ("dequantize", "dequantize/linear"),
    ("packed transpose", "transpose/16x16"),
)
GROUPED = (
    ("activations, row and rotated column, codes", "grouped/quantize-tokens"),
    ("gradients, stochastic, both as codes", "grouped/quantize-gradient"),
    ("gradients, MS-EDEN as in quartet2", "grouped/quantize-eden"),
    ("weights, 16×16, row and column as codes", "grouped/quantize-experts"),
    ("swizzle of rows", "grouped/swizzle-rows"),
    ("swizzle along the contraction", "grouped/swizzle-contraction"),
    ("swizzle of experts", "grouped/swizzle-experts"),
    ("fprop, times the rate of `torch._grouped_mm`", "grouped/fprop"),
    ("dgrad, likewise", "grouped/dgrad"),
    ("wgrad, likewise", "grouped/wgrad"),
    ("layer, forward and backward, recipe `nvfp4`, times bf16", "grouped/linear-nvfp4"),
    ("the same, weights cached", "grouped/linear-nvfp4-cached"),
    ("the same, recipe `nvfp4_mxfp8_bwd`", "grouped/linear-nvfp4_mxfp8_bwd"),
    ("the same, recipe `four_over_six`", "grouped/linear-four_over_six"),
)
FUSED = (
    ("RMSNorm with both amaxes", "fused/rmsnorm"),
    ("its backward", "fused/rmsnorm-backward"),
    ("SwiGLU with both amaxes", "fused/swiglu"),
    ("its backward, amaxes of both gradients", "fused/swiglu-backward"),
    ("LayerNormMLP, forward and backward, recipe `nvfp4`, times bf16", "fused/mlp-nvfp4"),
    ("the same, recipe `nvfp4_mxfp8_bwd`", "fused/mlp-nvfp4_mxfp8_bwd"),
    ("the same, recipe `mxfp8`", "fused/mlp-mxfp8"),
    ("the same, recipe `nvfp4_forward`", "fused/mlp-nvfp4_forward"),
)
LAYERS = (
    ("GEMM, operands decoded before, of cuBLAS's bf16 rate", "gemm/decoded"),
    ("GEMM, decoding included, likewise", "gemm/from-codes"),
    ("linear layer, forward + backward, `nvfp4`, times bf16", "linear/nvfp4"),
    ("the same, recipe `nvfp4_mxfp8_bwd`", "linear/nvfp4_mxfp8_bwd"),
    ("the same, recipe `nvfp4_forward`", "linear/nvfp4_forward"),
    ("the mean over tokens split off, times `nvfp4`", "linear/mean-split"),
    ("a stochastic x for the backward, likewise", "linear/saved-stochastic"),
    ("four candidate scales of weights", "linear/scale-search"),
    ("an amax a row of all six operands", "linear/row-scaled"),
    ("5 % of the channels in MXFP8", "linear/outlier-channels"),
    ("rounding errors of 5 % of the channels", "linear/hot-channels"),
    ("small layer, CUDA graph, codes of w cached, times bf16", "linear/small-cached"),
    ("the same, cached as values", "linear/small-decoded"),
)
HOST = (
    ("`hb.nn.Linear` nvfp4, forward + backward", "host/linear-nvfp4"),
    ("the same, forward without gradients", "host/eval-nvfp4"),
    ("four_over_six, forward + backward", "host/linear-four_over_six"),
    ("nvfp4_mxfp8_bwd", "host/linear-nvfp4_mxfp8_bwd"),
    ("`LayerNormMLP`, nvfp4", "host/mlp-nvfp4"),
    ("`GroupedLinear` of 8 experts, nvfp4", "host/grouped-nvfp4"),
)
STEPS = tuple((name, f"steps/{name}") for name in ("60m", "125m", "300m", "1b", "moe-60m", "moe-300m"))
TRAINING = ("60m", "125m", "300m", "1b", "moe-60m", "moe-300m")


def time(record: Record) -> str:
    """Return a time in µs or ms."""
    us = record.values["us"]
    return f"{us / 1000:.2f} ms" if us >= 2000 else f"{us:.0f} µs" if us >= 20 else f"{us:.1f} µs"


def value(record: Record) -> str:
    """Return what the case is about, with its mark."""
    number, metric = record.values["value"], record.values["metric"]
    text = {"of copy": f", {percent(number)}", "us": ""}.get(metric, f", {number:.3f}")
    return f"{time(record)}{text}{record.mark}"


def by_shape(names: Sequence[tuple[str, str]], shapes: Sequence[Shape], columns: Sequence[str]) -> Renderer:
    """Return a table with a line a case and a column a shape, and the records that it is from."""

    def render(records: Sequence[Record]) -> str:
        chosen = counting(records)
        lines = []
        for title, case in names:
            found = [chosen.get((case, shape)) for shape in shapes]
            stamps = [record.stamp for record in found if record]
            lines.append(([title, *(value(r) if r else "" for r in found)], stamps))
        return recorded(["", *columns], lines)

    return render


def of_any_shape(names: Sequence[tuple[str, str]], shape_name: str) -> Renderer:
    """Return a table with a line a case and shape."""

    def render(records: Sequence[Record]) -> str:
        chosen = counting(records)
        lines = [
            ([title, ", ".join(map(str, key[1])), value(record)], [record.stamp])
            for title, case in names
            for key, record in sorted(chosen.items(), key=lambda item: -item[1].values.get("us", 0))
            if key[0] == case and record.is_clean
        ]
        return recorded(["", shape_name, ""], lines)

    return render


def training(records: Sequence[Record]) -> str:
    """Return the table of training steps."""
    chosen = counting(records)
    lines = []
    for name, shape in product(TRAINING, ((16, 2048), (8, 2048))):
        record = chosen.get((f"train/{name}", shape))
        if record is None:
            continue
        v = record.values
        cells = [
            f"{name}, {v['parameters'] / 1e9:.2f}B",
            f"{shape[0] * shape[1]:,}",
            f"{v['bf16_us'] / 1000:.1f} ms",
            f"{v['us'] / 1000:.1f} ms, {v['value']:.3f}×{record.mark}",
            f"{v['peak_GiB']:.1f} against {v['bf16_peak_GiB']:.1f} GiB",
            f"{v['linears_kept_of_bf16']:.3f}×",
        ]
        lines.append((cells, [record.stamp]))
    return recorded(["parameters", "tokens", "bf16", "nvfp4", "peak memory", "saved x of linears"], lines)


def host(records: Sequence[Record]) -> str:
    """Return the table of what calls cost the host, and of steps without CUDA graphs."""
    chosen = {case: record for (case, _), record in counting(records).items()}
    lines = []
    for title, case in (*HOST, *((f"step of {name}", case) for name, case in STEPS)):
        if case not in chosen:
            continue
        record, v = chosen[case], chosen[case].values
        bf16 = f"{v['bf16_us'] / 1000:.1f} ms" if v["bf16_us"] >= 2000 else f"{v['bf16_us']:.0f} µs"
        busy = f"{v['busy']:.0%}" if "busy" in v else ""
        bar = f"{v['least']:g}; {v['aim']:g}"
        ratio = f"{v['value']:.3f}×{record.mark}"
        first = f"{v['bf16_first_step_s']:.1f} → {v['first_step_s']:.1f} s" if "first_step_s" in v else ""
        lines.append(([title, bf16, time(record), ratio, busy, first, bar], [record.stamp]))
    return recorded(["", "bf16", "ours", "times bf16", "GPU busy", "first step", "bar; aim"], lines)


def users(records: Sequence[Record]) -> str:
    """Return what a user's own loop gets of every size, without CUDA graphs."""
    chosen = {case: record for (case, _), record in counting(records).items()}
    lines = []
    for name, case in STEPS:
        if case not in chosen:
            continue
        record, v = chosen[case], chosen[case].values
        tokens = v["shape"][0] * v["shape"][1]
        cells = [
            f"{name}, {v['parameters'] / 1e6:,.0f}M parameters",
            f"{tokens:,}",
            f"{tokens / v['bf16_us'] * 1e6:,.0f}",
            f"{v['tokens_per_second']:,.0f}",
            f"{v['value']:.2f}×{record.mark}",
            f"{min(v['busy'], 1):.0%}",
        ]
        lines.append((cells, [record.stamp]))
    columns = ["tokens a step", "bf16, tokens/s", "nvfp4, tokens/s", "time of a step", "GPU busy"]
    return recorded(["model", *columns], lines)


def cast(records: Sequence[Record]) -> str:
    """Return the table of casts of primary weights."""
    chosen = counting(records)
    lines = [
        (
            [f"{shape[0]} weights [{shape[1]}, {shape[2]}]", value(record), f"{record.values['rate']:.2f} TB/s"],
            [record.stamp],
        )
        for (case, shape), record in chosen.items()
        if case == "primary/cast"
    ]
    return recorded(["", "time, of copy", "rate"], lines)


PEERS = (
    ("1×16 nearest", "quantize/1x16"),
    ("16×16 nearest", "quantize/16x16"),
    ("1×16 stochastic", "quantize/1x16-sr"),
    ("4over6 MAE", "quantize/4over6"),
    ("row + rotated column, stochastic", "row_col/sr+sr-rht"),
    ("MXFP8 E4M3", "quantize/mxfp8"),
)


def peers(records: Sequence[Record]) -> str:
    """Return the table of other libraries: our time with the amax, theirs, and how many times longer that is."""
    # Records from when a peer's way was chosen by its name, not by its time and its error, have no "left_out".
    chosen = counting([r for r in records if "left_out" in r.values])
    lines, reasons = [], {}
    for title, case in PEERS:
        record = chosen.get((case, WIDE[0]))
        if record is None or "us_with_amax" not in record.values:
            lines.append(([f"{title}, ours", "no record", ""], []))
            continue
        us, rivals = record.values["us_with_amax"], dict(record.values["rivals"])
        plain = rivals.pop("plain torch, compiled", None)
        lines.append(([f"{title}, ours", f"{us:.0f} µs{record.mark}", ""], [record.stamp]))
        lines += [([f"· {name}", f"{us * ratio:.0f} µs", f"{ratio:.2f}×"], []) for name, ratio in rivals.items()]
        if plain:
            lines.append(
                (["· plain torch, compiled, amax given", f"{record.values['us'] * plain:.0f} µs", f"{plain:.2f}×"], [])
            )
        for name, why in record.values["left_out"].items():
            reasons.setdefault((name, why), []).append(title)
    table = recorded(["8192×8192, amax included", "time", "times ours"], lines)
    notes = [f"- {name}, {', '.join(titles)}: {why}." for (name, why), titles in reasons.items()]
    return "\n".join([table, "", "Left out:", "", *notes]) if notes else table


def failures(records: Sequence[Record]) -> str:
    """Return the table of cases whose newest record has no figure."""
    lines = [
        [
            f"`{record.key[0]}` {'x'.join(map(str, record.key[1]))}",
            f"{record.problem.rstrip(':')} ({record.stamp})",
            f"{value(instead)} ({instead.stamp})" if instead else "none",
        ]
        for record, instead in failed(records)
    ]
    return rows(["case", "newest record", "what counts"], lines) if lines else "None."


def slow(records: Sequence[Record]) -> str:
    """Return the range of shares of copy of kernels that draw in both orientations or try candidates."""
    chosen = counting(records)
    cases = ("quantize/4over6", "quantize/4over6-scaled", "row_col/sr+sr-rht")
    shares = [100 * chosen[case, shape].values["value"] for case in cases for shape in WIDE]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


def share_of_1b(records: Sequence[Record]) -> str:
    """Return how many times bf16's time a step of 1b takes as a CUDA graph."""
    record = counting(records)["train/1b", (8, 2048)]
    return f"{record.values['value']:.3f}{record.mark}"


RENDERERS: Mapping[str, Renderer] = MappingProxyType(
    {
        "kernels": by_shape(KERNELS, WIDE, ["8192×8192", "16384×8192"]),
        "peers": peers,
        "layers": of_any_shape(LAYERS, "M, N, K of a GEMM; M, K, N of a layer"),
        "maxima": by_shape(MAXIMA, WIDE, ["8192×8192", "16384×8192"]),
        "wide-rotations": by_shape(WIDE_ROTATIONS, WIDE, ["8192×8192", "16384×8192"]),
        "unpack": by_shape(UNPACK, WIDE, ["8192×8192", "16384×8192"]),
        "gemm": of_any_shape(LAYERS[:2], "M, N, K"),
        "norms": of_any_shape(FUSED[:4], "shape"),
        "widths": by_shape(WIDTHS, [(16384, 2880), (65536, 896)], ["16384×2880", "65536×896"]),
        "failures": failures,
        "grouped": by_shape(GROUPED, EXPERTS, ["8 experts", "64 experts"]),
        "small-groups": by_shape(GROUPED[:2], SMALL_GROUPS, ["60 experts, 8,192 tokens, 2048 → 1408"]),
        "fused": of_any_shape(FUSED, "shape"),
        "training": training,
        "host": host,
        "cast": cast,
        "slow": slow,
        "share-1b": share_of_1b,
        "users": users,
        **listing_tables.RENDERERS,
        **full_size_tables.RENDERERS,
        **counters_tables.RENDERERS,
        **gather_tables.RENDERERS,
        **parallel_tables.RENDERERS,
        **zero_tables.RENDERERS,
        **several_tables.RENDERERS,
        **lora_tables.RENDERERS,
        **loss_tables.RENDERERS,
        **study_tables.RENDERERS,
        "qat": qat.render,
        "instructions": instructions.render,
        "keep": keep.render,
        "machines": machines.render,
        "computed": computed_tables.render,
    }
)


def renew(text: str, records: Sequence[Record]) -> str:
    """Return a page with its tables as the records say.

    Raises:
        ValueError: a page names a table that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in RENDERERS:
            raise ValueError(f"{name!r} is no table; they are {', '.join(RENDERERS)}")
        content = RENDERERS[name](records)
        return (
            f"{match.group(1)}\n\n{content}\n\n{match.group(4)}"
            if "\n" in content
            else f"{match.group(1)}{content}{match.group(4)}"
        )

    return BLOCK.sub(replace, text)


def main(arguments: list[str]) -> int:
    """Print every table, or write them into the pages."""
    parser = argparse.ArgumentParser(prog="bench.tables", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the pages instead of printing")
    options = parser.parse_args(arguments)
    records = load()
    if not options.write:
        print("\n\n".join(f"## {name}\n\n{render(records)}" for name, render in RENDERERS.items()))
        return 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(renew(text, records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
