"""Tables of docs/internals that are printed from the listings in bench/results/profiles, their lines parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from bench import results
from bench.markdown import recorded, rows
from bench.records import Record, counting

FOLDER = results.FOLDER / "profiles"
PLAIN_STEPS = "nvidia-h200-20261122-steps.txt"
RUNS = (  # listings with lines of `python -m bench`, oldest first
    "nvidia-h200-20261123-1717499.txt",
    "nvidia-h200-20261123-564ef9a.txt",
    "nvidia-h200-20261123-6b05522.txt",
)
OF_1B = "nvidia-h200-20261123-0e71e16.txt"
PRODUCTS = "nvidia-h200-20261123-6b05522.txt"
COMMANDS = (
    "nvidia-h200-20261125-35a82c9.txt",
    "nvidia-h200-20261126-5e86971.txt",
    "nvidia-h200-20261127.txt",
    "nvidia-h200-20261127-70dfffc.txt",
    "nvidia-h200-20261128-8524b17.txt",
    "nvidia-h200-20261128-501e541.txt",
    "nvidia-h200-20261128-1e63df7.txt",
    "nvidia-h200-20261128-0c7383a.txt",
    "nvidia-h200-20261129-793faf3.txt",
)
VALUES = "nvidia-h200-20261123-7290378.txt"

SERIES = re.compile(r"^([0-9a-f]{7}) +(\S+) +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$")
COMPARED = re.compile(r"^(\w+)  bf16 ([\d.]+) .*?nvfp4 ([\d.]+) .*?   ([\d.]+) \(([\d.]+)\)")
STUDIED = re.compile(r"^# halfbyte study .*?bf16 ([\d,]+); nvfp4 ([\d,]+) \(([\d.]+) x its time\).*trees (\w+)")
BENCHED = re.compile(r"^(steps|train)/([\w-]+) +(\d+)x(\d+) +([\d.]+) +([\d.]+) x bf16 +(least met|aim met|MISSED)")
PACED = re.compile(
    r"^# halfbyte compare .*?--model (\w+) .*?\((?:(\d) x )?([\d,]+) tokens[;)].*?\(([\d.]+) x its time.*tree (\w+)"
)
TREE = re.compile(r"tree (?:of )?([0-9a-f]{7})")
ADDED = re.compile(r"^ +([\d.]+) +(\d+) +([\d.]+)  (\S+)$")
RAN = re.compile(r"^ +([\d.]+) ms +(\d+) x +([\d.]+) us  (.+)$")
STEP = re.compile(r"^1b (bf16|nvfp4): ([\d.]+) ms a step")
PRODUCT = re.compile(r"^(\d+x\d+x\d+) +([\d.]+) +([\d.]+) \((\w+, [\w ]+)\) +([\d.]+)(?: +\((.*)\))?$")
PAIRED = re.compile(r"^(\d+x\d+) (\w+) (?:default|(\(.*\))): ([\d.]+)$")
TURNED = re.compile(r"^gemm (\d+) (\d+) (\d+) \[\[(.*)\], \[(.*)\]\]$")
PAIRS = (  # as the listing calls them, and the first line that counts: of the tile that the table in the code has
    ("row values + rotated column, nearest", "xpair", "(1, 0, 64, 64, 4, 1, 1, 1, 1)"),
    ("both as values, stochastic, column rotated", "dypair", "(1, 1, 16, 128, 2, 1, 1, 0, 2)"),
    ("both as values, nearest, column rotated", "npair", "(1, 1, 16, 128, 1, 2, 0, 0, 1)"),
    ("row values + MXFP8 column", "mpair", "(1, 0, 64, 64, 2, 1, 1, 0, 1)"),
    ("4over6 row values + rotated column", "fpair", "(1, 0, 64, 64, 4, 1, 0, 1, 1)"),
    ("4over6 row values + 4over6 column", "ffpair", "(1, 0, 64, 64, 4, 1, 0, 1, 1)"),
)
KINDS = (  # the first that matches a kernel's name counts
    ("products", r"^gemm_|^nvjet"),
    ("quantization, decoding, maxima, sums", r"quantize|^amax|^group_sum"),
    ("activations", r"^activation|silu"),
    ("norms", r"^norm_|rms_norm"),
    ("attention", r"cudnn|fmha"),
    ("loss, optimizer, casts, the rest", ""),
)


def lines(name: str) -> list[str]:
    """Return the lines of a listing."""
    return (FOLDER / name).read_text(encoding="utf-8").splitlines()


def found(pattern: re.Pattern[str], name: str) -> Iterator[tuple[str, ...]]:
    """Yield the groups of the lines of a listing that match.

    Raises:
        ValueError: none does: a table would be empty.
    """
    matches = [match.groups() for line in lines(name) if (match := pattern.match(line))]
    if not matches:
        raise ValueError(f"{FOLDER / name}: no line is {pattern.pattern!r}; the table wants another listing")
    yield from matches


def steps(records: Sequence[Record]) -> str:
    """Return every step of the listings, as they were measured: the least of each series."""
    table = []
    for tree, model, tokens, *series, ratio in found(SERIES, PLAIN_STEPS):
        bf16, ours = (min(map(float, pair)) for pair in (series[:2], series[2:]))
        table.append([model, tokens, "own loop", tree, f"{bf16:.1f}", f"{ours:.1f}", ratio])
    for model, bf16, ours, ratio, without in found(COMPARED, PLAIN_STEPS):
        table.append([model, "4 × 32,768", "`compare`", "fdb8383", bf16, ours, f"{ratio}; no graph {without}"])
    for name in RUNS:
        table += _benched(name)
    (study,) = found(STUDIED, OF_1B)
    table.append(["60m", "", "`study`", study[3], "", "", study[2]])
    for name in COMMANDS:
        for model, count, tokens, ratio, tree in found(PACED, name):
            table.append([model, f"{count} × {tokens}" if count else tokens, "`compare`", tree, "", "", ratio])
    return rows(["model", "tokens", "how", "tree", "bf16, ms", "nvfp4, ms", "times bf16"], table)


def _benched(name: str) -> list[list[str]]:
    """Return the steps that `python -m bench` printed into a listing; a line that names a tree stands in front."""
    table, tree = [], ""
    for line in lines(name):
        tree = named.group(1) if (named := TREE.search(line)) else tree
        if match := BENCHED.match(line):
            case, model, batch, length, us, ratio, _ = match.groups()
            how = {"steps": "own loop", "train": "CUDA graph"}[case]
            table.append([model, f"{int(batch) * int(length):,}", how, tree, "", f"{float(us) / 1e3:.1f}", ratio])
    return table


def kernels(records: Sequence[Record]) -> str:
    """Return what each kernel adds to a step of 125m."""
    table = [[f"`{_short(name)}`", ms, count, us] for ms, count, us, name in found(ADDED, PLAIN_STEPS)]
    return rows(["kernel", "ms of the step", "launches", "µs each"], table)


def _short(name: str, width: int = 48) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def kinds(records: Sequence[Record]) -> str:
    """Return what the kernels of each kind add to a step of 1b, in bf16 and in nvfp4."""
    times = {way: dict.fromkeys((kind for kind, _ in KINDS), (0.0, 0)) for way in ("bf16", "nvfp4")}
    totals, way = {}, ""
    for line in lines(OF_1B):
        if begin := STEP.match(line):
            way, total = begin.groups()
            totals[way] = f"{float(total):.1f}"
        elif way and (ran := RAN.match(line)):
            ms, count, _, kernel = ran.groups()
            kind = next(kind for kind, pattern in KINDS if re.search(pattern, kernel))
            before = times[way][kind]
            times[way][kind] = before[0] + float(ms), before[1] + int(count)
    table = [
        [kind, *(cell for own in times.values() for cell in (f"{own[kind][0]:.1f}", str(own[kind][1])))]
        for kind, _ in KINDS
    ]
    table.append(["the step", totals["bf16"], "", totals["nvfp4"], ""])
    return rows(["kernels", "bf16, ms", "launches", "nvfp4, ms", "launches"], table)


def both_orientations(records: Sequence[Record]) -> str:
    """Return what quantizing in both orientations adds to a step of 1b."""
    ((ms, count),) = [
        (ms, count) for ms, count, _, kernel in found(RAN, OF_1B) if kernel.strip() == "quantize_row_col_kernel"
    ]
    return f"{float(ms):.1f} ms in {count} launches"


def products(records: Sequence[Record]) -> str:
    """Return weight gradients by cuBLAS in bf16, by our tiles, and by torch.mm with `combine_kernel`."""
    table = []
    for shape, cublas, ours, how, mixed, again in found(PRODUCT, PRODUCTS):
        others = again.removeprefix("in another run ") if again else ""
        table.append([shape.replace("x", "×"), cublas, f"{ours} ({how.replace('x', '×')})", mixed, others])
    head = ["M×N×K, µs", "cuBLAS, bf16", "our tiles", "`torch.mm`, `combine_kernel`", "another run"]
    return rows(head, table)


def invariant(records: Sequence[Record]) -> str:
    """Return the speed of batch-invariant products relative to that of the free choice, by rows."""
    shares: dict[str, dict[str, str]] = {}
    stamps: dict[str, list[str]] = {}
    for (case, shape), record in sorted(counting(records).items(), key=lambda item: str(item[0])):
        if case == "gemm/batch-invariant" and record.is_clean:
            batch, weights = shape[0], f"{shape[1]}×{shape[2]}"
            cell = f"{record.values['us']:.0f} µs, {record.values['value']:.2f}"
            shares.setdefault(weights, {})[f"{batch:,} rows"] = cell
            stamps.setdefault(weights, []).append(record.stamp)
    names = {name for own in shares.values() for name in own}
    batches = sorted(names, key=lambda name: int(name.split()[0].replace(",", "")))
    lines = [([weights, *(own.get(name, "") for name in batches)], stamps[weights]) for weights, own in shares.items()]
    return recorded(["weights", *batches], lines)


def values(records: Sequence[Record]) -> str:
    """Return times of both orientations by way of codes and without, of the last lines that say so."""
    times = {(what, how or "", shape): us for shape, what, how, us in found(PAIRED, VALUES)}
    shapes = list(dict.fromkeys(shape for *_, shape in times))
    head = ["µs", *(f"{shape.replace('x', '×')}: {way}" for shape in shapes for way in ("by codes", "as it is"))]
    table = [[name, *(times[what, way, shape] for shape in shapes for way in ("", how))] for name, what, how in PAIRS]
    return rows(head, table)


def turned(records: Sequence[Record]) -> str:
    """Return products of operands whose rows, or columns, are contiguous; both of two times."""
    table = []
    for *shape, first, second in found(TURNED, VALUES):
        table.append(["×".join(shape), *map("; ".join, zip(first.split(", "), second.split(", "), strict=True))])
    return rows(["M×N×K, µs", "rows of both", "columns of a", "columns of b", "columns of both"], table)


RENDERERS: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {
        "steps-listed": steps,
        "kernels-125m": kernels,
        "kinds-1b": kinds,
        "both-1b": both_orientations,
        "weight-gradients": products,
        "batch-invariant": invariant,
        "values-listed": values,
        "turned-listed": turned,
    }
)
