"""Whether a module and its replacement compute the same: random tokens go through both, in high precision, and back.

Their own weights alone do not tell: behind a down projection of zeros every activation is the same, small weights make
all of them alike, and 16 bits round erf and tanh to one GeLU. So the two are tried in fp32 with weights that tell
them apart as well, and in training mode, where dropout shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from halfbyte.nn.linear import Linear
from halfbyte.spec import Recipe

SCALES = (2.0, 2.0, 2.0, 1e-3, 40.0, 2.0)
"""Of the random tokens: a small one shows another eps, a large one values that are clamped."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative error that roundings explain: a rounding or two more inside the module that is replaced."""

FRESH_TOLERANCE = 2e-5
"""The same in fp32 with fresh weights, for each token; the two forms of GeLU are 2e-4 apart."""

GRADIENT_TOLERANCE = 1e-3
"""Of gradients, there: they are roundings apart, or something is detached, scaled or summed over ranks on the way."""

WIDTH, HIDDEN = 24, 32
"""Of the linear layers that stand in for those of an MLP."""


def own_difference(module: nn.Module, new: nn.Module, width: int) -> str | None:
    """Say in what the two differ with their own parameters, or None.

    Args:
        module: the original.
        new: its replacement, which holds the same parameters.
        width: of the tokens.
    """
    parameter = next(module.parameters())
    if parameter.is_meta:
        return "its parameters are on the meta device: fuse_ compares values, call it when they are there"
    tolerance = TOLERANCES.get(parameter.dtype)
    if tolerance is None:
        return f"its parameters are {parameter.dtype}"
    tokens = _tokens(width).clamp(-4, 4).to(parameter.device, parameter.dtype)
    with _in_high_precision(module), _in_high_precision(new):
        return _compare(module, new, tokens, tolerance, by_token=False)[1]


@torch.inference_mode(False)
def fresh_norm_difference(module: nn.Module, new: nn.Module, width: int) -> str | None:
    """Say in what two norms differ in fp32 with random parameters, or None."""
    fresh = {id(p): 1 + 0.5 * _random(i, p.shape) for i, p in enumerate(module.parameters())}
    with _parameters(module, fresh), _parameters(new, fresh):
        return _in_both_modes(module, new, width)[1]


@torch.inference_mode(False)
def fresh_mlp_difference(module: nn.Module, new: nn.Module, names: Sequence[str]) -> tuple[float, str | None]:
    """Return how far apart two MLPs are in fp32 with small random linear layers, and what to say of it, or None.

    Args:
        module: the original.
        new: its replacement, with children of the same names.
        names: of the linear layers; the last one reads what the others give.
    """
    stand_ins = {}
    for i, name in enumerate(names):
        shape = (WIDTH, HIDDEN) if name == names[-1] else (HIDDEN, WIDTH)
        layer = nn.Linear(shape[1], shape[0], bias=getattr(module, name).bias is not None, device="meta")
        layer.weight = nn.Parameter(_random(2 * i, shape) / shape[1] ** 0.5)
        if layer.bias is not None:
            layer.bias = nn.Parameter(_random(2 * i + 1, shape[:1]))
        stand_ins[name] = layer
    with _children(module, stand_ins), _children(new, stand_ins):
        return _in_both_modes(module, new, WIDTH)


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether nothing but one tensor can be given to a module by name or place."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sum(p.kind in named for p in inspect.signature(module.forward).parameters.values()) < 2


def _in_both_modes(module: nn.Module, new: nn.Module, width: int) -> tuple[float, str | None]:
    """Return the error of `_compare` in eval, and the first difference in eval or training mode."""
    tokens, found = _tokens(width), (0.0, None)
    with torch.random.fork_rng(devices=[]), _in_high_precision(module):
        for training in (False, True):
            module.train(training)
            error, difference = _compare(module, new, tokens, FRESH_TOLERANCE, by_token=True)
            if difference is not None:
                return (found[0], f"{difference} in training mode") if training else (error, difference)
            found = found if training else (error, None)
    return found


