"""Data-parallel ranks whose weights exist only in NVFP4: ZeroOptimizer in the place of DDP, checkpoints as without it.

A run begins, or resumes, with fp32 weights and an ordinary AdamW, as every other run does. Both are then given to
`hb.distributed.ZeroOptimizer`, which keeps an equal share of them on each rank. What is saved is what one process
saves: fp32 weights and AdamW's moments, whole, so that any mesh goes on from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.distributed import ZeroConfig, ZeroOptimizer
from halfbyte.distributed.buckets import Bucket
from halfbyte.distributed.scales import all_gather
from halfbyte.nn.grouped import GroupedLinear
from halfbyte.nn.linear import LinearLayer
from halfbyte.tensor.primary import PrimaryWeight

MOMENTS = ("exp_avg", "exp_avg_sq")


class PrimaryTraining:
    """A model whose masters and moments the ranks share; it stands where the loop has its optimizer.

    Args:
        model: converted, in fp32, with equal weights on all ranks; its quantized weights become PrimaryWeights.
        optimizer: AdamW of its parameters, with its state; both are given up.
        clip: the norm that gradients are scaled down to; infinity for never.
        dtype: of the GEMMs.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW, clip: float, dtype: torch.dtype) -> None:
        self._model, self._outline = model, optimizer.state_dict()
        self._names = _names_of(model, optimizer)
        weights = dict(model.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self._homes = {name: first[id(parameter)] for name, parameter in weights.items()}
        options = {key: value for key, value in optimizer.defaults.items() if key in ("betas", "eps")}
        build = partial(torch.optim.AdamW, lr=float(optimizer.param_groups[0]["lr"]), fused=True, **options)
        decay = {name: optimizer.param_groups[group]["weight_decay"] for name, (group, _) in self._names.items()}
        config = ZeroConfig(
            max_norm=None if math.isinf(clip) else clip,
            weight_dtype=None if dtype == torch.float32 else dtype,
        )
        states = self._outline.pop("state")
        self.zero = ZeroOptimizer(
            model, build, param_options=lambda name, parameter: {"weight_decay": decay[name]}, config=config
        )
        if states:
            self._take_up(states)
        self._values = _MasterValues(self.zero)
        for name, module in model.named_modules():
            if isinstance(module, LinearLayer | GroupedLinear) and isinstance(module.weight, PrimaryWeight):
                module.weight_to_read = partial(self._values.to_read, self._homes[f"{name}.weight"])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of AdamW, for learning rates."""
        return self.zero.param_groups

    def step(self) -> Tensor:
        """Make an optimizer step of the gradients that were added up; return their norm before clipping."""
        return self.zero.step()

    @contextlib.contextmanager
    def reducing(self, is_last: bool) -> Iterator[None]:
        """Let the backward in the block sum gradients over the ranks if it is the last of a step."""
        with contextlib.nullcontext() if is_last else self.zero.accumulate():
            yield

    def masters(self) -> Iterator[Tensor]:
        """Return the parts of weights that this rank steps."""
        return (master for _, master in self.zero.masters())

    def forget_values(self) -> None:
        """Free what forwards in high precision have gathered."""
        self._values.forget()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return weights and optimizer state as one process holds them, on the CPU; all ranks must call it."""
        saved = self.zero.state_dict()
        model = {name: saved["masters"][home] for name, home in self._homes.items()}
        states = {}
        for name, (_, index) in self._names.items():
            values = saved["state"][name]
            if values:
                states[index] = {
                    "step": torch.tensor(float(values["step"]), dtype=torch.float32),
                    **{key: values[key] for key in MOMENTS},
                }
        groups = [dict(group) for group in self._outline["param_groups"]]
        for group in groups:
            group["lr"] = float(self.param_groups[0]["lr"])
        return model, {"state": states, "param_groups": groups}

    def _take_up(self, states: dict[int, dict[str, Tensor]]) -> None:
        """Give the shares the state of the AdamW that was."""
        saved = self.zero.state_dict()
        for name, (_, index) in self._names.items():
            values = {key: states[index][key].cpu() for key in MOMENTS}
            saved["state"][name] = values | {"step": float(states[index]["step"])}
            saved["keys"][name] = dict.fromkeys((*MOMENTS, "step"), "float32")
        saved["scalars"] = {"step": "float32"}
        self.zero.load_state_dict(saved)

    @property
    def coded(self) -> int:
        """How many parameters travel as NVFP4."""
        return sum(isinstance(p, PrimaryWeight) for p in self._model.parameters())

    @property
    def travels(self) -> str:
        """What of the weights travels how."""
        named = len(self._names)
        return f"{self.coded} of {named} parameters travel as NVFP4 and exist only so, their masters in fp32 shares"


class _MasterValues:
    """Whole weights in fp32, for forwards in high precision: those of one bucket at a time are there."""

    def __init__(self, zero: ZeroOptimizer) -> None:
        self._zero = zero
        self._bucket: Bucket | None = None
        self._whole = torch.empty(0, dtype=torch.float32)

    def to_read(self, name: str, layer: LinearLayer | GroupedLinear, weight: Any) -> Any:
        """Return what a layer multiplies by: its codes, or in high precision its masters' values."""
        if layer.recipe.specs:
            return weight
        bucket, index = self._zero._home[name]
        if bucket is not self._bucket:
            self._bucket, self._whole = bucket, _gathered(bucket)
        place = bucket.plan.places[index]
        return bucket.matrix(self._whole, place).reshape(weight.shape)

    def forget(self) -> None:
        self._bucket, self._whole = None, torch.empty(0, dtype=torch.float32)


@torch.no_grad()
def _gathered(bucket: Bucket) -> Tensor:
    if bucket.ranks.group is None:
        return bucket.masters.clone()
    whole = torch.empty(bucket.plan.numel, dtype=torch.float32, device=bucket.masters.device)
    all_gather(whole.view(torch.uint8), bucket.masters.detach().view(torch.uint8), group=bucket.ranks.group)
    return whole


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, int]]:
    """Return the group and number that AdamW's state has for each parameter, in the model's order."""
    numbers: dict[int, tuple[int, int]] = {}
    for group, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            numbers[id(parameter)] = group, len(numbers)
    return {name: numbers[id(parameter)] for name, parameter in model.named_parameters()}
