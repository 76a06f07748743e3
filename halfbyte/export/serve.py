"""What engines cannot read is quantized once more, and said: rows' amaxes, rotations, siblings with several amaxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from halfbyte.decide import SHARE_AMAX
from halfbyte.export.trained import Trained, requantized
from halfbyte.nn.linear import LinearLayer
from halfbyte.policy import matches
from halfbyte.spec import NVFP4, Recipe

FUSED = (*SHARE_AMAX, ("*q_a_proj", "*kv_a_proj_with_mqa"))
"""Layers of one parent that engines fuse into one, the last pair in DeepSeek's attention."""

FLT_MAX = torch.finfo(torch.float32).max


def servable(model: nn.Module, trained: Mapping[str, Trained]) -> tuple[dict[str, Trained], list[tuple[str, ...]]]:
    """Return weights that engines decode as they are meant, and which layers share one amax.

    Engines know neither an amax per row nor a rotation, and take one global scale for layers that they fuse.
    """
    plain = {name: _with_one_factor(model, _without_rows_and_rotation(model, one)) for name, one in trained.items()}
    groups = _groups(plain)
    for names in groups:
        plain |= _united(model, {name: plain[name] for name in names})
    return plain, groups


def _without_rows_and_rotation(model: nn.Module, one: Trained) -> Trained:
    spec = dataclasses.replace(one.spec, rotation=None, outer="tensor")
    if spec == one.spec:
        return one
    what = "an amax for every row" if one.spec.rotation is None else "a rotation"
    return requantized(one, spec, {}, model, f"no engine knows {what} of weights")


def _with_one_factor(model: nn.Module, one: Trained) -> Trained:
    """Give experts that lie in one tensor [E, K, N] the greatest amax of them: ModelOpt stores one factor."""
    amaxes = [q.amax for q in one.quants if q.amax is not None]
    if not one.transposed or all(torch.equal(amax, amaxes[0]) for amax in amaxes):
        return one
    greatest = torch.stack(amaxes).amax()
    return requantized(
        one, one.spec, dict.fromkeys(range(len(amaxes)), greatest), model, "one global scale for all experts"
    )


def _groups(trained: Mapping[str, Trained]) -> list[tuple[str, ...]]:
    groups = []
    for globs in FUSED:
        families: dict[str, list[str]] = {}
        for name in trained:
            if any(matches(name, glob) for glob in globs):
                families.setdefault(name.rpartition(".")[0], []).append(name)
        groups += [tuple(names) for names in families.values() if len(names) > 1]
    return groups


def half_quantized(model: nn.Module, trained: Mapping[str, Trained]) -> list[str]:
    """Return layers in high precision that engines fuse with quantized ones: they refuse such a family."""
    found = []
    for globs in FUSED:
        parents = {n.rpartition(".")[0] for n in trained if any(matches(n, glob) for glob in globs)}
        siblings = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in trained]
        found += [n for n in siblings if n.rpartition(".")[0] in parents and any(matches(n, glob) for glob in globs)]
    return found


def _united(model: nn.Module, family: Mapping[str, Trained]) -> dict[str, Trained]:
    """Give siblings one global scale, the greatest of theirs; those that have it already stay as they are."""
    greatest = max(family.values(), key=lambda one: float(decode_factor(one.spec, _amax(one))))
    factor = decode_factor(greatest.spec, _amax(greatest))
    result = {}
    for name, one in family.items():
        if torch.equal(decode_factor(one.spec, _amax(one)), factor):
            result[name] = one
            continue
        same = _product(one.spec) == _product(greatest.spec)
        amax = _amax(greatest) if same else factor * _product(one.spec)
        reason = (
            f"engines fuse it with {', '.join(n.rpartition('.')[2] for n in family if n != name)}: one global scale"
        )
        result[name] = requantized(one, one.spec, {0: amax}, model, reason)
    return result


def _amax(one: Trained) -> Tensor:
    amax = one.quants[0].amax
    assert amax is not None, "NVFP4 has one"
    return amax


def _product(spec: NVFP4) -> float:
    return spec.e4m3_max * spec.fp4_max


def decode_factor(spec: NVFP4, amax: Tensor) -> Tensor:
    """Return A / (e4m3_max * fp4_max) in fp32, by which a block scale is multiplied (docs/numerics.md section 3)."""
    return torch.maximum(amax, torch.full_like(amax, _product(spec) / FLT_MAX)) / torch.full_like(amax, _product(spec))


def encode_factor(spec: NVFP4, amax: Tensor) -> Tensor:
    """Return (e4m3_max * fp4_max) / A in fp32, by which compressed-tensors divides a block scale."""
    A = torch.maximum(amax, torch.full_like(amax, _product(spec) / FLT_MAX))
    return torch.clamp(torch.full_like(amax, _product(spec)) / A, max=FLT_MAX)


def input_spec(recipe: Recipe | None) -> NVFP4:
    """Return how a layer's input is quantized in the forward, as plain NVFP4 where it is not or nobody says."""
    spec = None if recipe is None or recipe.fprop is None else recipe.fprop.a
    return spec if isinstance(spec, NVFP4) else NVFP4()


def share_groups(model: nn.Module, trained: Mapping[str, Trained], fused: Sequence[tuple[str, ...]]) -> dict[str, int]:
    """Return {layer: number of its group}: families of engines, and layers that have shared an amax since training.

    Args:
        model: the model.
        trained: its weights as they are stored.
        fused: the families.
    """
    names = {id(model.get_submodule(name)): name for name in trained}
    groups: dict[str, set[str]] = {}
    for family in (*fused, *(_shares_with(model, name, names) for name in trained)):
        for name in family:
            same = {n for n in family if trained[n].spec == trained[name].spec}
            alike = {n for n in same if torch.equal(_amax(trained[n]), _amax(trained[name]))}
            whole = set().union(*(groups.get(n, {n}) for n in alike))
            groups |= dict.fromkeys(whole, whole)
    numbers: dict[frozenset[str], int] = {}
    return {n: numbers.setdefault(frozenset(group), len(numbers)) for n, group in groups.items() if len(group) > 1}


def _shares_with(model: nn.Module, name: str, names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the exported layers that share a layer's amax in training, itself included."""
    layer = model.get_submodule(name)
    members = layer.amax_group if isinstance(layer, LinearLayer) else ()
    return tuple(names[id(member)] for member in members if id(member) in names)
