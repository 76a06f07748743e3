"""The cases of tests/scale/test_fsdp.py, by name: a model, how it is wrapped, and how it is trained."""

from __future__ import annotations

from functools import partial

import ranks
import torch
from fsdp_checks import BF16, Case, two_layers
from small_models import Decoder
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import halfbyte as hb
from halfbyte.nn import Linear

DIM = 24


def decoder(dim: int = DIM) -> nn.Module:
    """Two blocks of a Llama-like decoder, whose q/k/v and gate/up share their amaxes."""
    return Decoder(2, dim)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder's blocks."""
    return list(model.layers)


def layers(model: nn.Module) -> list[nn.Module]:
    """Every quantized layer by itself."""
    return [module for module in model.modules() if isinstance(module, Linear)]


def two_groups(model: nn.Module) -> list[nn.Module]:
    """The blocks and, below them, their MLPs."""
    return [part for block in model.layers for part in (block.mlp, block)]


class FusedBlock(nn.Module):
    """Norms that hand their output to three layers that share an amax, and to a fused MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = hb.nn.LayerNormLinear(dim, {"q_proj": dim, "k_proj": dim, "v_proj": dim}, bias=False)
        self.mlp = hb.nn.LayerNormMLP(dim, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x)
        return x + self.mlp(q * k.sigmoid() + v)


def fused_blocks() -> nn.Module:
    """Two blocks of fused layers."""
    return nn.Sequential(FusedBlock(32), FusedBlock(32))


class Mixture(nn.Module):
    """A linear layer, and experts of which one has no token."""

    def __init__(self, experts: int, rows: int, cols: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, cols)
        self.up = hb.nn.GroupedLinear(experts, cols, rows, recipe="bf16").add_bias_()
        self.down = hb.nn.GroupedLinear(experts, rows, 32, recipe="bf16")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.linspace(1, len(x), self.up.experts, device=x.device).int()
        ends[0] = 0
        return self.down(self.up(self.first(x), ends).relu(), ends)


def experts(count: int = 3, rows: int = 40, cols: int = 48) -> nn.Module:
    """Rows that cut tiles; of two ranks one has more experts than the other."""
    return Mixture(count, rows, cols)


def checkpointed(model: nn.Module) -> None:
    """Recompute each block in backward."""
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__.endswith("Block"))


def recomputed_around(model: nn.Module) -> None:
    """Recompute each block in backward, FSDP2's hooks included."""
    for i, block in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(block)


def offloaded(model: nn.Module) -> None:
    """What forward saves for backward lies in the CPU's memory until then."""
    inner = model.forward

    def forward(*arguments: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return inner(*arguments)

    model.forward = forward


def few_tokens() -> torch.Tensor:
    return torch.arange(6, device=ranks.device()).view(2, 3) % 11


def evaluated(step: int, model: nn.Module) -> None:
    """A forward without gradients before every step."""
    with torch.no_grad():
        model(few_tokens())


def in_high_precision(step: int, model: nn.Module) -> torch.Tensor:
    """A forward without gradients and without recipes before every step."""
    with torch.no_grad(), hb.high_precision(model):
        return model(few_tokens())


def prefetched(model: nn.Module) -> None:
    """Both gathers of a step before they are needed."""
    first, second = model.layers
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def unsharded(step: int, model: nn.Module) -> None:
    """Gathered by hand before the forward."""
    for block in model.layers:
        block.unshard()


def compiled(model: nn.Module) -> None:
    """Every block by itself."""
    for block in model.layers:
        block.compile(backend="eager")


def frozen(model: nn.Module) -> None:
    """No gradient for the first block."""
    model.layers[0].requires_grad_(False)


def written(step: int, model: nn.Module) -> None:
    """Some masters changed by no optimizer, in place, and not before a forward has used those of the last step."""
    evaluated(step, model)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)
        model.layers[1].mlp.up_proj.weight.add_(0.125)


TOKENS = {"make": decoder, "tokens": 11, "shape": (2, 5), "blocks": blocks}
AUTOCAST = {**TOKENS, "dtype": torch.float32, "computes": torch.bfloat16}
TWO_MOMENTS = partial(torch.optim.AdamW, lr=1e-2, fused=True)

