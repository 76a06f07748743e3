"""What a comparison means and what to do next, in five lines for whoever has not seen one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.train import divergence, treatment
from halfbyte.train.config import TrainConfig, one_gpu
from halfbyte.train.model import model_preset
from halfbyte.train.recorded import speed

NEAR_PERCENT = 1.0
"""How far one recipe's gaps were apart on three CPUs, in `make train` (README.md)."""
SMALL_TOKENS = 1_000_000
CLEAR_PERCENT = 5.0
"""What a control has to lose at least for a comparison to tell: a third of what it loses in `make train`."""


def closing_lines(config: TrainConfig, results: Sequence[dict], has_gpu: bool | None = None) -> list[str]:
    """Return five lines about the results of a comparison; the first result is the baseline.

    Args:
        config: what was trained.
        results: as `compare.compare` returns them.
        has_gpu: whether this machine has a GPU; looked up by default.
    """
    has_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    base, others = results[0], results[1:]
    controls = [result for result in others if treatment.treatment_of(result["recipe"]).is_control]
    recipes = [result for result in others if result not in controls]
    return [
        _baseline(base),
        _recipes(config, base, recipes),
        _control(base, controls),
        _price(base, recipes),
        _next(config, has_gpu),
    ]


def _baseline(base: dict) -> str:
    diverged = divergence.of(base)
    if diverged:
        return f"{base['recipe']} {diverged}, so there is nothing to measure against: lower --lr."
    loss = base["held_out_loss"]
    if loss == 0:
        return f"{base['recipe']} ends at a loss of 0, of which nothing is a percentage: give text that says something."
    return f"{base['recipe']} ends at {loss:.4f} nats per token of text that it has not seen; less is better."


def _recipes(config: TrainConfig, base: dict, recipes: Sequence[dict]) -> str:
    if not recipes or base["gap_percent"] is None:
        return "No other recipe has a gap: name some, as in --recipes bf16,nvfp4,four_over_six."
    near = [r["recipe"] for r in recipes if r["gap_percent"] is not None and abs(r["gap_percent"]) <= NEAR_PERCENT]
    far = [f"{r['recipe']} ({_gap(r)})" for r in recipes if r["recipe"] not in near]
    noise = (
        "no visible loss in a run this small"
        if config.tokens < SMALL_TOKENS
        else "--seed 1 shows what two runs differ by"
    )
    said = [f"Within {NEAR_PERCENT:g} % of it, {noise}: {', '.join(near)}."] if near else []
    said += [f"Further away: {', '.join(far)}; docs/faq.md, 'My loss is worse', says what to try."] if far else []
    return " ".join(said)


def _gap(result: dict) -> str:
    gap = result["gap_percent"]
    return str(divergence.of(result)) if gap is None else f"{gap:+.2f} %"


def _control(base: dict, controls: Sequence[dict]) -> str:
    if not controls or base["gap_percent"] is None:
        return "No control was compared: with naive_fp4@all in --recipes you see whether the measure can tell."
    control = controls[0]
    name, gap = control["recipe"], control["gap_percent"]
    if gap is not None and gap < CLEAR_PERCENT:
        return f"{name}, a control that should lose, is only {gap:+.2f} % away: too short to tell; give more --steps."
    return f"{name}, a control that should lose, did ({_gap(control)}): the measure can tell bad from good."


def _price(base: dict, recipes: Sequence[dict]) -> str:
    if not recipes:
        return "Time and memory of a recipe are compared when one is named."
    one = recipes[0]
    time = speed(base) / speed(one)
    kept = one["saved_activation_bytes"] / max(1, base["saved_activation_bytes"])
    why = " (GEMMs are emulated here)" if time > 1 and not _is_native() else ""
    took = f"{one['recipe']} took {time:.2f} times {base['recipe']}'s time{why}"
    return f"{took}; its backward keeps {kept:.2f} of the bytes."


def _is_native() -> bool:
    from halfbyte.ops import backends

    return any(backend.name == "native" and backend.available for backend in backends())


def _is_small(config: TrainConfig) -> bool:
    return model_preset(config.model).parameters < model_preset(one_gpu().model).parameters


def _next(config: TrainConfig, has_gpu: bool) -> str:
    larger = "halfbyte compare --preset one_gpu --out runs/one_gpu"
    where = f"this machine's GPU: {larger}" if has_gpu and _is_small(config) else "your model: docs/quickstart.md"
    return f"Next: your text: halfbyte compare --corpus FILE --out runs/mine; {where}."
