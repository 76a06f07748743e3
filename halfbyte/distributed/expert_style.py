"""Expert parallel as a style of torch's: a module's forward is handed the tokens of all ranks for its experts."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from halfbyte.distributed.experts import Arrived, Dispatch, Reduce, shard_experts_


class ExpertParallel(ParallelStyle):
    """A style for torch's parallelize_module: ranks share the experts of a module whose forward takes (x, offsets).

    The module is called with this rank's tokens, sorted by expert, and the ends of the groups of all experts, and
    returns a row for each token, as without it; its forward sees the tokens of all ranks for the experts that are here.
    Both are handed by place or by name: forward's first two arguments. Of those that it takes by name alone, x and
    offsets are meant if they are there; x and offsets, too, where it names none.

    Args:
        readers, dispatch, capacity, reduce: as for `shard_experts_`.
    """

    def __init__(
        self, *readers: str, dispatch: Dispatch = "plain", capacity: int | None = None, reduce: Reduce = "sum"
    ) -> None:
        super().__init__()
        self.readers, self.dispatch, self.capacity, self.reduce = readers, dispatch, capacity, reduce

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        options: dict[str, Any] = {"dispatch": self.dispatch, "capacity": self.capacity, "reduce": self.reduce}
        exchange = shard_experts_(module, device_mesh, *self.readers, src_data_rank=self.src_data_rank, **options)
        under_way: list[Arrived] = []
        names = _names_of_tokens(module)

        def enter(_: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            by_place, by_name = names[: len(inputs)], names[len(inputs) :]
            for name in by_name:
                if name not in named:
                    exchange.tell_of_failure()
                    raise TypeError(
                        f"{name} is missing: give tokens sorted by expert and the ends of the groups of all experts as "
                        f"{names[0]!r} and {names[1]!r}, by place or by name"
                    )
            under_way[:] = [exchange.send(*inputs[:2], *[named[name] for name in by_name])]
            sent = dict(zip(names, under_way[0][:2], strict=True))
            came = [sent[name] for name in by_place]
            return (*came, *inputs[2:]), named | {name: sent[name] for name in by_name}

        def leave(_: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            return exchange.back(output, under_way.pop())

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
        return module


def _names_of_tokens(module: nn.Module) -> tuple[str, str]:
    """Return as what forward takes tokens and the ends of their groups."""
    of_forward = list(inspect.signature(module.forward).parameters.values())
    by_place = [one.name for one in of_forward if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = [one.name for one in of_forward if one.kind == one.KEYWORD_ONLY]
    # Of those that are handed by name alone, what is called as here comes first.
    first = [*by_place, *sorted(by_name, key=lambda name: {"x": 0, "offsets": 1}.get(name, 2))][:2]
    return (first[0], first[1]) if len(first) == 2 else ("x", "offsets")
