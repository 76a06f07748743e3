"""hb.nn.RMSNorm and hb.nn.LayerNorm: torch's norms with every rounding fixed, which tell the next layer its amaxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from halfbyte import ops
from halfbyte.functional.norm import add_norm, norm
from halfbyte.nn.shared_input import SharedInput, following


class _Norm(nn.Module):
    """What both norms share: the computation, and the layers they feed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    centered: bool

    feeds: SharedInput | None = None
    """The layers that read the output, where `hb.nn.fuse_` put them."""

    fused_from: tuple[nn.Module, ...] = ()
    """What `hb.nn.fuse_` replaced by this module; in a tuple, so that it is no submodule."""

    def __init__(self, width: int, eps: float, has_bias: bool, factory: dict[str, Any]) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width, **factory))
        self.register_parameter("bias", nn.Parameter(torch.zeros(width, **factory)) if has_bias else None)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x [..., K], of x's dtype; under autocast of autocast's.

        Args:
            x: [..., K].
            residual: as x. With one, return the norm of x + residual and that sum, which is the next residual.
        """
        how = ops.Following() if self.feeds is None else following(self.feeds.layers, x.device)
        y, total, amaxes = self.normalize(x, residual, how)
        if self.feeds is not None:
            self.feeds.give(y, amaxes, how)
        return y if total is None else (y, total)

    def normalize(
        self, x: Tensor, residual: Tensor | None, how: ops.Following
    ) -> tuple[Tensor, Tensor | None, ops.Amaxes]:
        """Return the norm of x or of x + residual, the sum, if there is one, and the amaxes that quantize the norm."""
        kind = ops.NormKind(self.eps, self.centered)
        if residual is None:
            y, amaxes = norm(x, self.weight, self.bias, kind, how)
            return y, None, amaxes
        return add_norm(x, residual, self.weight, self.bias, kind, how)


class RMSNorm(_Norm):
    """x / sqrt(mean of squares + eps) * weight, rounded once (halfbyte/arithmetic.py).

    Args:
        width: K.
        eps: added to the mean of squares.
        device, dtype: of the weight, which starts at one.
    """

    centered = False

    def __init__(
        self, width: int, eps: float = 1e-5, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(width, eps, False, {"device": device, "dtype": dtype})

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded once (halfbyte/arithmetic.py).

    Args:
        width: K.
        eps: added to the variance.
        bias: whether there is one; it starts at zero.
        device, dtype: of the weight, which starts at one, and the bias.
    """

    centered = True

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps, bias, {"device": device, "dtype": dtype})

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, bias={self.bias is not None}"


Norm = RMSNorm | LayerNorm
NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


def add_then_norm(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return norm(x + residual) and the sum, in one kernel where the norm is one of this library's.

    Args:
        norm: any module that takes one tensor.
        x: [..., K].
        residual: as x; None for the norm of x, which is the sum then.
    """
    if residual is None:
        return norm(x), x
    if isinstance(norm, RMSNorm | LayerNorm):
        return norm(x, residual)
    total = x + residual
    return norm(total), total


def make_norm(norm: str | Norm, width: int) -> Norm:
    """Return a norm of `width` given its kind, "rms" or "layer", or itself.

    Raises:
        ValueError: neither, or a norm of another width.
    """
    if isinstance(norm, RMSNorm | LayerNorm):
        if norm.width != width:
            raise ValueError(f"norm={norm}: give one of width {width}")
        return norm
    if isinstance(norm, nn.Module):
        raise ValueError(f"norm={norm}: give hb.nn.RMSNorm or hb.nn.LayerNorm; from_modules takes torch's and others'")
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r}: use 'rms', 'layer' or a norm of hb.nn")
    return NORMS[norm](width)


def from_norm(module: nn.Module) -> Norm:
    """Return a twin of a norm that shares its Parameters and mode.

    Args:
        module: torch.nn.RMSNorm or LayerNorm over the last dimension with a weight, a twin of them, or a module of a
            class called …RMSNorm with `weight` and `eps` or `variance_epsilon`, as transformers has them.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(module, RMSNorm | LayerNorm):
        return module
    weight, eps = getattr(module, "weight", None), _eps(module)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None:
        raise ValueError(f"{type(module).__name__} is no norm over the last dimension with a weight and an eps")
    centered = isinstance(module, nn.LayerNorm)
    if not centered and not type(module).__name__.endswith("RMSNorm"):
        raise ValueError(f"{type(module).__name__} is neither a LayerNorm nor an RMSNorm")
    cls = LayerNorm if centered else RMSNorm
    new = cls(weight.shape[0], eps, device="meta")
    new.weight = weight
    new.bias = getattr(module, "bias", None)
    return new.train(module.training)


def _eps(module: nn.Module) -> float | None:
    for name in ("eps", "variance_epsilon"):
        if isinstance(getattr(module, name, None), float):
            return getattr(module, name)
    if isinstance(module, nn.RMSNorm) and module.eps is None:  # torch's default, of the dtype that it computes in
        return torch.finfo(torch.float32).eps
    return None


def to_norm(module: Norm) -> nn.RMSNorm | nn.LayerNorm:
    """Return torch's norm with the Parameters of `module`."""
    if isinstance(module, LayerNorm):
        new = nn.LayerNorm(module.width, module.eps, bias=module.bias is not None, device="meta")
        if module.bias is not None:
            new.bias = module.bias
    else:
        new = nn.RMSNorm(module.width, module.eps, device="meta")
    new.weight = module.weight
    return new.train(module.training)
