"""The record of a run: one JSON object a line, written through to the file line by line, and TensorBoard beside it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from halfbyte import files

NAME, BOARD = "log.jsonl", "tensorboard"


class Log:
    """Appends to `log.jsonl` and, if asked, to TensorBoard files.

    Args:
        folder: the run's.
        after: the step a resumed run goes on from; later lines, and a line cut in half, are dropped first.
        tensorboard: write TensorBoard files too.

    Raises:
        ImportError: `tensorboard` without the package.
        OSError: the disk is full; the error names the file, or the folder of TensorBoard.
    """

    def __init__(self, folder: Path, *, after: int, tensorboard: bool) -> None:
        with files.naming(folder / BOARD):
            self._board = _board(folder, after) if tensorboard else None
        path = folder / NAME
        files.write_text(path, "".join(json.dumps(line) + "\n" for line in read_log(folder) if line["step"] <= after))
        self._path, self._file = path, path.open("ab", buffering=0)  # unbuffered: closing has nothing left to write

    def write(self, kind: str, step: int, values: dict[str, float | str]) -> None:
        """Append one line of the kind "step", "eval" or "recipe"; a number that is not finite becomes null.

        Raises:
            OSError: the disk is full; the error names the file.
        """
        finite = {
            name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in values.items()
        }
        rest = (json.dumps({"kind": kind, "step": step, **finite}) + "\n").encode()
        with files.naming(self._path):
            while rest:  # a disk that is almost full takes a part
                rest = rest[self._file.write(rest) :]
        if self._board is not None:
            with files.naming(self._path.parent / BOARD):
                for name, value in values.items():
                    add = self._board.add_text if isinstance(value, str) else self._board.add_scalar
                    add(f"{kind}/{name}", value, step)

    @property
    def board(self):
        """The writer of TensorBoard files, None if there is none."""
        return self._board

    def close(self) -> None:
        """Finish both files.

        Raises:
            OSError: the disk is full; the error names the folder of TensorBoard.
        """
        self._file.close()
        if self._board is not None:
            with files.naming(self._path.parent / BOARD):  # what its thread has not written yet
                self._board.close()


class Silent:
    """The log of a rank that is not the first: nothing."""

    def write(self, kind: str, step: int, values: dict[str, float | str]) -> None:
        """Leave it to the first rank."""

    def close(self) -> None:
        """Leave it to the first rank."""


def read_log(folder: Path) -> list[dict]:
    """Return the lines of a run's log; a last line cut in half by a kill is left out.

    Raises:
        ValueError: the file cannot be read, or a line is not what `Log` writes; the message names it.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        return []
    lines = files.read_text(path).split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "not of ours"
            raise ValueError(f"{path} line {number}: not JSON ({reason}); delete the line") from error
        problem = _problem(record)
        if problem:
            raise ValueError(f"{path} line {number}: not a line of a run ({problem}); delete the line")
        records.append(record)
    return records


def _problem(record: object) -> str:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "no object with a kind"
    if type(record.get("step")) is not int or not 0 <= record["step"] < 1 << 63:
        return "step is no number of steps"
    if record["kind"] in ("step", "eval"):
        loss = record.get("loss", "")
        if loss is not None and (type(loss) not in (int, float) or not abs(loss) < math.inf):
            return "loss is neither a number nor null"
    return ""


def curve(folder: Path, kind: str) -> tuple[list[int], list[float]]:
    """Return steps and losses of the lines of one kind, without those that are not finite."""
    lines = [line for line in read_log(folder) if line["kind"] == kind and line["loss"] is not None]
    points = [(line["step"], line["loss"]) for line in lines]
    return [step for step, _ in points], [loss for _, loss in points]


def _board(folder: Path, after: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package `tensorboard`: pip install 'halfbyte[train]'") from error
    return SummaryWriter(str(folder / BOARD), purge_step=after + 1)
