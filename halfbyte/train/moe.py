"""A mixture of SwiGLU experts: a router in high precision, its best experts per token, a loss that keeps them busy.

Every token is copied once per expert that it goes to and the copies are sorted by expert, so that an expert's tokens
are one group of the grouped linear layers. Nothing reads the sizes of groups on the host. Shape letters: S tokens, k
experts of a token, E experts, C model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte.functional.foreign import is_sharded
from halfbyte.nn import GroupedLinear
from halfbyte.train.fields import check_positive

if TYPE_CHECKING:
    from halfbyte.distributed import ExpertExchange


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """How many experts there are, and how tokens choose.

    Args:
        experts: E.
        per_token: k, the experts that a token goes to.
        balance: weight of the load-balancing loss.

    Raises:
        ValueError: a number is out of range.
    """

    experts: int = 8
    per_token: int = 2
    balance: float = 0.01

    def __post_init__(self) -> None:
        check_positive(self, "experts")
        if not 1 <= self.per_token <= self.experts:
            raise ValueError(f"per_token={self.per_token}: give 1 to experts={self.experts}")
        if self.balance < 0:
            raise ValueError(f"balance={self.balance}: give a weight >= 0")


class Routes(NamedTuple):
    """Where S tokens go.

    order: int64 [S * k], the copies of the tokens sorted by expert; copy i is of token i // k.
    offsets: int32 [E], where each expert's copies end in that order.
    weights: fp32 [S, k], of the experts of a token, with a sum of 1.
    balance: fp32 [], the load-balancing loss: 1 if all experts are used alike, up to E.
    """

    order: Tensor
    offsets: Tensor
    weights: Tensor
    balance: Tensor


class Router(nn.Module):
    """Scores experts in fp32 under every recipe; no nn.Linear, so that nothing quantizes it."""

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, dim, dtype=torch.get_default_dtype()))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def forward(self, x_SC: Tensor) -> Routes:
        experts, k = self.config.experts, self.config.per_token
        weight: Any = self.weight
        weight = weight.to_local() if is_sharded(weight) else weight  # ranks that share experts all have all of it
        with torch.autocast(x_SC.device.type, enabled=False):
            probability_SE = F.linear(x_SC.float(), weight.float()).softmax(-1)
        weights_Sk, chosen_Sk = probability_SE.topk(k, dim=-1)
        chosen = chosen_Sk.flatten()
        used_E = (chosen[:, None] == torch.arange(experts, device=chosen.device)).sum(0)
        # Switch Transformer (arXiv 2101.03961), equation 4, with the share of copies for the share of tokens.
        balance = experts * (used_E / chosen.numel() * probability_SE.mean(0)).sum()
        weights_Sk = weights_Sk / weights_Sk.sum(-1, keepdim=True)
        offsets = used_E.cumsum(0, dtype=torch.int32)
        return Routes(chosen.argsort(stable=True), offsets, weights_Sk, balance)


class MoE(nn.Module):
    """SwiGLU experts; gate and up of an expert are one weight and read one quantized input.

    Args:
        dim: C.
        hidden: the width of one expert.
        config: the experts.

    Attributes:
        exchange: what sends tokens to experts of other ranks; None where all are here.
        dropped: int64 [], copies of tokens that went beyond its capacity while the model trained; None without one.
    """

    def __init__(self, dim: int, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.exchange: ExpertExchange | None = None
        self.dropped: Tensor | None = None
        self.gate = Router(dim, config)
        self.gate_up_proj = GroupedLinear(config.experts, dim, 2 * hidden, recipe="bf16")
        self.down_proj = GroupedLinear(config.experts, hidden, dim, recipe="bf16")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' outputs, of x's shape [..., C], and the weighted load-balancing loss, fp32 []."""
        x_SC = x.flatten(0, -2)
        routes = self.gate(x_SC)
        k = self.config.per_token
        y = self._sent(x_SC[routes.order // k], routes.offsets)
        # Gathering by the inverse order and summing over k is deterministic; adding into rows by index is not.
        y_SkC = y[routes.order.argsort()].unflatten(0, (-1, k))
        y_SC = (y_SkC * routes.weights[..., None].to(y.dtype)).sum(1)
        return y_SC.view_as(x), self.config.balance * routes.balance

    def _sent(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return the experts' outputs of tokens that are sorted by expert, wherever the experts are."""
        if self.exchange is None:
            return self._experts(x, offsets)
        arrived = self.exchange.send(x, offsets)
        dropped, is_again = self.exchange.dropped, torch._C._current_graph_task_id() != -1  # the backward runs it again
        if dropped is not None and torch.is_grad_enabled() and not is_again:
            self.dropped = dropped.clone() if self.dropped is None else self.dropped.add_(dropped)
        return self.exchange.back(self._experts(arrived.x, arrived.offsets), arrived)

    def _experts(self, x: Tensor, offsets: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x, offsets).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up, offsets)
