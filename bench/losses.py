"""The losses that the docs quote: one small file a comparison, with its configuration and its logs at every evaluation.

halfbyte compare --out runs/compare …
python -m bench.losses runs/compare --name make-train
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import machine, results

FOLDER = results.FOLDER / "training"
LEFT_OUT = ("recipe", "recipe_key")  # what differs between the runs of a comparison
KEPT = ("recipe", "steps", "tokens", "held_out_loss", "is_diverged", "tokens_per_second")


def collect(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a comparison's environment, data and configuration, and one line a recipe with its losses.

    Args:
        folder: what `halfbyte compare --out` wrote.

    Raises:
        ValueError: the folder holds no comparison.
    """
    table = folder / "results.json"
    if not table.is_file():
        raise ValueError(f"{folder}: no results.json; give the --out folder of a finished `halfbyte compare`")
    written = json.loads(table.read_text(encoding="utf-8"))
    lines, config = [], {}
    for result in written["results"]:
        log = [json.loads(line) for line in (folder / result["recipe"] / "log.jsonl").read_text().splitlines()]
        config = {name: value for name, value in result["identity"].items() if name not in LEFT_OUT}
        evaluations = [[entry["step"], entry["loss"]] for entry in log if entry["kind"] == "eval"]
        at = {step for step, _ in evaluations}
        steps = [[entry["step"], entry["loss"]] for entry in log if entry["kind"] == "step" and entry["step"] in at]
        kept = {name: result[name] for name in KEPT if name in result}
        lines.append(kept | {"key": result["identity"]["recipe_key"], "evaluations": evaluations, "training": steps})
    return {"heading": written["heading"], **written["environment"], "data": written["data"], "config": config}, lines


def load(folder: Path = FOLDER) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return name -> facts and lines of every comparison that is kept."""
    return {path.stem: results.read(path) for path in sorted(folder.glob("*.jsonl"))}


def main(arguments: list[str]) -> int:
    """Write one comparison's file."""
    parser = argparse.ArgumentParser(prog="bench.losses", description=__doc__)
    parser.add_argument("folder", type=Path, help="what `halfbyte compare --out` wrote")
    parser.add_argument("--name", required=True, help="of the file in bench/results/training")
    parser.add_argument("--commit", help="what to record where the sources lay outside a git checkout")
    options = parser.parse_args(arguments)
    facts, lines = collect(options.folder)
    path = FOLDER / f"{options.name}.jsonl"
    results.write(path, {"commit": options.commit or machine.commit()} | facts, lines)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
