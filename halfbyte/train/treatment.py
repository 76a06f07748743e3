"""What a run does to the model: a recipe, and which layers follow it, written as one word.

`nvfp4` follows hb.quantize_'s default policy: lm_head and the last 15 % of the blocks stay in high precision.
`nvfp4@all` puts every linear layer under the recipe. A recipe may have options, `nvfp4(rht=64)` (options.py), and
behind it, with a plus before each, may stand what is changed about the run:

- `schedule` or `schedule(0.8:bf16/nvfp4)`: this run follows the command's schedule of recipes, or one of its own;
- `late(0.2)`: the forward of the last 20 % of the steps is in high precision;
- `bits(1)`: quantization draws other random bits, all else stays: what is left between two runs is their noise;
- `lr(0.002)`: the learning rate is that;
- `order`: the same step in twice as many micro-batches of half the size, whose sums have another order: noise too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import halfbyte as hb
from halfbyte.functional.dispatch import dispatch_problem
from halfbyte.functional.earlier import refuse_delayed
from halfbyte.functional.grouped import recipe_of_experts
from halfbyte.train import model as models
from halfbyte.train import options
from halfbyte.values import split_outside

if TYPE_CHECKING:
    from halfbyte.train.config import TrainConfig

EVERYWHERE = "all"
CONTROL = "naive_fp4"
"""The recipe that is meant to lose."""
CHANGES = "schedule, schedule(WHEN:RECIPE,…), late(SHARE), bits(N), lr(RATE), order"


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """A recipe and the layers it leaves alone, and what is changed about the run.

    Args:
        name: as the user writes it.
        recipe: for the layers that follow it.
        keep: the layers that do not; None is hb.quantize_'s default.
        schedule: of recipes, as `--recipe-schedule` takes it; "" that of the command, None nobody says.
        bits: which random bits quantization draws; 0 those of the seed.
        halves: how often micro-batches are halved.
        lr: the peak learning rate, None that of the command.
    """

    name: str
    recipe: hb.Recipe
    keep: hb.Keep | None
    schedule: str | None = None
    bits: int = 0
    halves: int = 0
    lr: float | None = None

    @property
    def is_control(self) -> bool:
        """Whether the recipe, its forward or its backward is there to show what failing looks like."""
        head = split_outside(self.name, "+")[0].partition("@")[0]
        return CONTROL in [word.partition("(")[0] for word in split_outside(head, "/")]


def treatment_of(name: str) -> Treatment:
    """Return the treatment called `name`: a recipe, with `@all` and changes of the run behind it or without.

    Raises:
        ValueError: no recipe has that name or option, something else than `all` follows the `@`, or there is no such
            change.
    """
    head, *changes = split_outside(name, "+")
    recipe, at, layers = head.partition("@")
    if at and layers != EVERYWHERE:
        raise ValueError(f"recipe={name!r}: {layers!r} after the @; use {recipe}@{EVERYWHERE} or {recipe}")
    keep = hb.Keep(names=(), last_fraction=0.0) if at else None
    changed: dict[str, Any] = {}
    for change in changes:
        found = _change(name, recipe, change)
        if set(found) & set(changed):
            raise ValueError(f"recipe={name!r}: {change!r} says again what another change says; keep one of them")
        changed |= found
    return Treatment(name=name, recipe=options.read(recipe), keep=keep, **changed)


def refuse_twins(names: Iterable[str]) -> None:
    """Raise ValueError where two names are one treatment in other words: it would be trained and placed twice."""
    seen: list[Treatment] = []
    for one in map(treatment_of, names):
        twin = next((other.name for other in seen if replace(other, name=one.name) == one), None)
        if twin is not None:
            raise ValueError(f"recipes: {one.name} is {twin} in other words; name it once")
        seen.append(one)


def _change(name: str, recipe: str, change: str) -> dict[str, Any]:
    """Return the fields of a Treatment that a change of the run stands for."""
    word, bracket, rest = change.partition("(")
    value = rest.removesuffix(")")
    try:
        if bracket and not rest.endswith(")"):
            raise ValueError("the last ) is missing")
        if word == "schedule":
            return {"schedule": value}
        if word == "late" and 0 < float(value) < 1:
            if options.read(recipe.partition("@")[0]).fprop is None:
                raise ValueError("its forward is in high precision from the start, so that nothing would change")
            backward = split_outside(recipe, "/")[-1]
            return {"schedule": f"{1 - float(value):.6g}:bf16/{backward}"}
        if word == "bits" and 0 < int(value) < 1 << 15:
            return {"bits": int(value)}
        if word == "lr" and 0 < float(value) < 10:
            return {"lr": float(value)}
        if word == "order" and not bracket:
            return {"halves": 1}
    except ValueError as error:
        raise ValueError(f"recipe={name!r}: {change!r} ({error}); use {CHANGES}") from error
    raise ValueError(f"recipe={name!r}: {change!r} is no change of a run; use {CHANGES}")


def applied(config: TrainConfig, name: str) -> TrainConfig:
    """Return the config of the run under a treatment, which changes more than its recipe.

    Raises:
        ValueError: it asks for a schedule and there is none, or one that changes nothing, for halves of micro-batches
            of an odd number, or for a recipe, now or later, that experts of the model cannot follow.
    """
    chosen = treatment_of(name)
    if chosen.schedule is not None:
        if not (chosen.schedule or config.recipe_schedule):
            raise ValueError(
                f"recipe={name!r}: there is no schedule; give --recipe-schedule, or schedule(WHEN:RECIPE,…)"
            )
        config = replace(config, recipe_schedule=chosen.schedule or config.recipe_schedule)
        _refuse_idle(config, chosen)
    if chosen.bits:
        if not any(one.needs_rng for one in (chosen.recipe, *_later(config))):
            raise ValueError(f"recipe={name!r}: it draws no random bits, so that bits({chosen.bits}) changes nothing")
        config = replace(config, bits=chosen.bits)
    if chosen.lr is not None:
        config = replace(config, optim=replace(config.optim, lr=chosen.lr))
    if chosen.halves:
        times, data = 1 << chosen.halves, config.data
        if data.batch % times:
            raise ValueError(f"recipe={name!r}: batch={data.batch} has no halves; give an even --batch")
        data = replace(data, batch=data.batch // times, accumulate=data.accumulate * times)
        config = replace(config, data=data, eval_batches=config.eval_batches * times)
    check_experts(config, chosen.recipe)
    return config


def check_command(config: TrainConfig, name: str) -> None:
    """Check what `halfbyte train` was asked for, where a schedule is this run's and no other's.

    Raises:
        ValueError: the recipe brings another schedule than the command's, or the schedule changes nothing.
    """
    chosen = treatment_of(name)
    if chosen.schedule and config.recipe_schedule not in ("", chosen.schedule):
        raise ValueError(
            f"recipe_schedule={config.recipe_schedule!r}: {name} brings the schedule {chosen.schedule}; leave out one"
        )
    if config.recipe_schedule:
        _refuse_idle(config, chosen)


def _refuse_idle(config: TrainConfig, chosen: Treatment) -> None:
    """Raise ValueError where a schedule leads to the recipe that the run has by then, or no noise brings its switch."""
    before, switch = chosen.recipe, config.switch()
    problem = None if switch is None or before.specs else f"{chosen.name} rounds nothing, so that it would never switch"
    for one in _later(config):
        if one == before:
            problem = "it changes to the recipe that the run has by then; leave that out, or name another"
        before = one
    if problem is not None:
        raise ValueError(f"recipe_schedule={config.recipe_schedule!r}: {problem}")


def notes(config: TrainConfig, name: str) -> list[str]:
    """Return what is to be said of a run: a forward that leaves 4 bits when the learning rate falls already.

    Published runs change before it falls (arXiv 2509.25149, appendix D).
    """
    schedule, optim, forward = config.schedule(), config.optim, treatment_of(name).recipe.fprop
    falls = optim.steps - round(optim.decay * optim.steps)
    for start, (_, recipe) in zip(schedule.starts, schedule.changes, strict=True) if schedule else ():
        leaves, forward = forward is not None and recipe.fprop is None, recipe.fprop
        if leaves and optim.schedule == "wsd" and start > falls:
            return [
                f"{name}: its forward is in high precision from step {start + 1} on, but the learning rate falls from "
                f"step {falls + 1} on (decay={optim.decay}); published schedules change before it falls: give the "
                "change an earlier step, or a shorter --decay"
            ]
    return []


def _later(config: TrainConfig) -> list[hb.Recipe]:
    """Return the recipes that a run's schedule or switch brings."""
    schedule, switch = config.schedule(), config.switch()
    return [one for _, one in schedule.changes] if schedule else [switch] if switch else []


