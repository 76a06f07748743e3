"""What layers with a recipe cannot do under torchtitan's parallelisms, refused by name before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from halfbyte.spec import Recipe

_IN_GEMMS = "torchtitan.models.common.dist_gemm"
"""Whose modules hand weights to GEMMs that gather and scatter (tp_gemm_backend="dist_gemm")."""


def refuse_parallelism(parallel_dims: Any) -> None:
    """Raise ValueError for parallelisms of torchtitan under which a layer would quantize other bytes."""
    if parallel_dims.spmd_backend == "full_dtensor":
        raise ValueError(
            "parallelism.spmd_backend='full_dtensor': layers with a recipe multiply plain tensors, which it turns into "
            "DTensors; use 'spmd_types' or 'partial_dtensor'"
        )


def refuse_uncalled(parallel_dims: Any, parts: Iterable[Any], kind: type) -> None:
    """Raise ValueError for layers of a kind whose weights another module multiplies by, without calling them."""
    if parallel_dims.tp == 1:  # then these modules call what they hold
        return
    for name, owner in (named for part in parts for named in part.named_modules()):
        held = [child for child, layer in owner.named_children() if isinstance(layer, kind)]
        if held and type(owner).__module__ == _IN_GEMMS:
            raise ValueError(
                f"{name}: {type(owner).__name__} multiplies by the weights of {', '.join(held)} itself, so that no "
                "recipe would be followed; use tp_gemm_backend='default', or keep them in high precision (rules)"
            )


def refuse_replaced(converted: Sequence[str], layers: Iterable[str]) -> None:
    """Raise ValueError where something that was converted is not in the model that torchtitan built.

    Args:
        converted: names of layers and of experts.
        layers: names of what follows a recipe in the model; of experts those of their weights.
    """
    there = {end for name in layers for end in (name, name.rpartition(".")[0])}
    absent = [name for name in converted if name not in there]
    if absent:
        raise ValueError(
            f"{', '.join(absent[:4])}{', …' if len(absent) > 4 else ''}: converted, and not in the model built: "
            "override.imports replace what held it (torchtitan's fused_swiglu does); leave that override out, or "
            "convert with rules={glob: None} for these"
        )


def refuse_compiled(parallel_dims: Any, compiled: Any) -> None:
    """Raise ValueError where blocks would be compiled in one graph with layers whose ranks ask each other."""
    if parallel_dims.tp > 1 and compiled.enable and "model" in compiled.components:
        raise ValueError(
            f"compile.components={list(compiled.components)} with "
            f"parallelism.tensor_parallel_degree={parallel_dims.tp}: torchtitan compiles every block as one graph, and "
            "ranks that share layers with a recipe find what they share outside of it; leave 'model' out of "
            "compile.components"
        )


def refuse_experts(parallel_dims: Any, recipes: Sequence[Recipe]) -> None:
    """Raise ValueError where ranks that share layers would share routed experts that follow a recipe."""
    if parallel_dims.tp > 1 and any(recipe.specs for recipe in recipes):
        raise ValueError(
            f"parallelism.tensor_parallel_degree={parallel_dims.tp}: routed experts multiply this rank's part of each "
            "weight, whose amax is not the whole one's; keep them in high precision, rules={'*.inner_experts': None}, "
            "or set it to 1 and shard with expert_parallel_degree"
        )


def changes_by_step(schedule: str, recipes: Iterable[Recipe | None]) -> str:
    """Say what of a run a captured CUDA graph would replay in later steps as it was in the first, "" for nothing."""
    if schedule:
        return f"schedule={schedule!r}"
    delayed = (recipe.amax for recipe in recipes if recipe is not None and recipe.amax is not None)
    return next((f"recipe.amax={amax}" for amax in delayed), "")


def refuse_graphs(schedule: str, recipes: Iterable[Recipe | None], training: Any) -> None:
    """Raise ValueError where a CUDA graph would go on with what the step did in which it was captured."""
    changing = changes_by_step(schedule, recipes)
    if changing and not training.disable_cuda_graphs:
        raise ValueError(
            f"training.disable_cuda_graphs=False with {changing}: torchtitan captures forward and backward once and "
            "would replay the first recipe, with its own amaxes, for the whole run; set "
            "training.disable_cuda_graphs=True"
        )
