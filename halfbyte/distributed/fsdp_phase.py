"""What a gather of FSDP2 is for: the operands of the forward, of the backward, or of both."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from halfbyte.position import is_capturing

FORWARD, BACKWARD = "forward", "backward"
EVERYTHING = frozenset((FORWARD, BACKWARD))


def refuse_capture(call: str) -> None:
    """Raise ValueError where a CUDA graph is captured.

    A microsecond on a GPU: for each forward of a model, not of a layer.

    Args:
        call: what arranged that codes are gathered.
    """
    if is_capturing():
        raise ValueError(
            f"{call}: a CUDA graph is being captured. Which weights changed, and what a gather brings, is found out by "
            "the host before each forward, so that replays would multiply by the codes of the capture: run the model "
            "outside of torch.cuda.graph, with blocks compiled (block.compile()) where launches take long"
        )


class Mode:
    """Whether the forward that began last records gradients: FSDP2 asks for messages where nothing does."""

    def __init__(self) -> None:
        self.has_gradients = True


class Phase:
    """When FSDP2 gathers one group of its parameters.

    runs_again: whether the backward runs the forward again, and reads its operands too.

    Args:
        group: FSDP2's; None if it is of a module above the model that was given, of which nothing is known.
        place: the module and name of the parameter whose messages bring all.
        mode: of the model.
    """

    def __init__(self, group: Any, place: tuple[Any, str], mode: Mode) -> None:
        params = () if group is None else group.fsdp_params
        own = [p for p in params if (p._module_info.module, p._module_info.param_name) == place]
        self._group, self._param = (None, None) if not own else (weakref.ref(group), weakref.ref(own[0]))
        self._mode = mode
        self.runs_again = False

    @property
    def is_known(self) -> bool:
        """Whether anything is known: else every gather brings everything."""
        return self._group is not None

    def wanted(self) -> frozenset[str]:
        """Return what the gather that begins now is for."""
        group: Any = None if self._group is None else self._group()
        if group is None:
            return EVERYTHING
        if torch._C._current_graph_task_id() != -1:  # autograd runs
            state = getattr(getattr(group, "_training_state", None), "name", "")
            return frozenset((BACKWARD,)) if state == "PRE_BACKWARD" and not self.runs_again else EVERYTHING
        stays = not getattr(group, "_reshard_after_forward", False)
        return EVERYTHING if stays and self._mode.has_gradients else frozenset((FORWARD,))

    def receive_into(self, memory: list[Tensor]) -> None:
        """Let FSDP2 copy what comes into other memory than that of the gather before, which brought other messages.

        Args:
            memory: of each message [world * elements]; FSDP2 allocates and frees it.
        """
        assert self._param is not None, "its group is known"
        param = self._param()
        assert param is not None, "it is gathering"
        param.all_gather_outputs = memory