def _compare(
    module: nn.Module, new: nn.Module, tokens: Tensor, tolerance: float, *, by_token: bool
) -> tuple[float, str | None]:
    """Return the relative error of `new`, of a batch of sequences or of a matrix, and what to say of it, or None.

    by_token: compare each token, and the gradients too.
    """
    with torch.autocast(tokens.device.type, enabled=False), torch.set_grad_enabled(by_token):
        return _compare_in(module, new, tokens, tolerance, by_token)


def _compare_in(
    module: nn.Module, new: nn.Module, tokens: Tensor, tolerance: float, by_token: bool
) -> tuple[float, str | None]:
    refusal, worst, ran = None, 0.0, False
    for x in (tokens.unflatten(0, (2, -1)), tokens):
        x = x.clone().requires_grad_(by_token)
        try:
            expected = module(x)
        except Exception as error:  # whatever a stranger's forward raises
            refusal = refusal or f"its forward takes other arguments: {error}"
            continue
        if not isinstance(expected, Tensor) or expected.dim() != x.dim() or expected.shape[:-1] != x.shape[:-1]:
            return worst, "it returns something else than one tensor"
        actual = new(x)
        if actual.shape != expected.shape:
            return float("inf"), f"it computes something else: {tuple(expected.shape)} of {tuple(x.shape)}"
        dim = -1 if by_token else None
        error = _relative_error(actual.detach(), expected.detach(), dim)
        if not error <= tolerance:
            return error, f"it computes something else: {error:.1e} away from {type(new).__name__}"
        worst, ran = max(worst, error), True
        if by_token and _gradients_differ((x, module, expected), (x, new, actual)):
            return worst, f"its gradients are not those of {type(new).__name__}"
    return worst, None if ran else refusal


def _gradients_differ(one: tuple[Tensor, nn.Module, Tensor], other: tuple[Tensor, nn.Module, Tensor]) -> bool:
    """Whether input, module and output of two computations belong to different gradients."""
    names = [name for name, _ in other[1].named_parameters()]
    found = []
    for x, module, y in (one, other):
        if not y.requires_grad:
            return True
        wanted = x, *(module.get_parameter(name) for name in names)
        try:
            found.append(torch.autograd.grad(y, wanted, _random(98, y.shape), allow_unused=True))
        except Exception:  # whatever a stranger's backward raises
            return True
    return any(
        a is None or b is None or not _relative_error(b, a, None) <= GRADIENT_TOLERANCE
        for a, b in zip(*found, strict=True)
    )


def _relative_error(actual: Tensor, expected: Tensor, dim: int | None) -> float:
    apart = torch.linalg.vector_norm(actual.double() - expected.double(), dim=dim)
    return (apart / torch.linalg.vector_norm(expected.double(), dim=dim).clamp_min(1e-30)).max().item()


def _tokens(width: int) -> Tensor:
    return _random(99, (len(SCALES), width)) * torch.tensor(SCALES, device="cpu", dtype=torch.float32)[:, None]


def _random(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


@contextmanager
def _parameters(module: nn.Module, fresh: dict[int, Tensor]) -> Iterator[None]:
    """Put fresh tensors in the place of a norm's own parameters."""
    kept = dict(module._parameters)
    try:
        for name, parameter in kept.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(fresh[id(parameter)])
        yield
    finally:
        module._parameters.update(kept)


@contextmanager
def _children(module: nn.Module, stand_ins: dict[str, nn.Linear]) -> Iterator[None]:
    kept = {name: module._modules[name] for name in stand_ins}
    try:
        module._modules.update(stand_ins)
        yield
    finally:
        module._modules.update(kept)


@contextmanager
def _in_high_precision(module: nn.Module) -> Iterator[None]:
    """Let a module run in eval mode and high precision; modes and recipes are as before at the end."""
    layers = [(layer, layer.recipe) for layer in module.modules() if isinstance(layer, Linear)]
    modes = [(part, part.training) for part in module.modules()]
    try:
        for layer, _ in layers:
            layer.recipe = Recipe()
        module.eval()
        yield
    finally:
        for layer, recipe in layers:
            layer.recipe = recipe
        for part, training in modes:
            part.training = training
