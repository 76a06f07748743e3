"""A command line's parser whose refusals are one line, as everything that commands refuse."""

from __future__ import annotations

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, which does not print its usage and end the process where an argument cannot be used."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with what argparse found."""
        raise ValueError(f"{message}; {self.prog} --help says what can be given")
