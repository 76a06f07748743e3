"""torchtitan 0.3: linear layers and experts that follow a recipe, as overrides of its configs.

torchtitan builds a model from a tree of configs, on the meta device, and shards what was built; so what is replaced are
configs, before anything is built. `quantize_config_` does it by the rules of `hb.quantize_`; `recipe_linear`,
`recipe_experts`, `recipe_checkpoint` and `recipe_selective_ac` are overrides that a command line names by
`--override.imports`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import CompileConfig, derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3 import config_registry
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

import halfbyte.nn as hb_nn
from halfbyte import ops
from halfbyte.distributed.plain_parts import PlainParts
from halfbyte.integrations.titan_limits import (
    changes_by_step,
    refuse_compiled,
    refuse_experts,
    refuse_graphs,
    refuse_parallelism,
    refuse_replaced,
    refuse_uncalled,
)
from halfbyte.integrations.titan_pipeline import data_rank, follow_pipeline, layers_of_run
from halfbyte.integrations.titan_run import Evaluation, Saved
from halfbyte.integrations.titan_types import UntypedHooks, learn_types, multiplied
from halfbyte.nn.grouped import GroupedRecipe
from halfbyte.nn.streams import FollowsRecipe, name_layers
from halfbyte.policy import Keep, kept_layers, matches, unmatched_names
from halfbyte.recipes import read_recipe, resolve
from halfbyte.report import Report, Row
from halfbyte.schedule import parse_schedule
from halfbyte.spec import Recipe
from halfbyte.state import RunState

SHARE_AMAX = (("wq", "wk", "wv"), ("w1", "w3"))
"""Siblings that serving engines fuse, by torchtitan's names."""

STATE = "halfbyte"
"""The key of the RunState in torchtitan's checkpoints."""

EVALUATIONS = ("high_precision", "as_trained")

_HERE = __name__
_NO_STATE = (
    f"the layer has no RunState to draw random bits from: let {_HERE}.quantize_config_ convert the config, or add "
    f"{_HERE}.recipe_checkpoint to --override.imports"
)


class RecipeLinear(hb_nn.Linear, Linear):
    """torchtitan's Linear whose GEMMs follow a recipe: hb.nn.Linear built from a config."""

    as_part: PlainParts | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: str = "nvfp4"
        """A preset's name or a recipe's key."""

        origin: str = ""
        """Where the tree of configs held this one; layers of one origin follow one recipe."""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.origin = config.origin
        self.adopt("bf16", None)  # a state of its own would draw its seed where nobody asked for it
        self.recipe = read_recipe(config.recipe)

    def forward(self, input: Tensor) -> Tensor:  # torchtitan wraps it and hands over every argument that it names
        return super().forward(input) if self.as_part is None else self.as_part.output(super().forward, input)

    def place(self, call: int = 0, device: torch.device | None = None) -> Any:
        _check_state(self)
        return super().place(call, device)

    def parallelize(self, parallel_dims: Any) -> None:
        refuse_parallelism(parallel_dims)
        if parallel_dims.spmd_backend == "spmd_types":
            learn_types(self, parallel_dims)
        super().parallelize(parallel_dims)


class _Products(GroupedRecipe, Module):
    """The recipe of one of the three weights of experts; torchtitan wants every module to be a Module of its own."""

    def place(self, call: int = 0, device: torch.device | None = None) -> Any:
        _check_state(self)
        return super().place(call, device)


class RecipeExperts(GroupedExperts):
    """torchtitan's experts whose three grouped GEMMs follow a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        recipe: str = "nvfp4"
        """A preset's name or a recipe's key."""

        origin: str = ""
        """As of RecipeLinear."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.origin = config.origin
        experts, recipe = config.num_experts, read_recipe(config.recipe)
        self.w1_recipe = _Products(experts, config.dim, config.hidden_dim)
        self.w3_recipe = _Products(experts, config.dim, config.hidden_dim)
        self.w2_recipe = _Products(experts, config.hidden_dim, config.dim)
        for product in self._products:
            product.recipe = recipe
        self._next = 0

    @property
    def _products(self) -> tuple[_Products, _Products, _Products]:
        """The three in the order in which torchtitan's forward multiplies."""
        return self.w1_recipe, self.w3_recipe, self.w2_recipe

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        self._next = 0
        return super().forward(x_RD, num_tokens_per_expert_E)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        product = self._products[self._next]
        self._next += 1
        if not product.recipe.specs:
            return super()._grouped_mm(A=A, B_t=B_t, offs=offs)
        return multiplied(product, A, B_t.transpose(-2, -1), offs)

    def parallelize(self, parallel_dims: Any) -> None:
        refuse_parallelism(parallel_dims)
        refuse_experts(parallel_dims, [product.recipe for product in self._products])
        super().parallelize(parallel_dims)


class RunStateCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager, which brings the run's RunState along.

    It is the first component that torchtitan hands the finished model to and the one it calls around every step, with
    checkpoints enabled or not: it joins the layers to one RunState, each rank at a place of its own, moves it on and
    begins the steps of a schedule.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        seed: int = 0
        """Of the RunState."""

        schedule: str = ""
        """Changes of recipe, "WHEN:RECIPE,…", as of `halfbyte train`."""

        evaluation: str = "high_precision"
        """What the model computes in eval mode: "high_precision" or "as_trained"."""

        converted: tuple[str, ...] = ()
        """Names of the layers and experts that `quantize_config_` converted."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        **form: Any,
    ) -> None:
        if config.evaluation not in EVALUATIONS:
            raise ValueError(f"evaluation={config.evaluation!r}: use one of {', '.join(map(repr, EVALUATIONS))}")
        trainer = states["train_state"]
        dims = trainer.parallel_dims
        refuse_parallelism(dims)
        refuse_compiled(dims, trainer.config.compile)
        refuse_uncalled(dims, model_parts, RecipeLinear)
        layers = layers_of_run(model_parts, trainer.model_config, dims.pp)
        refuse_replaced(config.converted, layers)
        refuse_graphs(config.schedule, [layer.recipe for layer in layers.values()], trainer.config.training)
        self.run_state = RunState(config.seed, parse_schedule(config.schedule, trainer.config.training.steps))
        if dist.is_initialized():
            self.run_state.set_rank(data_rank(dims))
        _join(model_parts, layers, self.run_state)
        if dims.pp > 1:
            follow_pipeline(trainer.pp_schedule, self.run_state, trainer.num_pipeline_parallel_microbatches)
        else:
            UntypedHooks(self.run_state, model_parts[0])
        self._layers = nn.ModuleList(layers.values())
        if config.evaluation == EVALUATIONS[0]:
            for part in model_parts:
                Evaluation(part)
        super().__init__(
            config,
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            sd_adapter=form.pop("sd_adapter"),
            base_folder=form.pop("base_folder", ""),
        )
        assert not form, "torchtitan 0.3 hands over no more"
        if self.enable:
            self.states[STATE] = Saved(layers, self.run_state)

    def load(self, step: int = -1) -> bool:
        found = super().load(step)
        self.run_state.begin_step(self._layers)
        return found

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = super().save(curr_step, last_step)
        if not last_step:
            self.run_state.begin_step(self._layers)
        return saved


class RecipeSelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing, which keeps what our ops computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | set(ops.selective_checkpoint_ops())


@override(
    target=Linear.Config,
    exact=True,
    fqns=["*.attention.*", "*.feed_forward.*", "*.shared_experts.*"],
    description="linear layers of blocks follow a recipe of halfbyte",
)
def recipe_linear(cfg: Linear.Config, recipe: str = "nvfp4") -> RecipeLinear.Config:
    """Replace a linear layer of attention or a feed-forward network; heads and routers are none."""
    return _linear(cfg, recipe)


@override(target=GroupedExperts.Config, exact=True, description="experts follow a recipe of halfbyte")
def recipe_experts(cfg: GroupedExperts.Config, recipe: str = "nvfp4") -> RecipeExperts.Config:
    """Replace the routed experts of a block."""
    return _experts(cfg, recipe)


@override(target=CheckpointManager.Config, exact=True, description="checkpoints hold the RunState of halfbyte")
def recipe_checkpoint(
    cfg: CheckpointManager.Config,
    seed: int = 0,
    schedule: str = "",
    evaluation: str = "high_precision",
    converted: Sequence[str] = (),
) -> RunStateCheckpoints.Config:
    """Let the checkpoint manager carry the RunState, which layers draw from; always named beside `recipe_linear`."""
    own: dict[str, Any] = {"seed": seed, "schedule": schedule, "evaluation": evaluation, "converted": tuple(converted)}
    return derive(cfg, RunStateCheckpoints.Config, **own)


@override(target=SelectiveAC.Config, exact=True, description="selective checkpointing keeps ops of halfbyte")
def recipe_selective_ac(cfg: SelectiveAC.Config) -> RecipeSelectiveAC.Config:
    """Let selective activation checkpointing keep quantized operands and the outputs of our GEMMs."""
    return derive(cfg, RecipeSelectiveAC.Config)


def quantize_config_(
    config: Trainer.Config,
    recipe: Recipe | str = "nvfp4",
    *,
    rules: Mapping[str, Recipe | str | None] | None = None,
    keep: Keep | None = None,
    seed: int = 0,
    schedule: str = "",
    evaluation: str = "high_precision",
) -> Trainer.Config:
    """Let a torchtitan run train in a recipe, and return its config; call it in a function of a config registry.

    The linear layers and routed experts of the model are replaced by the rules of `hb.quantize_`: by default all but
    heads, routers and the last 15 % of the blocks. The RunState advances with every micro-batch, each rank draws bits
    of its own, checkpoints hold it; selective activation checkpointing keeps what is quantized. FSDP2, HSDP, pipelines,
    context, expert and tensor parallelism are torchtitan's (the last with no routed experts in a recipe, and no
    compiled blocks).

    Args:
        config: what a function such as llama3_8b() returned; it is changed, its model config is replaced by a copy.
        recipe, rules, keep: as of `hb.quantize_`, with torchtitan's names: "layers.0.feed_forward.w1"; experts have one
            name, "layers.0.moe.routed_experts.inner_experts".
        seed: of the RunState, the same on all ranks.
        schedule: "WHEN:RECIPE,…" as of `halfbyte train`, such as "0.9:bf16/nvfp4"; sets disable_cuda_graphs, as
            recipes with amaxes of earlier steps do, because a captured graph would go on as it was captured.
        evaluation: "high_precision", or "as_trained" to validate in the recipes.

    Returns:
        config.

    Raises:
        ValueError: nothing would be converted, a rule or a name of `keep` matches no layer, the config has a
            checkpoint manager of its own kind, or another argument is none of these.
    """
    _check_config(config, evaluation)
    parse_schedule(schedule, config.training.steps)
    spec: Any = config.model_spec
    spec.model = copy.deepcopy(spec.model)
    report = _convert(spec.model, resolve(recipe), rules or {}, keep, RunState(seed))
    config.training.disable_cuda_graphs |= bool(changes_by_step(schedule, [row.recipe for row in report.rows]))
    converted = [row.name for row in report.rows if row.recipe is not None]
    own: dict[str, Any] = {"seed": seed, "schedule": schedule, "evaluation": evaluation, "converted": converted}
    config.override.imports = [*config.override.imports, (f"{_HERE}.recipe_checkpoint", own)]
    if type(config.activation_checkpoint) is SelectiveAC.Config:
        config.override.imports.append(f"{_HERE}.recipe_selective_ac")
    logger.info("%s", report)
    return config


def _check_config(config: Any, evaluation: str) -> None:
    if not isinstance(config, Trainer.Config) or config.model_spec is None:
        raise TypeError(f"config={type(config).__name__}: give torchtitan's Trainer.Config with a model_spec")
    if type(config.checkpoint) is not CheckpointManager.Config:
        raise ValueError(
            f"config.checkpoint={type(config.checkpoint).__qualname__}: the RunState is kept by torchtitan's own "
            "CheckpointManager; leave config.checkpoint of that class"
        )
    if evaluation not in EVALUATIONS:
        raise ValueError(f"evaluation={evaluation!r}: use one of {', '.join(map(repr, EVALUATIONS))}")


def _convert(
    tree: Any, recipe: Recipe, rules: Mapping[str, Recipe | str | None], keep: Keep | None, state: RunState
) -> Report:
    """Replace configs of layers in a model's tree, and return what was done."""
    found = {name: place for name, *place in (*tree.traverse(Linear.Config), *tree.traverse(GroupedExperts.Config))}
    for name, (cfg, parent, key) in found.items():
        if type(cfg) in _MAKE:
            _put(parent, key, _MAKE[type(cfg)](cfg, "bf16", name))
    with torch.device("meta"):
        model = tree.build()  # what the policy reads: one config may build several layers
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear | GroupedExperts)}
    resolved = {glob: None if rule is None else resolve(rule) for glob, rule in rules.items()}
    _check_globs(model, layers, resolved, keep)
    kept = kept_layers(model, layers, keep or Keep())
    rows = {name: _decide(name, layer, recipe, resolved, kept.get(name)) for name, layer in layers.items()}
    if not any(row.recipe is not None for row in rows.values()):
        reasons = "; ".join(sorted({row.reason for row in rows.values()})) or "it has no linear layer"
        raise ValueError(f"config: nothing would be converted of {len(rows)} layers: {reasons}. Change rules or keep")
    for origin, (cfg, parent, key) in found.items():
        own = {name: rows[name] for name, layer in layers.items() if getattr(layer, "origin", None) == origin}
        wanted = _one(own)
        _put(parent, key, cfg if wanted is None else _MAKE[type(cfg)](cfg, wanted.key, origin))
    return Report(rows=tuple(rows.values()), state=state)


