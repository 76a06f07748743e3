"""A command line's parser whose refusals are one line, as everything that commands refuse."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, which does not print its usage and end the process where an argument cannot be used."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with what argparse found."""
        raise ValueError(f"{message}; {self.prog} --help says what can be given")


def given_path(text: str) -> Path:
    """Return the path of an option; "" would be the working directory, which nobody names so."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path; give one, or leave the option out")
    return Path(text)


def end_command() -> None:
    """End the process as ctrl-C ends the command `halfbyte`, if that is what imports the package."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    if name == "-m" and "-m" in sys.orig_argv:  # `python -m` imports the package before it says which module runs
        name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if name == "halfbyte":
        print("\nhalfbyte: stopped", file=sys.stderr)
        raise SystemExit(130) from None
