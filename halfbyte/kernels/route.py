"""How a kernel is chosen: a table of candidates in order, each with a verifier that returns None or a reason.

The first candidate that nothing speaks against is taken. Its plan says all that the choice decides, as a `Choice`:
launchers take it, and `halfbyte explain` prints it. The tables stand in `quantize.route`, `quantize.grouped_route` and
`gemm.route`; reasons become text only when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from halfbyte.kernels.launch import rehearsal


class Reason(NamedTuple):
    """Why a candidate is not taken: a text with places for values."""

    text: str
    values: tuple = ()

    def __str__(self) -> str:
        return self.text.format(*self.values)


class Choice(NamedTuple):
    """What a launcher does with one request.

    kernel: that is launched, or in words how choices that follow go together.
    grid: programs; empty where the choices that follow say it.
    constants: constexprs and launch options that the choice decides, by name.
    facts: what else the launcher is told.
    request: what was chosen for.
    why: what the candidate is good for.
    instead: the candidates before it in the table, and what spoke against each.
    """

    kernel: str
    grid: tuple[int, ...] = ()
    constants: dict[str, Any] = {}  # noqa: RUF012  never changed
    facts: Any = None
    request: Any = None
    why: str = ""
    instead: tuple[tuple[str, Reason], ...] = ()


class Candidate(NamedTuple):
    """One line of a table.

    kernel: its name.
    problem: says what speaks against it for a request, or None.
    plan: makes the Choice, whose `why` and `instead` are filled in.
    why: what it is good for.
    """

    kernel: str
    problem: Callable[[Any], Reason | None]
    plan: Callable[[Any], Choice]
    why: str


def fits_all(_: Any) -> None:
    """Return that nothing speaks against the last candidate of a table."""


def choose(table: Sequence[Candidate], request: Any) -> Choice:
    """Return the choice of the first candidate that nothing speaks against, and note it in a rehearsal."""
    instead = []
    for candidate in table:
        reason = candidate.problem(request)
        if reason is None:
            choice = candidate.plan(request)._replace(why=candidate.why, instead=tuple(instead), request=request)
            if (events := rehearsal()) is not None:
                events.append(choice)
            return choice
        instead.append((candidate.kernel, reason))
    raise AssertionError("the last candidate of a table takes everything")
