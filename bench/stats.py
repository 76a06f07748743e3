"""What statistics cost: steps of a decoder without hb.collect_stats, between sampled steps, and sampled ones.

    python -m bench.stats --model 1b --tokens 8 2048 --every 100 --out bench/results

For eager and compiled blocks: milliseconds of a step with nothing attached, of a step that is not sampled, of a sampled
one, the first compilation of its graph apart, and peak memory of both kinds; `cost` is what sampling every n-th step
adds to a step, as a share. Losses of a run with statistics and of one without are compared, bit for bit, with attention
and indexing that add in one order, and those of a second run without. Without a GPU small models show that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import halfbyte as hb
from bench import machine, results
from bench.measure import repeatable, timed
from halfbyte.train import model as models

WARM_UP, TIMED, SAMPLED = 3, 10, 3


class Run:
    """A decoder that trains in NVFP4 on tokens of a rule, step by step."""

    def __init__(self, name: str, shape: tuple[int, int], device: torch.device, compiles: bool) -> None:
        self.shape, self.device = shape, device
        self.model = models.Decoder(models.model_preset(name))
        models.initialise_(self.model, 0)
        self.model.to(device)
        self.state = hb.quantize_(self.model, "nvfp4", state=hb.RunState(0)).state.to(device)
        hb.nn.fuse_(self.model)
        if compiles:
            for block in self.model.layers:
                block.compile(fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.number = 0

    def step(self) -> Tensor:
        """Train on one batch and return its loss, unread."""
        generator = torch.Generator().manual_seed(self.number)
        first = torch.randint(997, (self.shape[0], 1), generator=generator)
        ids = (first * (1 + torch.arange(self.shape[1] + 1)) % 997 % self.model.config.vocab_size).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.advance()
        self.number += 1
        return loss.detach()


def losses(name: str, shape: tuple[int, int], device: torch.device, compiles: bool, sampled: bool) -> list[float]:
    """Return the losses of some steps of one sequence, every second of them sampled if asked for."""
    torch._dynamo.reset()
    run = Run(name, (1, shape[1]), device, compiles)
    stats = hb.collect_stats(run.model, every=2).follow(run.optimizer) if sampled else None
    with repeatable():
        found = [run.step() for _ in range(4)]
    if stats is not None:
        stats.remove()
    return torch.stack(found).tolist()


def times(name: str, shape: tuple[int, int], every: int, device: torch.device, compiles: bool) -> dict[str, Any]:
    """Time the three kinds of steps."""
    torch._dynamo.reset()
    run = Run(name, shape, device, compiles)
    for _ in range(WARM_UP):
        run.step()
    plain, peak = timed(lambda: [run.step() for _ in range(TIMED)], device)
    stats = hb.collect_stats(run.model, every=1)

    def sampled() -> None:
        run.step()
        stats.advance()

    first, _ = timed(sampled, device)  # compiles, and makes ledgers
    watched, watched_peak = timed(lambda: [sampled() for _ in range(SAMPLED)], device)
    stats.every = 10**9
    stats.start_at(1)
    attached, _ = timed(lambda: [(run.step(), stats.advance()) for _ in range(TIMED)], device)
    stats.remove()
    one, between, each = plain / TIMED, attached / TIMED, watched / SAMPLED
    return {
        "plain_ms": 1e3 * one,
        "between_ms": 1e3 * between,
        "sampled_ms": 1e3 * each,
        "first_sampled_ms": 1e3 * first,
        "peak_GiB": peak,
        "sampled_peak_GiB": watched_peak,
        "cost": (each - one) / (every * one),
    }


def measure(name: str, shape: tuple[int, int], every: int, device: torch.device, compiles: bool) -> dict[str, Any]:
    """Return the figures of one case."""
    found = times(name, shape, every, device, compiles)
    gc.collect()  # the model that was timed
    without, again, watched = (losses(name, shape, device, compiles, sampled) for sampled in (False, False, True))
    about = {"case": "stats/step", "model": name, "tokens": list(shape), "every": every, "compiled": compiles}
    return about | found | {"repeats": without == again, "losses_equal": without == watched}


def main(arguments: list[str]) -> int:
    """Measure eager and compiled blocks, print each as a line of JSON, and write them; 1 if a loss changed."""
    parser = argparse.ArgumentParser(
        prog="bench.stats", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="1b", metavar="PRESET")
    parser.add_argument("--tokens", nargs=2, type=int, default=[8, 2048], metavar=("SEQUENCES", "LENGTH"))
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--ways", nargs="*", default=["eager", "compiled"], choices=("eager", "compiled"))
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = []
    for way in options.ways:
        lines.append(measure(options.model, tuple(options.tokens), options.every, device, way == "compiled"))
        print(json.dumps(lines[-1]), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    facts = machine.facts(device) | ({"commit": options.commit} if options.commit else {})
    path = results.claim(facts, options.out, "stats")
    results.write(path, facts, lines)
    return 0 if all(line["losses_equal"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
