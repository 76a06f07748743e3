"""LoRA on one GPU: a base of NVFP4 codes, adapters beside it and merged in every forward, against a base in bf16.

    python -m bench.lora --model 8b --tokens 4 2048 --out bench/results

For each way: bytes of the base's linear layers, peak memory and tokens a second of whole training steps (AdamW on the
adapters, blocks recomputed in the backward as --recompute says), the loss before and after them, and what merging
changes: of merge_aware the logits stay, bit for bit. Without a GPU small models show that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfbyte as hb
from bench import machine, results
from bench.measure import timed
from halfbyte.functional.lora import Adapter, add_adapter
from halfbyte.train import model as models

WARM_UP, TIMED = 2, 4
WAYS = ("bf16", "nvfp4", "weight_only", "merge_aware")
TARGETS = ("layers.*",)


class PlainLoRA(nn.Module):
    """A linear layer in high precision with an adapter: what the ways with codes are compared with."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        where = {"device": base.weight.device}
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features, **where) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, **where))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both products."""
        return add_adapter(self.base(x), x, Adapter(self.lora_A, self.lora_B, self.scaling))


def build(name: str, way: str, rank: int, device: torch.device, compiles: bool) -> tuple[models.Decoder, hb.RunState]:
    """Return a decoder of random bf16 weights with adapters, and what its layers draw from."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = models.Decoder(models.model_preset(name))
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    state, alpha = hb.RunState(0), 2.0 * rank
    if way == "bf16":
        model.requires_grad_(False)
        for parent in [m for block in model.layers for m in block.modules()]:
            for key, child in parent._modules.items():
                if isinstance(child, nn.Linear) and not isinstance(parent, PlainLoRA):
                    parent._modules[key] = PlainLoRA(child, rank, alpha)
    else:
        recipe = hb.recipes.weight_only() if way == "weight_only" else hb.recipes.nvfp4()
        state = hb.quantize_(model, recipe, keep=hb.Keep(names=("lm_head",), last_fraction=0), state=state).state
        state.to(device)
        hb.lora_(model, rank=rank, alpha=alpha, targets=TARGETS, merge_aware=way == "merge_aware")
    if compiles:
        for block in model.layers:
            block.compile()
    return model, state


def base_bytes(model: models.Decoder) -> tuple[int, int]:
    """Return the elements of the weights of the blocks' linear layers, and the bytes that they take."""
    layers = [m for block in model.layers for m in block.modules() if isinstance(m, nn.Linear)]
    weights = [layer.weight for layer in layers]
    return sum(w.numel() for w in weights), sum(w.nbytes for w in weights)


def tokens_of(model: models.Decoder, shape: tuple[int, int], step: int, device: torch.device) -> Tensor:
    """Return token ids that follow a rule that can be learned."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(997, (shape[0], 1), generator=generator)
    ids = first * (1 + torch.arange(shape[1] + 1)) % 997 % model.config.vocab_size
    return ids.to(device, non_blocking=True)


def measure(
    name: str, way: str, shape: tuple[int, int], rank: int, device: torch.device, recompute: Any, compiles: bool
) -> dict[str, Any]:
    """Train some steps in one way and return its figures."""
    model, state = build(name, way, rank, device, compiles)
    model.recompute = recompute
    numel, held = base_bytes(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, fused=device.type == "cuda")
    at_rest = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def step(number: int) -> None:
        ids = tokens_of(model, shape, number, device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        state.advance()
        optimizer.step()
        optimizer.zero_grad()

    losses = [_loss(model, shape, device)]
    for number in range(WARM_UP):
        step(number)
    seconds, peak = timed(lambda: [step(WARM_UP + number) for number in range(TIMED)], device)
    losses.append(_loss(model, shape, device))
    outcome = {
        "case": "lora/step",
        "model": name,
        "way": way,
        "tokens": list(shape),
        "rank": rank,
        "recompute": recompute,
        "compiled": compiles,
        "base_weights": numel,
        "base_bits": 8 * held / numel,
        "trained_parameters": sum(p.numel() for p in trained),
        "at_rest_GiB": at_rest / 2**30,
        "peak_GiB": peak,
        "step_ms": 1e3 * seconds / TIMED,
        "tokens_per_s": shape[0] * shape[1] * TIMED / seconds,
        "losses": losses,
    }
    return outcome | (merging(model, way, shape, device) if way != "bf16" else {})


def _loss(model: models.Decoder, shape: tuple[int, int], device: torch.device) -> float:
    """Return the loss of a sequence that is not trained on."""
    with torch.no_grad():
        logits, targets = _held_out(model, shape, device)
        return F.cross_entropy(logits.float(), targets).item()


def _held_out(model: models.Decoder, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    ids = tokens_of(model, (1, shape[1]), 10**6, device)
    logits = model(ids[:, :-1])
    assert isinstance(logits, Tensor), "asked for without losses of balance"
    return logits.flatten(0, 1), ids[:, 1:].flatten()


def merging(model: models.Decoder, way: str, shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Return what merging the adapters changes: of weights, of codes, of logits."""
    if any(block._compiled_call_impl is not None for block in model.layers):
        for block in model.layers:  # eager before and after: one order of sums
            block._compiled_call_impl = None
    with torch.no_grad():
        before = _held_out(model, shape, device)[0]
        merged = hb.merge_lora_(model)
        after = _held_out(model, shape, device)[0]
    equal = bool(torch.equal(before, after))
    if way == "merge_aware" and not equal:
        raise AssertionError("merged bytes are not the trained bytes")
    difference = (after.float() - before.float()).norm() / before.float().norm()
    return {
        "merged_equals_trained": equal,
        "merge_error": merged.error,
        "codes_changed": sum(row.changed for row in merged.rows) / len(merged.rows),
        "logits_changed": float(difference),
    }


def main(arguments: list[str]) -> int:
    """Measure every way, print each as a line of JSON, and write them."""
    parser = argparse.ArgumentParser(
        prog="bench.lora", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="8b", metavar="PRESET")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--tokens", nargs=2, type=int, default=[4, 2048], metavar=("SEQUENCES", "LENGTH"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--recompute", choices=("nothing", "full"), default="full")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    parser.add_argument("--commit", help="what to record where the sources lie outside a git checkout")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = []
    for way in options.ways:
        begun = time.perf_counter()
        how = (options.rank, device, options.recompute, options.compile)
        values = measure(options.model, way, tuple(options.tokens), *how)
        lines.append(values | {"took_s": round(time.perf_counter() - begun, 1)})
        print(json.dumps(lines[-1]), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    facts = machine.facts(device) | ({"commit": options.commit} if options.commit else {})
    path = results.claim(facts, options.out, "lora")
    results.write(path, facts, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
