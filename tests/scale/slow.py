"""`halfbyte`, run by torchrun, with steps that take long: `slow.py SECONDS COMMAND …`."""

from __future__ import annotations

import sys
import time

from halfbyte import cli
from halfbyte.train import loop

if __name__ == "__main__":
    seconds, command, step = float(sys.argv[1]), sys.argv[2:], loop.Trainer._one_step

    def slowly(trainer: loop.Trainer):
        time.sleep(seconds)
        return step(trainer)

    loop.Trainer._one_step = slowly
    sys.exit(cli.main(command))