ROWS = {
    "rl": "rl",
    "quartet2": "quartet2",
    "forward in 4 bits": hb.recipes.nvfp4_forward(backward="dequantized"),
    "rl with gradients in 8 bits": hb.recipes.rl(gradients="mxfp8"),
}
"""Recipes whose backward reads what the forward multiplied: one set of codes with blocks along K."""

APART = {
    "gradients in 8 bits": "nvfp4_mxfp8_bwd",
    "columns": "naive_fp4",
    "1x16 both ways": hb.recipes.nvfp4(weight_block=(1, 16)),
    "gradients in high precision": "nvfp4_forward",
}
"""Recipes whose backward reads what cannot be made of the forward's codes."""
FORMS = ("gradients in 8 bits", "columns", "gradients in high precision")

EXPERTS = ("nvfp4", "four_over_six", "rl", "quartet2", "nvfp4_mxfp8_bwd", "naive_fp4", "nvfp4_forward")

UNEVEN = {"make": partial(two_layers, 37, 83, 40), "shape": (6, 40)}

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)

CASES: dict[str, Case] = {
    "even": Case(),
    "uneven rows": Case(make=partial(two_layers, 37, 83, 40), shape=(6, 40)),
    "empty shards": Case(make=partial(two_layers, 3, 18, 32), shape=(4, 32)),
    "one row": Case(make=partial(two_layers, 1, 5, 16), shape=(4, 16)),
    "fp32 masters": Case(dtype=torch.float32, policy=BF16, make=partial(two_layers, 33, 70, 32)),
    "fp32": Case(dtype=torch.float32, make=partial(two_layers, 33, 70, 32)),
    "fp16": Case(dtype=torch.float16, make=partial(two_layers, 33, 70, 32), optimizer=SGD),
    "decoder": Case(**TOKENS),
    "decoder, fp32 masters": Case(**TOKENS, dtype=torch.float32, policy=BF16, optimizer=TWO_MOMENTS),
    "layer by layer": Case(**{**TOKENS, "blocks": layers}, options={"share_amax": ()}),
    "MLPs in blocks": Case(**{**TOKENS, "blocks": two_groups}),
    "kept in shards' reach": Case(**TOKENS, reshard=False),
    "accumulated": Case(**TOKENS, micro_batches=3, dtype=torch.float32, policy=BF16),
    "accumulated, synchronized once": Case(
        **TOKENS, micro_batches=3, syncs_last_only=True, dtype=torch.float32, policy=BF16
    ),
    "four over six": Case(**TOKENS, recipe="four_over_six"),
    "four over six, uneven": Case(make=partial(two_layers, 37, 83, 40), shape=(6, 40), recipe="four_over_six"),
    **{f"rows, {name}": Case(**TOKENS, recipe=recipe) for name, recipe in ROWS.items()},
    "rows, uneven": Case(make=partial(two_layers, 37, 83, 40), shape=(6, 40), recipe="rl", aside=(1,)),
    "rows, empty shards": Case(make=partial(two_layers, 3, 18, 32), shape=(4, 32), recipe="quartet2"),
    "rows under autocast, accumulated": Case(**AUTOCAST, recipe="rl", micro_batches=2, before_step=in_high_precision),
    "rows, fp32 masters, beside tiles": Case(
        **TOKENS, options={"rules": {"*mlp*": "rl"}}, dtype=torch.float32, policy=BF16, optimizer=TWO_MOMENTS
    ),
    **{f"apart, {name}": Case(**TOKENS, recipe=recipe) for name, recipe in APART.items()},
    **{f"apart, uneven, {name}": Case(**UNEVEN, recipe=APART[name], aside=(1,)) for name in FORMS},
    **{
        f"apart, empty shards, {name}": Case(make=partial(two_layers, 3, 18, 32), shape=(4, 32), recipe=APART[name])
        for name in FORMS
    },
    "apart, checkpointed": Case(**TOKENS, recipe="nvfp4_mxfp8_bwd", before_wrap=checkpointed),
    "apart, checkpointed around FSDP2's hooks": Case(**TOKENS, recipe="naive_fp4", after_wrap=recomputed_around),
    "apart, not resharded, evaluated between": Case(
        **TOKENS, recipe="nvfp4_mxfp8_bwd", reshard=False, before_step=evaluated
    ),
    "apart, under autocast, accumulated": Case(**AUTOCAST, recipe="nvfp4_forward", micro_batches=2),
    "apart, compiled": Case(**TOKENS, recipe="nvfp4_mxfp8_bwd", finish=compiled),
    "apart, fp32 masters, beside rows and tiles": Case(
        **TOKENS,
        recipe="nvfp4_mxfp8_bwd",
        options={"rules": {"*up_proj*": "nvfp4", "*gate_proj*": "nvfp4", "*down_proj*": "rl"}},
        dtype=torch.float32,
        policy=BF16,
        optimizer=TWO_MOMENTS,
    ),
    **{f"experts, {recipe}": Case(make=experts, shape=(9, 32), recipe=recipe) for recipe in EXPERTS},
    "experts, fp32 masters, more ranks than experts": Case(
        make=partial(experts, 2, 37, 24), shape=(9, 32), dtype=torch.float32, policy=BF16, aside=(1,)
    ),
    "experts, fp32, checkpointed, accumulated": Case(
        make=experts,
        shape=(9, 32),
        dtype=torch.float32,
        recipe="nvfp4_mxfp8_bwd",
        micro_batches=2,
        before_wrap=partial(apply_activation_checkpointing, check_fn=lambda module: isinstance(module, Mixture)),
    ),
    "experts, under autocast": Case(make=experts, shape=(9, 32), dtype=torch.float32, computes=torch.bfloat16),
    "experts, compiled": Case(make=experts, shape=(9, 32), finish=lambda model: model.compile(backend="eager")),
    "mixed with bf16 layers": Case(**TOKENS, options={"rules": {"*mlp*": None}}),
    "mixed with 1x16 weights": Case(**TOKENS, options={"rules": {"*mlp*": "nvfp4_mxfp8_bwd"}}),
    "HSDP": Case(**TOKENS, mesh=(2, 2)),
    "HSDP, fp32 masters, accumulated": Case(
        **TOKENS, mesh=(2, 2), micro_batches=2, syncs_last_only=True, dtype=torch.float32, policy=BF16
    ),
    "frozen block": Case(**TOKENS, before_wrap=frozen),
    "checkpointed": Case(**TOKENS, before_wrap=checkpointed),
    "checkpointed around FSDP2's hooks": Case(**TOKENS, after_wrap=recomputed_around),
    "saved tensors offloaded": Case(**TOKENS, before_wrap=offloaded),
    "evaluated between": Case(**TOKENS, before_step=evaluated),
    "evaluated between, not resharded": Case(**TOKENS, reshard=False, before_step=evaluated),
    "validated in high precision": Case(**TOKENS, before_step=in_high_precision),
    "trained in high precision for a step": Case(**TOKENS, aside=(1,), dtype=torch.float32, policy=BF16),
    "uneven rows, some steps in high precision": Case(
        make=partial(two_layers, 37, 83, 40), shape=(6, 40), aside=(0, 2)
    ),
    "under autocast": Case(**AUTOCAST, before_step=in_high_precision),
    "under autocast, uneven rows, accumulated": Case(
        **{**AUTOCAST, "make": partial(decoder, 40)}, micro_batches=2, recipe="four_over_six"
    ),
    "fused layers under autocast": Case(
        make=fused_blocks, shape=(6, 32), blocks=list, computes=torch.bfloat16, dtype=torch.float32, aside=(1,)
    ),
    "prefetched": Case(**TOKENS, after_wrap=prefetched),
    "unsharded by hand": Case(**TOKENS, before_step=unsharded),
    "compiled": Case(**TOKENS, finish=compiled),
    "written in place": Case(**TOKENS, before_step=written, casts=6),
    "fused layers": Case(make=fused_blocks, shape=(6, 32), blocks=list),
    "SGD, foreach": Case(**TOKENS, optimizer=SGD),
}
