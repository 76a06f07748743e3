"""Forward and backward of one linear layer beside bf16 `nn.Linear`, timed in turn, weight quantization included.

Bytes of the operands are the quantization cases' business; here a small layer is compared with the reference on the
CPU: output and both gradients, stochastic rounding and rotations included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import halfbyte as hb
from bench.measure import CPU, against_bf16, random_matrix, require_equal
from bench.registry import Bar, Case, Outcome, Setting, Shape, Unequal
from halfbyte import recipes
from halfbyte.functional.weights import CachedWeight, cacheable, quantize_weight
from halfbyte.rng import StreamPhilox
from halfbyte.verify.compare import relative_error

SHAPES: dict[Shape, Bar | None] = {
    (16384, 8192, 8192): Bar(least=1.16, aim=1.09),
    (8192, 4096, 14336): Bar(least=1.25, aim=1.13),
}
"""M tokens, K in_features, N out_features."""

SMALL, RAGGED = (64, 96, 128), (200, 144, 96)
OPTIONS = {
    "saved-stochastic": recipes.nvfp4(saved_rounding="stochastic"),
    "scale-search": recipes.four_over_six(scope="weights", candidates=(0.875, 1.0, 1.25, 1.5)),
    "row-scaled": recipes.row_scaled(),
    "outlier-channels": recipes.outlier_channels(),
    "hot-channels": recipes.hot_channels(),
}
"""What options cost a layer, beside nvfp4 without them."""

TOLERANCE = 3e-3  # two roundings to bf16, of equal operands summed in another order


def layer(setting: Setting, shape: Shape, *, recipe: str, graph: bool = False) -> Outcome:
    """Check, then time forward plus backward."""
    M, K, N = shape
    checked = _check(setting, recipe)
    x_MK, w_NK, dy_MN = (random_matrix(s, setting.device, i) for i, s in enumerate(((M, K), (N, K), (M, N))))
    w_NK *= K**-0.5
    variants = (_linear(recipe, setting.device), F.linear)
    ours, bf16 = (partial(_forward_backward, forward, x_MK, w_NK, dy_MN) for forward in variants)
    return against_bf16(setting, [ours], [bf16], 6.0 * M * N * K, checked, "x bf16", graph)


def cached_layer(setting: Setting, shape: Shape, *, recipe: str, decoded: bool) -> Outcome:
    """The same under a CUDA graph with a weight quantized before, as in all but the first micro-batch of a step."""
    M, K, N = shape
    checked = _check(setting, recipe)
    x_MK, w_NK, dy_MN = (random_matrix(s, setting.device, i) for i, s in enumerate(((M, K), (N, K), (M, N))))
    w_NK *= K**-0.5
    cached = quantize_weight(w_NK, cacheable(recipes.get(recipe)), w_NK.dtype, decoded=decoded)
    variants = _linear(recipe, setting.device, cached), _linear(recipe, setting.device), F.linear
    ours, uncached, bf16 = (partial(_forward_backward, forward, x_MK, w_NK, dy_MN) for forward in variants)
    require_equal(ours(), uncached(), "cached against not cached")
    checked.append("cached bitwise not cached")
    outcome = against_bf16(setting, [ours], [bf16], 6.0 * M * N * K, checked, "x bf16", graph=True)
    facts = {"launches": float(launches(ours, setting)), "bf16_launches": float(launches(bf16, setting))}
    return replace(outcome, facts={**outcome.facts, **facts})


def varied_layer(setting: Setting, shape: Shape, *, recipe: hb.Recipe) -> Outcome:
    """Time forward plus backward of nvfp4 with an option, beside nvfp4 without it."""
    M, K, N = shape
    checked = _check(setting, recipe)
    x_MK, w_NK, dy_MN = (random_matrix(s, setting.device, i) for i, s in enumerate(((M, K), (N, K), (M, N))))
    w_NK *= K**-0.5
    variants = (_linear(of, setting.device) for of in (recipe, recipes.nvfp4()))
    ours, kept = (partial(_forward_backward, forward, x_MK, w_NK, dy_MN) for forward in variants)
    outcome = against_bf16(setting, [ours], [kept], 6.0 * M * N * K, checked, "x kept")
    facts = {"kept_us": outcome.facts["bf16_us"], "launches": float(launches(ours, setting))}
    return replace(outcome, facts=facts | {"kept_launches": float(launches(kept, setting))})


def launches(call: Callable[[], object], setting: Setting) -> int:
    """Return how many kernels, copies and fills one call puts on the GPU; 0 without one."""
    if not setting.on_gpu:
        return 0
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in trace.events() or ())


def _linear(
    recipe: str | hb.Recipe, device: torch.device, cached: CachedWeight | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    values, place = recipes.resolve(recipe), StreamPhilox(hb.Philox(5).on(device).base, 0)
    return lambda x, w: hb.linear(x, w, None, values, rng=place, cached_weight=cached)


def _forward_backward(
    forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, ...]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = forward(x, w)
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


def _check(setting: Setting, recipe: str | hb.Recipe) -> list[str]:
    M, K, N = RAGGED
    tensors = [random_matrix(s, CPU, i) for i, s in enumerate(((M, K), (N, K), (M, N)))]
    results = []
    for device in (CPU, setting.device):
        moved = [t.to(device) for t in tensors]
        results.append(_forward_backward(_linear(recipe, device), *moved))
    checked = []
    for name, expected, actual in zip(("y", "dx", "dw"), *results, strict=True):
        error = relative_error(actual, expected.double())
        if not error <= TOLERANCE:
            raise Unequal(f"{name} of a {M}x{K}x{N} layer: relative error {error:.2e}, at most {TOLERANCE:g}")
        checked.append(f"{name} of a {M}x{K}x{N} layer: {error:.1e} from the reference on the CPU")
    return checked


CASES = (
    Case(
        name="linear/nvfp4",
        about="forward + backward, recipe nvfp4",
        shapes=SHAPES,
        small=SMALL,
        run=partial(layer, recipe="nvfp4"),
    ),
    *(
        Case(
            name=f"linear/{name}",
            about=f"forward + backward, recipe {name}",
            shapes=dict.fromkeys(SHAPES),
            small=SMALL,
            run=partial(layer, recipe=name),
        )
        for name in ("nvfp4_mxfp8_bwd", "four_over_six", "mxfp8", "nvfp4_forward")
    ),
    Case(
        name="linear/mean-split",
        about="forward + backward, recipe nvfp4, the mean over tokens split off x, beside nvfp4 itself",
        shapes=dict.fromkeys(((8192, 4096, 4096), *SHAPES), Bar(least=1.022, aim=1.015)),
        small=SMALL,
        run=partial(varied_layer, recipe=recipes.nvfp4(activation_mean="split")),
    ),
    *(
        Case(
            name=f"linear/{name}",
            about="forward + backward, recipe nvfp4 with this option, beside nvfp4 itself",
            shapes=dict.fromkeys(SHAPES),
            small=SMALL,
            run=partial(varied_layer, recipe=recipe),
        )
        for name, recipe in OPTIONS.items()
    ),
    Case(
        name="linear/nvfp4-small",
        about="forward + backward under a CUDA graph",
        shapes={(512, 1024, 1024): None},
        small=SMALL,
        run=partial(layer, recipe="nvfp4", graph=True),
    ),
    Case(
        name="linear/small-cached",
        about="forward + backward under a CUDA graph, the weight cached",
        shapes={(512, 1024, 1024): None},
        small=SMALL,
        run=partial(cached_layer, recipe="nvfp4", decoded=False),
    ),
    Case(
        name="linear/small-decoded",
        about="forward + backward under a CUDA graph, the weight cached as the values that GEMMs multiply",
        shapes={(512, 1024, 1024): Bar(least=2.2, aim=1.8)},
        small=SMALL,
        run=partial(cached_layer, recipe="nvfp4", decoded=True),
    ),
)
