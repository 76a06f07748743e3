"""The command `halfbyte plan`: a request in, tables or JSON out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import tyro
from rich.console import Console
from rich.table import Table

from halfbyte.plan.assumptions import assumptions
from halfbyte.plan.planning import Plan, PlanRequest, plan
from halfbyte.plan.show import as_json, plan_heading, tables
from halfbyte.train.asked import read_options

DESCRIPTION = """Say what a training run takes of every GPU before it runs: memory by kind, bytes of every collective,
multiplications by precision, and the time of a step. Nothing is allocated and no GPU is needed. The exit status is 1 if
a given mesh does not fit."""


class _Console(Console):
    """Rich's, but for a reader that leaves: rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # cli.main ends as other commands do


@dataclass(frozen=True, kw_only=True)
class Options:
    """Plan a training run."""

    request: PlanRequest = field(default_factory=PlanRequest)
    json: bool = False
    """Print JSON: bytes, seconds and flops of one GPU."""


def main(arguments: list[str]) -> int:
    """Run `halfbyte plan`; the exit status is 1 if the mesh that was given does not fit."""
    prog, config = "halfbyte plan", (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    options = read_options(
        lambda: tyro.cli(Options, prog=prog, description=DESCRIPTION, args=arguments, config=config), prog
    )
    found = plan(options.request)
    if options.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        _print(found)
    return 0 if found.fits else 1


def _print(found: Plan) -> None:
    console = _Console(highlight=False, soft_wrap=True)
    console.print(plan_heading(found), markup=False)
    for title, columns, lines in tables(found):
        table = Table(*columns, title=title, title_justify="left")
        for column in table.columns[1:] if title != "Meshes left out" else ():
            column.justify = "right"
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for line in assumptions(found.job):
        console.print(f"- {line}", markup=False)
