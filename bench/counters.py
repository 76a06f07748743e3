"""What a GPU's counters say of quantization kernels: `python -m bench.counters 'row_col/*'`, with Nsight Compute.

Each case is compared with the reference and called once more under `ncu`, a process for each and one at a time on every
visible GPU. A kernel's line has its time, its instructions of an element, the shares of its time in which the issue
slots, the ALU pipe, the L2 cache and DRAM are busy, the warps on a multiprocessor, its share of copy, what of copy it
would be if every issue slot took an instruction, and for what a warp waits, in warps an issue. Clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from bench import machine, results
from bench import measure as measuring
from bench.cases import grouped
from bench.registry import Setting, Shape, all_cases, select
from halfbyte.ops.backends import choose
from halfbyte.verify import timing

ELAPSED = "avg.pct_of_peak_sustained_elapsed"
METRICS = {
    "us": "gpu__time_duration.sum",  # in ns
    "instructions": "smsp__inst_executed.sum",  # of warps
    "issue": f"smsp__issue_active.{ELAPSED}",
    "alu": f"sm__inst_executed_pipe_alu.{ELAPSED}",
    "l2": f"lts__throughput.{ELAPSED}",
    "dram": f"dram__throughput.{ELAPSED}",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
}
STALLS = ("long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "lg_throttle", "mio_throttle", "barrier")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
WARP = 32
BOUND = ("quantize/*", "row_col/*", "grouped/quantize-*")
SECONDS = 240.0


def elements(case: str, shape: Shape) -> int:
    """Return how many values a case of quantization reads."""
    (chosen,) = select(all_cases(), [case])
    if not isinstance(chosen.run, grouped.Quantization):
        return prod(shape)
    experts, tokens, inner, outer = shape
    return {"tokens": tokens * inner, "gradient": tokens * outer, "experts": experts * outer * inner}[
        chosen.run.operand
    ]


def called_once(case: str, shape: Shape) -> float:
    """Check a case, call what it would time once where `ncu` looks, and return the bytes that it moves."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def measure(calls: Sequence[timing.Call], device: torch.device, **_: Any) -> timing.Timing:
        calls[0]()
        if device.type != "cuda":
            return timing.Timing(1.0, 0.0)
        torch.cuda.synchronize(device)
        torch.cuda.profiler.start()
        calls[-1]()
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()
        return timing.Timing(1.0, 0.0)

    measuring.measure = measure
    (chosen,) = select(all_cases(), [case])
    setting = Setting(
        device=device, backend=choose(device, None), ceilings=timing.Ceilings(1.0, 1.0), plain=False, budget=0.1
    )
    return chosen.run(setting, shape).work


