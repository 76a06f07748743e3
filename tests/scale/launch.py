"""torchrun's own main function, in a process that has imported torch already."""

from __future__ import annotations

import os
import sys


def torchrun(arguments: list[str], environment: dict[str, str], output: str, error: str) -> None:
    """Be `torchrun`, called with these arguments there.

    Args:
        arguments: with the program's name.
        environment: all of it.
        output, error: files for what it and its ranks print.
    """
    for stream, path in enumerate((output, error), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    sys.argv = arguments
    from torch.distributed.run import main

    main()
