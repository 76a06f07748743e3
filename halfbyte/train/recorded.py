"""What a run writes into its folder beside checkpoints, read back and checked."""

from __future__ import annotations

from pathlib import Path

from halfbyte import files
from halfbyte.train import environment

CONFIG, RESULT, LAYERS = "config.json", "result.json", "layers.txt"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
COMPARISON, LEAGUE = "results.json", "league.json"
"""Of a folder that holds several runs, each in a folder of its own."""
NUMBERS = ("tokens", "seconds", "tokens_per_second", "peak_memory_bytes", "saved_activation_bytes")
STEADY = "steady_tokens_per_second"
PROCESSOR = "processor"
LARGEST = 1e300


def recorded_config(folder: Path) -> dict:
    """Return config.json.

    Raises:
        ValueError: it is not one that a run wrote.
    """
    path = folder / CONFIG
    facts = files.read_json(path)
    _check(path, isinstance(facts.get("identity"), dict), "no identity")
    _check(path, isinstance(facts.get("environment", {}), dict), "its environment is no object")
    return facts


def read_result(path: Path) -> dict:
    """Return result.json.

    Raises:
        ValueError: it is not one that a run wrote.
    """
    result = files.read_json(path)
    _check(path, isinstance(result.get("identity"), dict), "no identity")
    recipe = result.get("recipe")
    _check(path, isinstance(recipe, str) and recipe == result["identity"].get("recipe"), "recipe is not its identity's")
    _check(path, type(result.get("steps")) is int and result["steps"] >= 0, "steps is no number of steps")
    _check(path, type(result.get("is_diverged")) is bool, "is_diverged is neither true nor false")
    for name in NUMBERS:
        _check(path, _is_number(result.get(name)), f"{name} is no number")
    steady = result.get(STEADY)
    _check(path, steady is None or (_is_number(steady) and steady > 0), f"{STEADY} is no speed")
    _check(path, type(result.get(PROCESSOR)) in (str, type(None)), f"{PROCESSOR} is no name")
    loss = result.get("held_out_loss", "")
    _check(path, loss is None or type(loss) is float or _is_number(loss), "held_out_loss is neither a number nor null")
    for name, kind in (("diverged_at", int), ("diverged_in", str)):
        _check(path, type(result.get(name)) in (kind, type(None)), f"{name} is no {kind.__name__}")
    reason = environment.problem(result.get("environments", []))
    _check(path, not reason, reason)
    return result


def speed(result: dict) -> float:
    """Return the tokens a second of a result: at its pace, or, where no step was timed, those of the whole run."""
    return result.get(STEADY) or result["tokens_per_second"]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST  # type: ignore[operator]


def _check(path: Path, is_right: bool, reason: str) -> None:
    if not is_right:
        raise ValueError(f"{path}: not what a run of halfbyte writes ({reason}); delete it or restore it from a copy")