def _one(rows: Mapping[str, Row]) -> Recipe | None:
    """Return the recipe of the layers that one config builds."""
    if len({row.recipe for row in rows.values()}) > 1:
        words = ", ".join(f"{name} ({row.reason})" for name, row in rows.items())
        raise ValueError(f"rules: torchtitan builds {words} from one config; give them one recipe")
    return next((row.recipe for row in rows.values()), None)


def _check_globs(
    model: nn.Module, names: Mapping[str, nn.Module], rules: Mapping[str, Recipe | None], keep: Keep | None
) -> None:
    unmatched = {
        "rules": [glob for glob in rules if not any(matches(name, glob) for name in names)],
        "keep.names": () if keep is None else unmatched_names(model, names, keep),
    }
    for argument, globs in unmatched.items():
        if globs:
            raise ValueError(f"{argument}: {globs[0]!r} matches no layer; names look like {', '.join(list(names)[:4])}")


def _decide(name: str, layer: Any, recipe: Recipe, rules: Mapping[str, Recipe | None], kept: str | None) -> Row:
    """Return the recipe of one layer and the reason, as quantize_ decides."""
    if isinstance(layer, Linear):
        shape: tuple[int, ...] = layer.out_features, layer.in_features
    else:
        shape = tuple(layer.w1_EFD.shape) if hasattr(layer, "w1_EFD") else ()
    matching = [glob for glob in rules if matches(name, glob)]
    wanted, reason = recipe, "recipe"
    if not isinstance(layer, RecipeLinear | RecipeExperts):
        wanted, reason = None, f"{type(layer).__name__} has a forward of its own"
    elif matching:
        wanted, reason = rules[matching[-1]], f"rule {matching[-1]!r}"
    elif kept is not None:
        wanted, reason = None, f"kept: {kept}"
    return Row(name=name, shape=shape, recipe=wanted, reason=reason)


