"""A trained model made ready for NVFP4: rounded as it is (PTQ), trained on so (QAT), or by its own logits (QAD).

    python -m bench.qat --out runs/qat --write

trains the base in high precision once, and from it each way with the same steps, text and learning rate, on a CPU in
minutes. All are judged as they are served: every linear layer in the forward of `recipes.qat()`, on held-out text.
"bf16, trained on" says what the steps give without any rounding, and rounded after them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import halfbyte as hb
from bench.markdown import rows
from bench.records import Record
from halfbyte.functional import distillation_loss
from halfbyte.train import checkpoint, config, data, loop, measure, recorded, tune
from halfbyte.train import model as models
from halfbyte.train.treatment import treatment_of

RESULT = Path(__file__).with_name("results") / "qat.json"
SERVED = "qat@all"
HIGH = "bf16"
BASE = "base"
WAYS: Mapping[str, tuple[str, bool, float]] = {
    "bf16, trained on": (HIGH, False, 1.0),
    "QAT": (SERVED, False, 1.0),
    "QAD": (SERVED, True, 1.0),
    "QAD, temperature 2": (SERVED, True, 2.0),
}
"""Name: the recipe of training, whether the base teaches, the temperature."""


def main(arguments: Sequence[str]) -> int:
    """Train and judge all ways, print the table and, with --write, keep the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.qat", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/qat"), help="folder of the runs; those in it are kept")
    parser.add_argument("--model", default="nano", help="a model of halfbyte train")
    parser.add_argument("--steps", type=int, default=400, help="of the base")
    parser.add_argument("--tune-steps", type=int, default=100, help="of every way")
    parser.add_argument("--tune-lr", type=float, default=2e-4, help="peak learning rate of every way")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    options = parser.parse_args(arguments)
    found = compare(options.out, options.model, options.steps, options.tune_steps, options.tune_lr)
    print(table(found))
    if options.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def compare(out: Path, model: str, steps: int, tune_steps: int, tune_lr: float) -> dict[str, Any]:
    """Train the base and every way, and return how each is judged."""
    base = replace(config.two_cores(), model=model, optim=replace(config.two_cores().optim, steps=steps))
    base = replace(base, run=replace(base.run, out=out / BASE, cache=out / "cache"))
    text = data.load_data(base.data, base.run.cache)
    loop.train(base, HIGH, text)
    ways = [judged("the base", out / BASE, HIGH, base, text), judged("PTQ", out / BASE, SERVED, base, text)]
    for name, (recipe, teaches, temperature) in WAYS.items():
        folder = out / name.replace(",", "").replace(" ", "-")
        source = config.TuneConfig(begin=out / BASE, teacher=out / BASE if teaches else None, temperature=temperature)
        optim = replace(base.optim, steps=tune_steps, lr=tune_lr)
        way = replace(base, optim=optim, run=replace(base.run, out=folder), tune=source)
        loop.train(way, recipe, text)
        if recipe == HIGH:
            ways.append(judged(name, folder, HIGH, base, text))
        ways.append(judged(f"{name}, then PTQ" if recipe == HIGH else name, folder, SERVED, base, text))
    facts = {"model": model, "steps": steps, "tune_steps": tune_steps, "tune_lr": tune_lr}
    facts["tokens_per_step"] = base.data.tokens_per_step
    return {"run": facts, "environment": measure.package_versions(), "ways": ways}


def judged(name: str, folder: Path, recipe: str, base: config.TrainConfig, text: data.Data) -> dict[str, Any]:
    """Return how a run's model does in a recipe on held-out text, and how far its tokens are from the base's.

    Returns:
        loss: mean cross entropy. divergence: mean KL(base ‖ model) a token. agreement: share of the tokens whose most
        likely successor is the base's.
    """
    teacher, model = loaded(base.run.out), loaded(folder)
    chosen = treatment_of(recipe)
    if chosen.recipe.specs:
        hb.quantize_(model, chosen.recipe, keep=chosen.keep)
    layout = {"sequence": base.data.sequence, "batch": base.data.batch, "device": torch.device("cpu")}
    held_out = data.Batches(text.held_out, seed=loop.HELD_OUT_SEED, **layout)
    count = min(base.eval_batches, held_out.windows // base.data.batch)
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for position in range(count):
            inputs, targets = held_out[position]
            logits, wanted = model(inputs), teacher(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            agrees = (logits.argmax(-1) == wanted.argmax(-1)).double().mean()
            sums += torch.stack([loss.double(), distillation_loss(logits, wanted).double().mean(), agrees])
    loss, divergence, agreement = (sums / count).tolist()
    return {"way": name, "recipe": recipe, "loss": loss, "divergence": divergence, "agreement": agreement}


def loaded(folder: Path) -> models.Decoder:
    """Return the model of a run's newest checkpoint, in high precision."""
    source = tune.find_run(folder, "folder")
    model = models.Decoder(source.shape())
    path = checkpoint.checkpoints_in(folder / recorded.CHECKPOINTS)[-1]
    model.load_state_dict(checkpoint.load_checkpoint(path, source.identity)["model"])
    return model.eval()


def table(found: Mapping[str, Any]) -> str:
    """Return the result as the docs print it."""
    lines = [
        [way["way"], f"{way['loss']:.4f}", f"{way['divergence']:.4f}", f"{100 * way['agreement']:.1f} %"]
        for way in found["ways"]
    ]
    return rows(["", "held-out loss", "KL from the base", "same next token"], lines)


def render(records: Sequence[Record]) -> str:
    """Return the table of the kept result, for bench.tables."""
    return table(json.loads(RESULT.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
