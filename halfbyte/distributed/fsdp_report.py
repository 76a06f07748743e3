"""What travels when FSDP2 gathers a model: a value that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from halfbyte.notebook import ShowsText


@dataclass(frozen=True, kw_only=True)
class GatherRow:
    """One parameter: what its gather is, in bytes that reach every rank.

    name: of the parameter.
    form: the key of the spec whose codes and scales travel, or the dtype of the values that do.
    reason: why a weight of a quantized layer travels in its values; "" for all others.
    sent: bytes of all ranks' messages, padding included.
    values: the same if the values travelled.
    """

    name: str
    form: str
    reason: str
    sent: int
    values: int


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
    def sent(self) -> int:
        """Bytes of one gather of the whole model."""
        return sum(row.sent for row in self.rows)

    @property
    def ratio(self) -> float:
        """Bytes of one gather of the whole model by those of its values."""
        return self.sent / max(1, sum(row.values for row in self.rows))

    def __str__(self) -> str:
        def key(row: GatherRow) -> tuple[str, str]:
            return row.form, row.reason

        wide = max(len(text) for text in ("gathered as", *(row.form for row in self.rows)))
        lines = [f"{'gathered as':{wide}} {'parameters':>10} {'bytes':>14} {'of values':>9}"]
        for (form, reason), group in groupby(sorted(self.rows, key=key), key):
            rows = list(group)
            sent, values = sum(row.sent for row in rows), sum(row.values for row in rows)
            lines.append(f"{form:{wide}} {len(rows):10} {sent:14,} {sent / max(1, values):9.3f}  {reason}".rstrip())
        lines.append(f"{'all':{wide}} {len(self.rows):10} {self.sent:14,} {self.ratio:9.3f}")
        return "\n".join(lines)
