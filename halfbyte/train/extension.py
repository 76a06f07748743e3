"""Whether a run may go on with other --steps: only if every step that is done would have been the same."""

from __future__ import annotations

import copy
from typing import Any

from halfbyte.schedule import Schedule
from halfbyte.train import optim
from halfbyte.train.config import OptimConfig, differences

COURSE = ("steps", "schedule", "warmup", "decay", "final_lr")
"""The fields of OptimConfig that say how the learning rate goes from step to step."""


def refusal(ours: dict, theirs: dict, done: int | None) -> str:
    """Return why a run of identity `ours` cannot go on from one of identity `theirs`, "" if it can.

    Args:
        done: optimizer steps of theirs; None if that is not known yet, for the differences that no number excuses.
    """
    changed = differences(ours, theirs)
    if not changed:
        return ""
    words = "; ".join(changed)
    if differences(_without_course(ours), _without_course(theirs)) or _steps(ours) == _steps(theirs):
        return words
    if ("recipe_schedule" in theirs) and "recipe_schedule" not in ours:
        return words
    if done is None:
        return ""
    if done > ours["optim"]["steps"]:
        return f"{words}: {done} steps are done there; give --steps {done} or more"
    try:
        reason = _other_learning_rate(ours, theirs, done) or _other_recipe(ours, theirs, done)
    except (TypeError, ValueError) as error:
        reason = str(error)
    return f"{words}: {reason}" if reason else ""


def _without_course(identity: dict) -> dict:
    rest = {name: value for name, value in identity.items() if name != "recipe_schedule"}
    if isinstance(rest.get("optim"), dict):
        rest["optim"] = {name: value for name, value in rest["optim"].items() if name not in COURSE}
    return rest


def _steps(identity: dict) -> Any:
    values = identity.get("optim")
    return values.get("steps") if isinstance(values, dict) else None


def _other_learning_rate(ours: dict, theirs: dict, done: int) -> str:
    new, old = OptimConfig(**ours["optim"]), OptimConfig(**theirs["optim"])
    pairs = ((step, optim.learning_rate(old, step), optim.learning_rate(new, step)) for step in range(done))
    step, then, now = next((pair for pair in pairs if pair[1] != pair[2]), (None, 0.0, 0.0))
    if step is None:
        return ""
    rises = [round(config.warmup * config.steps) for config in (old, new)]
    if step < max(rises):
        share = rises[0] / new.steps
        why = f"the warm-up is a share of the steps, {rises[0]} there and {rises[1]} here: give --warmup {share:.6g}"
    elif "cosine" in (old.schedule, new.schedule):
        why = "a cosine falls over the whole run, so that more steps change those before"
    else:
        why = "the learning rate has begun to decay; a run that is to be extended needs --decay 0"
    return f"the learning rate of step {step + 1}, which is done, was {then:.6g} and would be {now:.6g}: {why}"


def _other_recipe(ours: dict, theirs: dict, done: int) -> str:
    """Compare the recipes of the steps done; between two changes none differs."""
    new, old = (_schedule(identity) for identity in (ours, theirs))
    places = {0, *(new.starts if new else ()), *(old.starts if old else ())}
    for step in sorted(place for place in places if place < done):
        if (new and new.at(step)) != (old and old.at(step)):
            return (
                f"step {step + 1}, which is done, would follow another recipe: shares in the schedule of recipes move "
                "with --steps; write the change as a step"
            )
    return ""


def _schedule(identity: dict) -> Schedule | None:
    state = copy.deepcopy(identity.get("recipe_schedule"))
    return None if state is None else Schedule.from_state_dict(state)
