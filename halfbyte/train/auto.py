"""What `fuse`, `compile` and `graph` are when they are "auto": on where they make a GPU faster, else off with a reason.

A pure function of the config, the facts of the machine and what the run in the folder began with; `folder.settled`
gathers these. `fuse` and `compile` change last bits of a loss (docs/training.md), so a run keeps what it began with;
`graph` changes none and is chosen anew whenever a run goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

import halfbyte as hb
from halfbyte.train import config as configs
from halfbyte.train import graphs
from halfbyte.train import model as models
from halfbyte.train.config import TrainConfig

Option = Literal["fuse", "compile", "graph"]
OPTIONS: tuple[Option, ...] = ("fuse", "compile", "graph")
OF_THE_RESULT: tuple[Option, ...] = ("fuse", "compile")
"""Those in a run's identity."""
STEPS_THAT_PAY = 100
"""Steps under one recipe from which on compiling its graphs, a minute or so, is earned back."""
MOST_GRAPHS = 96
"""Of a block: training and validation of the first, of quantized and of kept blocks, again for every recipe."""
GRAPHS_OF_A_RECIPE = 6
PRESET = "auto"
"""Of `--preset`: what `preset_here` chooses."""
MIDDLE, LARGE = 50_000_000, 1_000_000_000
"""Parameters from which on a model is trained on sequences of 1,024 tokens, and on half of them at a time."""
WITH_TP = "layers that ranks share (--tp) run neither fused nor compiled, and no graph captures their communication"
WITH_CODES = "layers whose weights are there in NVFP4 alone run eagerly"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the choice depends on beside the config.

    Args:
        device: type of the run's device.
        no_kernels: why the Triton kernels do not run there, "" if they do.
    """

    device: str
    no_kernels: str = ""


class OptionChoice(NamedTuple):
    """Whether an option is on, and why; `follows` says that the run in the folder decided it."""

    is_on: bool
    reason: str
    follows: bool = False


def device_of(config: TrainConfig) -> torch.device:
    """Return where a run would be; the CPU for one that needs a GPU and has none, which `Trainer` refuses."""
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def facts(device: torch.device) -> Facts:
    """Return the facts of a device."""
    if device.type == "cpu":
        return Facts(device="cpu")
    triton = next(status for status in hb.backends(device) if status.name == "triton")
    return Facts(device=device.type, no_kernels="" if triton.available else triton.reason)


def preset_here(model: str | None) -> tuple[TrainConfig, str]:
    """Return the preset of a command that names none, and a line on why; "" on a machine without a GPU.

    Args:
        model: that the command names, None for none.
    """
    here = facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if here.device == "cpu":
        return configs.two_cores(), ""
    if here.no_kernels:
        return configs.two_cores(), f"preset: two_cores, {_no_gpu(here)}; --preset small_gpu takes the GPU all the same"
    shape = models.PRESETS.get(model or "")  # one that there is not is refused with all options
    name, size = ("one_gpu", shape.parameters) if shape and shape.parameters >= MIDDLE else ("small_gpu", 0)
    preset = configs.training_preset(name)
    if size >= LARGE:  # within 80 GB, with fp32 masters and AdamW's states
        halved = replace(preset.data, batch=preset.data.batch // 2, accumulate=preset.data.accumulate * 2)
        preset = replace(preset, data=halved)
    of = f" and a model of {size / 1e6:,.0f}M parameters" if size else ""
    return preset, f"preset: {name}, for this GPU{of}; --preset two_cores trains on the CPU"


def choose_options(config: TrainConfig, facts: Facts, begun: Mapping[str, bool]) -> dict[Option, OptionChoice]:
    """Return what each option is to be.

    Args:
        config: the run, or what the runs of a comparison share. Nothing depends on the recipe: all are run alike.
        facts: of the machine.
        begun: `fuse` and `compile` of the run that is to go on; empty for a new one.

    Returns:
        An OptionChoice for each of `OPTIONS`; one that the config switches on or off has the reason "asked for".
    """
    choices = {}
    for option in OPTIONS:
        asked = getattr(config.run if option == "graph" else config, option)
        choice = OptionChoice(asked == "on", "asked for") if asked != "auto" else _by_itself(option, config, facts)
        if asked == "auto" and begun.get(option, choice.is_on) != choice.is_on:
            choice = OptionChoice(begun[option], "as in the run that its folder holds", follows=True)
        choices[option] = choice
    return choices


def apply(config: TrainConfig, choices: Mapping[Option, OptionChoice]) -> TrainConfig:
    """Return the config with every option on or off; a graph that nobody asked for stays "auto": on if it fits."""
    words = {option: _word(choices[option].is_on) for option in OPTIONS}
    graph = config.run.graph if choices["graph"].is_on else "off"
    return replace(config, fuse=words["fuse"], compile=words["compile"], run=replace(config.run, graph=graph))


def lines(config: TrainConfig, facts: Facts, choices: Mapping[Option, OptionChoice]) -> tuple[str, ...]:
    """Return what a user should know: what is off on a GPU though not asked for, and what the run there decided."""
    found = []
    for option, choice in choices.items():
        asked = getattr(config.run if option == "graph" else config, option)
        if asked == "auto" and (choice.follows or (facts.device != "cpu" and not choice.is_on)):
            found.append(f"{option}: {_word(choice.is_on)}, {choice.reason}; {_remedy(option, choice, config)}")
        elif asked == "on" and option == "graph" and facts.device == "cpu" and config.device != "cuda":
            found.append("graph: off, a CPU has no CUDA graphs; leave --graph out")
    return tuple(found)


def say(lines: Iterable[str]) -> None:
    """Print lines for a user on standard error."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def in_words(config: TrainConfig) -> str:
    """Return what of `OF_THE_RESULT` is on, as the end of a sentence: ", fused, compiled" or less."""
    words = {", fused": config.fuse, ", compiled": config.compile}
    return "".join(word for word, value in words.items() if value == "on")