def _put(parent: Any, key: Any, cfg: Any) -> None:
    if isinstance(parent, list):
        parent[key] = cfg
    else:
        setattr(parent, key, cfg)


def _linear(cfg: Linear.Config, recipe: str, origin: str = "") -> RecipeLinear.Config:
    read_recipe(recipe)
    return derive(cfg, RecipeLinear.Config, recipe=recipe, origin=origin)


def _experts(cfg: GroupedExperts.Config, recipe: str, origin: str = "") -> RecipeExperts.Config:
    read_recipe(recipe)
    return derive(cfg, RecipeExperts.Config, recipe=recipe, origin=origin)


_MAKE: dict[type, Any] = {Linear.Config: _linear, GroupedExperts.Config: _experts}


def _check_state(layer: FollowsRecipe) -> None:
    if layer.run_state is None and (layer.recipe.needs_rng or layer.recipe.amax is not None):
        raise ValueError(f"{layer.title}: {_NO_STATE}")


def _join(parts: Sequence[nn.Module], layers: Mapping[str, FollowsRecipe], state: RunState) -> None:
    """Let the layers of a run draw from one RunState, and siblings share their amax."""
    if not layers:
        raise ValueError(
            f"model={type(parts[0]).__name__}: no layer follows a recipe; let {_HERE}.quantize_config_ convert the "
            f"config, or add {_HERE}.recipe_linear to --override.imports"
        )
    state.to(next(parts[0].parameters()).device)
    for layer in layers.values():
        layer.join(state)
    for part in parts:
        name_layers(part)
    for parent in (module for part in parts for module in part.modules()):
        for group in SHARE_AMAX:
            family = tuple(c for n, c in parent.named_children() if n in group and isinstance(c, RecipeLinear))
            for layer in family if len(family) > 1 else ():
                layer.amax_group = family


def llama3_debugmodel_first_85_pct_layers_nvfp4() -> Trainer.Config:
    """Return torchtitan's config of this name, in the recipe "nvfp4" on any hardware."""
    config = config_registry.llama3_debugmodel()
    config.parallelism.spmd_backend = "spmd_types"
    return quantize_config_(config)


def llama3_8b_first_85_pct_layers_nvfp4() -> Trainer.Config:
    """Return torchtitan's config of this name, in the recipe "nvfp4" on any hardware.

    torchtitan's own refuses GPUs before Blackwell.
    """
    config = config_registry.llama3_8b()
    config.parallelism.spmd_backend = "spmd_types"
    config.compile = CompileConfig(enable=True, components=["model"])
    return quantize_config_(config)