def kernels(log: Path) -> list[dict[str, Any]]:
    """Return of each kernel in a log of `ncu --csv --page raw` its name and what was counted, None where it was not.

    Raises:
        ValueError: it holds no kernel, with what it says instead.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    table = [line for line in lines if line.startswith('"')]
    rows = [row for row in csv.DictReader(table) if row["ID"]]  # the line below the names has the units
    if not rows:
        raise ValueError(next((line for line in lines if "==ERROR==" in line), "ncu saw no kernel"))
    metrics = METRICS | {f"stalled_{name}": STALL.format(name) for name in STALLS}
    return [{"kernel": row["Kernel Name"]} | {name: _number(row.get(m)) for name, m in metrics.items()} for row in rows]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None  # a counter that this GPU does not have


def counted(case: str, shape: Shape, gpu: str | None, copy: float) -> list[dict[str, Any]]:
    """Run a case under `ncu`; return a line of the record for each of its kernels.

    Args:
        gpu: the only one that it sees, as CUDA_VISIBLE_DEVICES names it.
        copy: bytes a second of a copy.
    """
    named = {"case": f"counters/{case}", "shape": list(shape)}
    wanted = ",".join([*METRICS.values(), *map(STALL.format, STALLS)])
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base"]
    worker = [sys.executable, "-m", "bench.counters", "--worker", case, *map(str, shape)]
    env = os.environ if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        command += ["--log-file", str(log), "--metrics", wanted, *worker]
        try:
            ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, env=env)
            moved = json.loads(ran.stdout.splitlines()[-1])["moved"]
            found = kernels(log)
        except subprocess.CalledProcessError as error:
            said = [line for line in (error.stdout + error.stderr).splitlines() if line.strip()][-1:]
            return [named | {"problem": f"status {error.returncode}: {''.join(said)}"}]
        except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
            return [named | {"problem": f"{type(error).__name__}: {error}"}]
    return [named | _line(kernel, elements(case, shape), moved if len(found) == 1 else None, copy) for kernel in found]


def _line(kernel: dict[str, Any], count: int, moved: float | None, copy: float) -> dict[str, Any]:
    """Return plain figures: µs, instructions of an element, shares."""
    values = dict(kernel)
    if values["us"] is not None:
        values["us"] /= 1e3
    if values["instructions"] is not None:
        values["instructions"] *= WARP / count
    for name in ("issue", "alu", "l2", "dram"):
        values[name] = None if values[name] is None else values[name] / 100
    if moved is not None and values["us"]:
        values["of_copy"] = moved / (values["us"] / 1e6) / copy
        values["all_slots"] = values["of_copy"] / values["issue"] if values["issue"] else None
    return values


def text(values: dict[str, Any]) -> str:
    """Return a line as it is printed."""
    name = f"{values['case'].removeprefix('counters/'):<28}{'x'.join(map(str, values['shape'])):<22}"
    if "problem" in values:
        return f"{name}NO FIGURE: {values['problem']}"

    def of(key: str, form: str) -> str:
        return "?" if values.get(key) is None else format(values[key], form)

    waits = {stall: values.get(f"stalled_{stall}") for stall in STALLS}
    longest = sorted((stall for stall in STALLS if waits[stall]), key=lambda stall: -(waits[stall] or 0.0))[:3]
    shares = "".join(f"{of(key, '.0%'):>7}" for key in ("issue", "alu", "l2", "dram", "of_copy", "all_slots"))
    stalls = ", ".join(f"{stall} {waits[stall]:.2f}" for stall in longest)
    return f"{name}{of('us', '.1f'):>8}{of('instructions', '.1f'):>7}{shares}{of('warps', '.1f'):>6}  {stalls}"


def _lines(chosen: Sequence[tuple[str, Shape]], gpus: Sequence[str], copy: float) -> Iterator[dict[str, Any]]:
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def one(item: tuple[str, Shape]) -> list[dict[str, Any]]:
        gpu = free.get()
        try:
            return counted(*item, gpu, copy)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        for lines in pool.map(one, chosen):
            for values in lines:
                print(text(values), flush=True)
                yield values


def main(arguments: Sequence[str]) -> int:
    """Count; the exit status is 1 if a case has no figure."""
    parser = argparse.ArgumentParser(
        prog="bench.counters", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("only", nargs="*", default=BOUND, metavar="GLOB", help="case names; by default what quantizes")
    parser.add_argument("--shapes", type=int, default=1, help="of each case, at most")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the .jsonl file")
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    parser.add_argument("--worker", nargs="+", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        case, *shape = options.worker
        print(json.dumps({"moved": called_once(case, tuple(map(int, shape)))}))
        return 0
    cases = [case for case in select(all_cases(), options.only) if not case.name.endswith("-small")]
    chosen = [(case.name, shape) for case in cases for shape in list(case.shapes)[: options.shapes]]
    gpus = machine.visible_gpus()
    if not gpus or shutil.which("ncu") is None:
        missing = "ncu is not on the PATH" if gpus else "torch sees no GPU"
        print(f"{missing}; `python -m bench.instructions` counts what is compiled and needs neither")
        return 1
    device = torch.device("cuda")
    facts = machine.facts(device) | ({"commit": options.commit} if options.commit else {})
    copy = timing.ceilings(device).copy
    facts["copy_TB_s"] = copy / 1e12
    path = results.claim(facts, options.out, "counters")
    head = ("µs", "instr."), ("issue", "ALU", "L2", "DRAM", "copy", "slots")
    print(f"{'case':<28}{'shape':<22}{head[0][0]:>8}{head[0][1]:>7}{''.join(f'{h:>7}' for h in head[1])} warps  waits")
    lines: list[dict[str, Any]] = []
    results.write(path, facts, (lines.append(values) or values for values in _lines(chosen, gpus, copy)))
    print(path)
    return int(any("problem" in values for values in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
