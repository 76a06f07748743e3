"""The command line: `halfbyte COMMAND [options]`. A command's module is imported when it runs, not before.

A command is a function from the list of its arguments to an exit status. User errors become one line and status 2.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte import welcome
from halfbyte.arguments import ArgumentParser
from halfbyte.version import __version__

USER_ERROR = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, in the user's share of it, or below what `ulimit -f` allows."""
HELP, VERSION = ("-h", "--help"), ("-V", "--version")


class Command(NamedTuple):
    """Where a command lives, and what `halfbyte --help` says about it."""

    module: str
    function: str
    help: str


COMMANDS = {
    "train": Command("halfbyte.train.commands", "train_command", "train a language model under one recipe"),
    "compare": Command("halfbyte.train.commands", "compare_command", "train several recipes alike: a table and a plot"),
    "study": Command(
        "halfbyte.train.study", "study_command", "many recipes and seeds side by side, in pieces: a league"
    ),
    "generate": Command("halfbyte.train.answers", "generate_command", "a trained model continues a text"),
    "evaluate": Command(
        "halfbyte.train.answers", "evaluate_command", "its loss on a text, and its choices among several"
    ),
    "export": Command("halfbyte.integrations.export_command", "main", "a trained model as engines load it: its bytes"),
    "inspect": Command("halfbyte.train.studies", "inspect_command", "what layers lose under which recipe, and why"),
    "sensitivity": Command("halfbyte.train.studies", "sensitivity_command", "which operands hurt most; what to keep"),
    "report": Command("halfbyte.train.page", "main", "a run as one HTML page: losses, statistics, layers"),
    "plan": Command("halfbyte.plan.command", "main", "memory, traffic and time of a run on any number of GPUs"),
    "verify": Command("halfbyte.verify.command", "main", "every kernel here against the reference, byte for byte"),
    "bench": Command("halfbyte.cli", "bench", "time every kernel beside this machine's ceilings (needs a checkout)"),
    "explain": Command("halfbyte.cli", "explain_command", "which kernels a call launches, with which tiles, and why"),
    "env": Command("halfbyte.cli", "env", "what runs on this machine, and why the rest does not"),
}

WITH_CHECKPOINTS = ("train", "compare", "study")
"""What goes on where it was stopped; the others begin anew."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit status: 0, 1 if the work failed, 2 if the user asked for something that cannot be, 130 and 141 if
        ctrl-C or the end of the pipe that it prints to stopped it; `train` and `compare` give 143 after SIGTERM.
    """
    _prepare_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as in `halfbyte train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's end reports it too
        return 141


def _prepare_streams() -> None:
    """Let nothing that is printed end the work: not a stream that was closed, nor one that cannot encode a letter."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _run(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        print(welcome.welcome_text(welcome.look()))
        return 0
    name, *rest = given
    if name in HELP:
        print(usage())
        return 0
    if name in VERSION:
        print(f"halfbyte {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"halfbyte: no command {name!r}; use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return USER_ERROR
    command = COMMANDS[name]
    try:
        return getattr(importlib.import_module(command.module), command.function)(rest)
    except (ValueError, ImportError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in welcome.EXTRA:
            raise
        remedy = ": pip install 'halfbyte[train]'" if isinstance(error, ModuleNotFoundError) else ""
        print(f"halfbyte {name}: {error}{remedy}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        if error.filename is None and error.errno not in FULL:  # not about a path: no mistake in an option
            raise
        room = "make room or " if error.errno in FULL else ""
        where = error.filename or "standard output or a file"
        print(f"halfbyte {name}: {where}: {error.strerror}; {room}choose another path", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        rest = "; the same command goes on from the last checkpoint" if name in WITH_CHECKPOINTS else ""
        print(f"\nhalfbyte {name}: stopped{rest}", file=sys.stderr)
        return 130


def usage() -> str:
    """Return what `halfbyte --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    last = "Each command has its own --help. --version says which halfbyte this is."
    return "\n".join(("usage: halfbyte COMMAND [options]", "", *lines, "", last))


def _wants_help(name: str, arguments: list[str], text: str) -> bool:
    """Print the help of a command without a parser, if asked for."""
    if not set(arguments) & set(HELP):
        return False
    print(f"usage: halfbyte {name} [-h]\n\n{text}")
    return True


def bench(arguments: list[str]) -> int:
    """Run the benchmark, which lives beside the package in a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "bench" / "run.py").exists():
        if _wants_help("bench", arguments, "Time every kernel. It is part of the source tree and runs in a checkout."):
            return 0
        raise ValueError(
            "the benchmark is part of the source tree, not of the installed package; run `python -m bench` "
            "in a checkout, or `halfbyte verify` for a few speeds"
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("bench.run").main(arguments)


def _operand(word: str) -> Any:
    """Return the operand of a recipe with options, which `halfbyte.train` reads."""
    from halfbyte.train.options import read_operand

    return read_operand(word)


def explain_command(arguments: list[str]) -> int:
    """Print which kernels a call launches, with which tiles, and why."""
    from halfbyte import ops

    parser = ArgumentParser(
        prog="halfbyte explain",
        description="Say which kernels a call on bf16 launches, with which tiles, why, and why not the others.",
    )
    parser.add_argument("shape", metavar="SHAPE", help="rows x columns, as in 16384x2880, or MxNxK of a product")
    parser.add_argument(
        "specs",
        metavar="SPEC",
        nargs="+",
        help="of rows and of columns, or of a and b: a key whose last parts may be left out (nvfp4, nvfp4/16x16, "
        "mxfp8), an operand of a preset, with options or without (nvfp4.dgrad.a, nvfp4(rht=64).wgrad.a), or bf16",
    )
    parser.add_argument("--op", help=f"{', '.join(ops.EXPLAINED)}; by default quantize for two sizes, gemm for three")
    parser.add_argument("--groups", type=int, default=0, help="groups of tokens")
    parser.add_argument("--target", help="sm_90, gfx942, interpreter, cpu, …; by default this machine")
    parser.add_argument("--batch-invariant", action="store_true", help="a product whose rows are alike in every batch")
    negative = next((word for word in arguments if re.match(r"-\d+x", word)), None)  # argparse takes it for an option
    if negative is not None:
        raise ValueError(f"SHAPE {negative!r}: sizes are 0 or more, as in 16384x2880")
    options = parser.parse_args(arguments)
    try:
        shape = [int(size) for size in options.shape.split("x")]
    except ValueError:
        raise ValueError(f"SHAPE {options.shape!r}: give sizes with x between them, as in 16384x2880") from None
    named = {"op": options.op, "groups": options.groups, "target": options.target}
    specs = [word if "(" not in word else _operand(word) for word in options.specs]
    print(ops.explain(shape, *specs, **named, batch_invariant=options.batch_invariant))
    return 0


def env(arguments: list[str]) -> int:
    """Print versions, devices and backends."""
    if _wants_help("env", arguments, "Print versions, devices, and which backends run here and why the others do not."):
        return 0
    if arguments:
        raise ValueError(f"{' '.join(arguments)!r}: env takes no options")
    import torch

    import halfbyte as hb
    from halfbyte.kernels.target import find

    print(f"halfbyte {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"CPU: {platform.machine()}, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        target = find(torch.device("cuda", index))
        print(f"GPU {index}: {facts.name}, {target.name}, {facts.total_memory / 2**30:.0f} GiB")
    for backend in hb.backends():
        print(f"backend {backend.name}: {'runs here' if backend.available else 'does not run here'}: {backend.reason}")
        if backend.casts:
            print(f"  conversion to E2M1: {backend.casts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
