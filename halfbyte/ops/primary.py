"""The stages of a cast of primary weights, from the backend that runs on the weights' device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.ops.backends import REFERENCE, check_kernels, choose
from halfbyte.pieces import CastTarget, Piece
from halfbyte.reference import primary as reference


class MasterStages(Protocol):
    """The stages that read masters; see `halfbyte.reference.primary.Caster`."""

    def amax(self, amaxes: Tensor) -> None: ...
    def choose(self, amaxes: Tensor, scales: Tensor) -> None: ...
    def cast(self, amaxes: Tensor, scales: Tensor) -> None: ...


class TurnStage(Protocol):
    """What fills the other orientation of whole weights."""

    def transpose(self) -> None: ...


class WeightStages(Protocol):
    """The stages that work on whole weights; see `halfbyte.reference.primary.Finisher`."""

    def scale(self, amaxes: Tensor, scales: Tensor, expand: bool = False) -> None: ...
    def expand(self, amaxes: Tensor, scales: Tensor) -> None: ...
    def transpose(self) -> None: ...


def primary_stages(
    pieces: Sequence[Piece],
    targets: Sequence[CastTarget],
    tiles: int,
    device: torch.device,
    backend: str | None = None,
) -> tuple[MasterStages, WeightStages]:
    """Return the stages that read masters and those that work on whole weights, their metadata prepared.

    Args:
        pieces: of the masters, on `device`.
        targets: the weights they belong to, or more.
        tiles: of all weights together.
        device: where everything is.
        backend: None chooses one.
    """
    check_kernels(tuple(dict.fromkeys(target.spec for target in targets)), device, backend)
    if choose(device, backend) == REFERENCE:
        return reference.Caster(pieces, tiles), reference.Finisher(targets, tiles)
    from halfbyte.kernels.master_cast import launch as kernels  # imports Triton, so only where it runs

    return kernels.Caster(pieces, tiles), kernels.Finisher(targets, tiles)


def turner(targets: Sequence[CastTarget], device: torch.device, backend: str | None = None) -> TurnStage:
    """Return what fills the other orientation of whole weights whose memory may be another in every run.

    Args:
        targets: the weights, with what is to be filled.
        device: where everything is.
        backend: None chooses one.
    """
    if choose(device, backend) == REFERENCE:
        return reference.Finisher(targets, 0)
    from halfbyte.kernels.master_cast import launch as kernels  # imports Triton, so only where it runs

    return kernels.Turner(targets)
