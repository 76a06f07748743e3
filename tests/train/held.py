"""`halfbyte`, whose run under nvfp4 waits with the step after STEP for a signal: `held.py STEP COMMAND …`.

On a busy machine a run may else end before the test that stops it has seen that it began.
"""

from __future__ import annotations

import sys
import time

from halfbyte import cli
from halfbyte.train import loop

SECONDS = 120
"""Until it ends with an error, should no signal come."""

if __name__ == "__main__":
    last, command, one_step = int(sys.argv[1]), sys.argv[2:], loop.Trainer._one_step

    def held(trainer: loop.Trainer):
        deadline = time.monotonic() + SECONDS
        while trainer.recipe == "nvfp4" and trainer.step == last and not trainer.interrupts.requested:
            assert time.monotonic() < deadline, "no signal came"
            time.sleep(0.01)
        return one_step(trainer)

    loop.Trainer._one_step = held
    sys.exit(cli.main(command))
