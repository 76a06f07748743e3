"""One tree's half of `bench.in_turn`: runs cases up to where they are timed, and times them when it is told to.

Its `bench` and `halfbyte` are those of the tree that is timed, an older one perhaps: only what trees have had for long
is used of them. Orders and answers are lines of JSON; what cases print goes to the error stream.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

import torch

from bench import measure as measuring
from bench.cases import attention
from bench.registry import Setting, Unequal, all_cases
from halfbyte.ops.backends import choose
from halfbyte.verify import timing


class Next(BaseException):
    """The case has been timed often enough; no `except Exception` of a case may hold it up."""


class Turns:
    """Answers what is timed of one case whenever an order asks for it."""

    def __init__(self, orders: TextIO, answers: TextIO) -> None:
        self.orders, self.answers = orders, answers

    def answer(self, **values: Any) -> None:
        """Write one line."""
        print(json.dumps(values), file=self.answers, flush=True)

    def measure(self, calls: Any, device: torch.device, **how: Any) -> NoReturn:
        """Take the place of `timing.measure`."""
        self._serve(lambda: timing.measure(calls, device, **how).seconds)

    def measure_alternately(self, variants: Any, device: torch.device, **how: Any) -> NoReturn:
        """Take the place of `timing.measure_alternately`, of which ours counts."""
        self._serve(lambda: timing.measure(variants["ours"], device, **how).seconds)

    def _serve(self, seconds: Callable[[], float]) -> NoReturn:
        seconds()  # compiles, captures, allocates
        self.answer(ready=True)
        while json.loads(self.orders.readline())["order"] == "time":
            self.answer(us=seconds() * 1e6)
        raise Next

    def whole(self, run: Callable[[], float]) -> None:
        """Time what measures itself: the whole case again at every order."""
        self.answer(ready=True)
        while json.loads(self.orders.readline())["order"] == "time":
            self.answer(us=run() * 1e6)


def main() -> None:
    """Read orders until there are none."""
    turns = Turns(sys.stdin, sys.stdout)
    sys.stdout = sys.stderr
    measuring.measure = attention.measure = turns.measure
    measuring.measure_alternately = turns.measure_alternately
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    once = timing.Ceilings(1.0, 1.0)  # shares of them are the driver's business
    for line in sys.stdin:
        order = json.loads(line)
        cases = {case.name: case for case in all_cases()}
        setting = Setting(
            device=device,
            backend=choose(device, order["backend"]),
            ceilings=once,
            plain=False,
            budget=order["budget"],
        )
        case, shape = cases.get(order["case"]), tuple(order["shape"])
        # What the case allocates lies elsewhere then.
        lead = torch.empty(order["lead"] << 20, dtype=torch.uint8, device=device)
        try:
            if case is None:
                turns.answer(problem="this tree has no such case")
            elif order["whole"]:
                turns.whole(lambda case=case, shape=shape, setting=setting: case.run(setting, shape).seconds)
            else:
                case.run(setting, shape)
                turns.answer(problem="it was not timed: it measures itself")
        except Next:
            pass
        except (Unequal, Exception) as error:
            turns.answer(problem=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        del lead
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