def _by_itself(option: Option, config: TrainConfig, facts: Facts) -> OptionChoice:
    reason = _no_gpu(facts)
    if not reason and config.mesh.tp > 1:
        reason = WITH_TP
    if not reason and option == "compile":
        reason = _no_compile(config)
    if not reason and option == "graph":
        reason = _no_graph(config)
    return OptionChoice(not reason, reason or "a GPU")


def _no_gpu(facts: Facts) -> str:
    if facts.device == "cpu":
        return "a CPU gains nothing from it"
    return facts.no_kernels and f"the Triton kernels do not run on this GPU ({facts.no_kernels})"


def _no_compile(config: TrainConfig) -> str:
    steps, recipes = config.optim.steps, _recipes(config)
    if models.model_preset(config.model).moe is not None:
        return "compiled mixtures of experts have not been timed on a GPU"
    if config.mesh.weights == "nvfp4" and config.mesh.dp_shard == 1:
        return WITH_CODES
    if config.run.recompute == "selective":
        return "compiled blocks write over what recompute='selective' keeps"
    if recipes * GRAPHS_OF_A_RECIPE > MOST_GRAPHS:
        return f"the schedule has {recipes} recipes, of which torch keeps {MOST_GRAPHS // GRAPHS_OF_A_RECIPE} compiled"
    if steps < STEPS_THAT_PAY * recipes:
        each = f" for {recipes} recipes" if recipes > 1 else ""
        return f"{steps} steps{each} do not pay for compiling, {STEPS_THAT_PAY * recipes} do"
    return ""


def _no_graph(config: TrainConfig) -> str:
    if config.mesh.size > 1:
        return f"{config.mesh.size} ranks step together, and graphs with their communication are not captured"
    if config.optim.steps <= graphs.WARM_UP + 1:
        return f"a graph is captured after {graphs.WARM_UP} steps, and the run has {config.optim.steps}"
    return ""


def _recipes(config: TrainConfig) -> int:
    """Return how many recipes a run follows; changing back compiles nothing."""
    schedule = config.schedule()
    if config.switch() is not None:
        return 2
    return 1 if schedule is None else 1 + len({recipe for _, recipe in schedule.changes})


def _remedy(option: Option, choice: OptionChoice, config: TrainConfig) -> str:
    if choice.follows:
        return "--overwrite starts anew"
    if choice.reason == WITH_TP:
        return "it goes with --tp 1"
    if option == "graph" and config.mesh.size > 1:  # with which it is refused
        return "one process alone has it"
    if option == "compile" and choice.reason == WITH_CODES:
        return "it goes with --weights plain, or with --dp-shard"
    if option == "compile" and config.run.recompute == "selective":  # with which it is refused
        return "--recompute full goes with it"
    return f"--{option} on overrides that"


def _word(is_on: bool) -> Literal["on", "off"]:
    return "on" if is_on else "off"
