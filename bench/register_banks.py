"""Reads of registers that meet in one bank, counted in machine code for sm_90.

No manual says it of two registers, but by what was counted an instruction that reads two of one parity is issued
a cycle later, unless the one before left one of them in the cache of operands (`.reuse`): two kernels in two forms
each, which differ in little else, took 27,200 and 8,900 cycles of a scheduler more for 30,000 and 8,100 such reads more
(docs/internals/kernels.md). Of operands of 64 bits the first register counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\S*)")
STORES = ("ST", "RED")  # their first operand is an address, not a result


def conflicts(instructions: Iterable[str]) -> int:
    """Return how many of them, one behind the other and without guards, read registers of one bank alone."""
    count, kept = 0, dict[int, str]()
    for text in instructions:
        name, _, operands = text.partition(" ")
        read = {}
        for place, operand in enumerate(operands.split(",")):
            match = REGISTER.search(operand)
            if match and (place or name.startswith(STORES)):
                read[place] = match
        fetched = {int(match[1]) for place, match in read.items() if kept.get(place) != match[1]}
        kept = {place: match[1] for place, match in read.items() if "reuse" in match[2]}
        count += len(fetched) > 1 and len({register % 2 for register in fetched}) == 1
    return count
