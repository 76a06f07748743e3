"""In which forms forward and backward read a weight, and why FSDP2 cannot gather some of them as codes."""

from __future__ import annotations

from typing import NamedTuple

from halfbyte.functional.weights import weight_specs
from halfbyte.spec import NVFP4, Eden, Recipe, Spec
from halfbyte.tensor.primary import check_primary_spec


class Reading(NamedTuple):
    """What forward and backward read of a weight.

    spec: of forward's codes.
    is_one: whether backward reads nothing else: those codes transposed, or what they stand for.
    columns: how w.T is quantized for the backward; None: not at all, it reads values, or the codes alone.
    """

    spec: NVFP4
    is_one: bool
    columns: Spec | None = None

    @property
    def is_in_values(self) -> bool:
        """Whether the backward reads values."""
        return not self.is_one and self.columns is None


def reading_of(recipe: Recipe) -> Reading | str:
    """Return in which forms a recipe reads a weight, or why that cannot be gathered as codes."""
    row, col = weight_specs(recipe)
    if not isinstance(row, NVFP4):
        what = "high precision" if row is None else row.key
        return f"forward reads it as {what}, not as NVFP4"
    known = _reason_of_spec(row)
    if known is not None:
        return known
    if recipe.splits_mean:
        return "activation_mean='split' multiplies its values too"
    if recipe.channels is not None:
        return "channels of it are multiplied in its values too"
    if recipe.backward == "dequantized" or (row.is_tile and recipe.dgrad is not None and recipe.dgrad.b == row):
        return Reading(row, True)
    if row.is_tile:
        backward = "high precision" if col is None else col.key
        return f"backward reads it as {backward}, which cannot be made of forward's {row.key}"
    known = None if col is None else _reason_of_columns(col)
    return known or Reading(row, False, col)


def _reason_of_spec(spec: NVFP4) -> str | None:
    """Return why rows cannot be quantized where they lie, to the bytes of the whole weight."""
    if spec.is_tile:
        try:
            check_primary_spec(spec)
        except ValueError as error:
            return str(error)
        return None
    if _draws(spec):
        return f"forward reads it as {spec.key}, for which every rank draws random bits of its own"
    if spec.rotation is not None or not spec.has_tensor_amax:
        return f"forward reads it as {spec.key}: only one amax of a whole, unrotated weight is found before it travels"
    return None


def _reason_of_columns(spec: Spec) -> str | None:
    """Return why blocks along the rows cannot be quantized in the shards."""
    if _draws(spec):
        return f"backward reads its transpose as {spec.key}, for which every rank draws random bits of its own"
    if spec.is_tile or spec.rotation is not None or spec.has_row_amax:
        return f"backward reads its transpose as {spec.key}: only 1x16 blocks of it with one amax, or MXFP8, are made"
    return None


def _draws(spec: Spec) -> bool:
    return spec.needs_rng or spec.needs_sign_rng or isinstance(spec.scaling, Eden)
