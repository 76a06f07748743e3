"""The command: select cases, measure the ceilings, run case after case, print and record."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import machine, plot, results
from bench.registry import Case, Setting, Shape, Unequal, all_cases, select
from bench.results import Result
from halfbyte.arguments import ArgumentParser
from halfbyte.ops.backends import BACKENDS, REFERENCE, choose
from halfbyte.verify import timing

DESCRIPTION = """Time every kernel beside this machine's own ceilings, measured in the same process. No case is timed
before its bytes equal the reference. `plot FILE ...` draws results that were written."""

NEEDS_GPU = """no CUDA GPU is visible: the benchmark times Triton kernels, which need a GPU from sm_80 on.
`--backend reference` runs the cases on this CPU with small shapes: that shows that they work, not how fast they are."""


def main(arguments: list[str]) -> int:
    """Run the benchmark; the exit status is 1 if a case has no figure because it is wrong or does not run."""
    if arguments[:1] == ["plot"]:
        return plot.main(arguments[1:])
    options = _parse(arguments)
    if options.list:
        for case in all_cases():
            print(f"{case.name:<32}{case.about}; {', '.join('x'.join(map(str, s)) for s in case.shapes)}")
        return 0
    cases = select(all_cases(), options.only)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.backend != REFERENCE:
        print(f"halfbyte bench: {NEEDS_GPU}", file=sys.stderr)
        return 2
    done, path = run(cases, device, options)
    print(f"\n{results.summary(done, device.type == 'cuda')}\n{path}")
    return 1 if any(result.outcome is None for result in done) else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="halfbyte bench", description=DESCRIPTION)
    parser.add_argument("--only", nargs="*", default=[], metavar="GLOB", help="case names, such as 'quantize/*'")
    parser.add_argument(
        "--shape", nargs="*", type=_shape, default=[], metavar="MxK", help="these shapes instead of each case's own"
    )
    parser.add_argument("--quick", action="store_true", help="first shape only, short measurements, nothing compiled")
    parser.add_argument("--backend", choices=BACKENDS, help="by default what runs on the GPU")
    toggle = argparse.BooleanOptionalAction
    parser.add_argument("--plain", action=toggle, default=None, help="time compiled plain torch too (first shape)")
    parser.add_argument("--peers", action=toggle, default=False, help="time other libraries that import (first shape)")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds for each of these to compile and run")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the .jsonl file")
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    parser.add_argument("--list", action="store_true", help="print the cases")
    return parser.parse_args(arguments)


def run(cases: Iterable[Case], device: torch.device, options: argparse.Namespace) -> tuple[list[Result], Path]:
    """Run cases, printing and recording each.

    Returns:
        The results and the file they are in.
    """
    facts = machine.facts(device) | ({"commit": options.commit} if options.commit else {})
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    ceilings = timing.ceilings(device)
    print(f"ceilings: {ceilings.text()}\n\n{results.HEAD}", flush=True)
    facts |= {"copy_TB_s": ceilings.copy / 1e12, "bf16_TFLOP_s": ceilings.gemm / 1e12}
    plain = not options.quick if options.plain is None else options.plain
    setting = Setting(
        device=device,
        backend=choose(device, options.backend),
        ceilings=ceilings,
        plain=plain,
        peers=options.peers,
        limit=options.limit,
        budget=(0.1 if options.quick else 0.4) if device.type == "cuda" else 0.02,
    )
    done: list[Result] = []

    def lines() -> Iterator[dict[str, Any]]:
        for result in _each(cases, setting, options):
            done.append(result)
            print(results.line(result), flush=True)
            yield result.as_json()

    path = results.claim(facts, options.out)
    results.write(path, facts, lines())
    return done, path


def _each(cases: Iterable[Case], setting: Setting, options: argparse.Namespace) -> Iterator[Result]:
    for case in cases:
        shapes = [s for s in options.shape if len(s) == len(case.small)] or list(case.shapes)
        if not setting.on_gpu:
            shapes = [case.small]
        for index, shape in enumerate(shapes[:1] if options.quick else shapes):
            first = setting if index == 0 else replace(setting, plain=False, peers=False)
            yield _one(case, shape, first)


def _one(case: Case, shape: Shape, setting: Setting) -> Result:
    """Run one case; whatever goes wrong with it costs its figure and nothing else."""
    bar = case.shapes.get(shape)
    try:
        return Result(case=case.name, shape=shape, bar=bar, outcome=case.run(setting, shape))
    except Unequal as unequal:
        problem = f"differs from the reference: {unequal}"
    except torch.cuda.OutOfMemoryError:
        problem = "out of memory"
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    finally:
        if setting.on_gpu:
            torch.cuda.empty_cache()
    return Result(case=case.name, shape=shape, bar=bar, problem=problem)


def _shape(text: str) -> Shape:
    try:
        shape = tuple(int(part) for part in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give sizes such as 8192x8192, or 8192x8192x8192 for a GEMM")
    return shape