def check_experts(config: TrainConfig, recipe: hb.Recipe) -> None:
    """Raise ValueError where a run would come to a recipe that its experts cannot follow, however late."""
    if models.model_preset(config.model).moe is None:
        return
    for one in (recipe, *_later(config)):
        recipe_of_experts(one)
        if config.mesh.tp > 1:
            refuse_delayed(one, "experts that ranks share by features (tp)")
        problem = dispatch_problem(one) if config.mesh.dispatch != "plain" and one.fprop and one.fprop.a else None
        if problem is not None:
            raise ValueError(
                f"dispatch={config.mesh.dispatch!r}: {problem}, so that tokens cannot travel as codes once the run has "
                "that recipe; use --dispatch plain"
            )


def schedules_of(config: TrainConfig, names: tuple[str, ...]) -> dict[str, str]:
    """Return the schedule of every run of a comparison, "" for none.

    Where no name asks for it, the command's is for all recipes that quantize a GEMM.
    """
    chosen = {name: treatment_of(name) for name in names}
    asked = any(one.schedule == "" for one in chosen.values())
    return {
        name: applied(config, name).recipe_schedule
        if one.schedule is not None
        else config.recipe_schedule
        if one.recipe.specs and not asked
        else ""
        for name, one in chosen.items()
    }
