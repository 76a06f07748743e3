"""What travels when FSDP2 gathers a model: a value that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from halfbyte.notebook import ShowsText


@dataclass(frozen=True, kw_only=True)
class GatherRow:
    """One parameter: what its gathers are, in bytes that reach every rank.

    name: of the parameter.
    form: the key of the spec whose codes and scales travel, or the dtype of the values that do.
    reason: why a weight of a quantized layer travels in its values; "" for all others.
    sent: bytes of all ranks' messages before a forward, padding included.
    values: the same if the values travelled.
    backward: the form before a backward, whose blocks lie along the columns if it is another.
    backward_sent: bytes of all ranks' messages before a backward.
    backward_reason: why a weight whose codes travel before the forward then travels in its values; "" for all others.
    """

    name: str
    form: str
    reason: str
    sent: int
    values: int
    backward: str
    backward_sent: int
    backward_reason: str


@dataclass(frozen=True, kw_only=True)
class GatherReport(ShowsText):
    """What `fsdp_gather_nvfp4_` arranged; prints as a table.

    rows: one for each sharded parameter, in the model's order.
    """

    rows: tuple[GatherRow, ...]

    @property
    def quantized(self) -> tuple[str, ...]:
        """Names of the weights that are gathered as codes."""
        return tuple(row.name for row in self.rows if row.sent != row.values)

    @property
    def kept(self) -> dict[str, str]:
        """Name and reason of every weight of a quantized layer that is gathered in its values."""
        return {row.name: row.reason for row in self.rows if row.reason}

    @property
    def kept_in_backward(self) -> dict[str, str]:
        """Name and reason of every weight that is gathered as codes for the forward, in its values for the backward."""
        return {row.name: row.backward_reason for row in self.rows if row.backward_reason}

    @property
    def sent(self) -> int:
        """Bytes of one gather of the whole model, for a forward."""
        return sum(row.sent for row in self.rows)

    @property
    def backward_sent(self) -> int:
        """Bytes of one gather of the whole model, for a backward."""
        return sum(row.backward_sent for row in self.rows)

    @property
    def ratio(self) -> float:
        """Bytes of one gather of the whole model by those of its values, for a forward."""
        return self.sent / max(1, self._values)

    @property
    def backward_ratio(self) -> float:
        """Bytes of one gather of the whole model by those of its values, for a backward."""
        return self.backward_sent / max(1, self._values)

    @property
    def _values(self) -> int:
        return sum(row.values for row in self.rows)

    def __str__(self) -> str:
        is_split = any(row.form != row.backward for row in self.rows)
        rows = [row for row in self.rows if not is_split]
        found = [("gathered as", _Line(row.form, row.reason, row.sent, row.values)) for row in rows]
        for row in self.rows if is_split else ():
            found.append(("forward as", _Line(row.form, row.reason, row.sent, row.values)))
            reason = row.backward_reason or row.reason
            found.append(("backward as", _Line(row.backward, reason, row.backward_sent, row.values)))
        wide = max((len(text) for title, line in found for text in (title, line.form)), default=0)
        lines = []
        for title in dict.fromkeys(title for title, _ in found):
            own = sorted(line for other, line in found if other == title)
            lines.append(f"{title:{wide}} {'parameters':>10} {'bytes':>14} {'of values':>9}")
            for (form, reason), group in groupby(own, lambda line: (line.form, line.reason)):
                lines.append(_text(form, list(group), wide, reason))
            lines.append(_text("all", own, wide))
        return "\n".join(lines)


class _Line(NamedTuple):
    form: str
    reason: str
    sent: int
    values: int


def _text(form: str, lines: list[_Line], wide: int, reason: str = "") -> str:
    sent, values = sum(line.sent for line in lines), sum(line.values for line in lines)
    return f"{form:{wide}} {len(lines):10} {sent:14,} {sent / max(1, values):9.3f}  {reason}".rstrip()
