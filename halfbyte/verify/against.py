"""What `halfbyte verify --against` prints, and the tables of docs/agreement.md."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from halfbyte.verify.agreement import Agreement, Comparison, compare_with, differing_rules
from halfbyte.verify.peers import PEERS, quantizer
from halfbyte.version import __version__

MACHINE_OPTIONS = ("row", "device", "backend", "force", "full", "jobs")
"""Of the comparison with the reference, which `--against` does not make."""
FACTOR_DIGITS = 1e-6
"""fp32 numbers that lie nearer are rounded differently in their last bit, no more."""


def against(options: argparse.Namespace) -> int:
    """Run `halfbyte verify --against`; the exit status is 1 if a byte is not that of its profile.

    Args:
        options: against, path, json, and those of MACHINE_OPTIONS, which must not be given.

    Raises:
        ValueError: another option is given, the package is not installed, or the path is of no use.
    """
    given = [name for name in MACHINE_OPTIONS if getattr(options, name)]
    if given:
        raise ValueError(f"--{given[0]}: --against compares on the CPU with another package; leave --{given[0]} out")
    peer = PEERS[options.against]
    quantize, version = quantizer(peer, None if options.path is None else Path(options.path))
    comparison = compare_with(peer, quantize, version)
    print(json.dumps(comparison.as_json(), indent=1) if options.json else agreement_text(comparison))
    return 0 if comparison.is_explained else 1


def agreement_text(comparison: Comparison) -> str:
    """Return the report for people."""
    peer = comparison.peer
    lines = [
        f"{peer.distribution} {comparison.version}, beside halfbyte {__version__}, torch {torch.__version__}",
        f"called      {peer.call}",
        "rules that are not the definition's:",
        *(f"    {rule:<18}{says}" for rule, says in differing_rules(peer.profile)),
        "",
        f"{'data':<44}{'scales':>9}{'codes':>9}{'decoded':>9}   because",
    ]
    for agreement in comparison.agreements:
        shares = "".join(f"{share:>9}" for share in shares_of(agreement))
        lines.append(f"{agreement.data:<44}{shares}   {reasons(agreement)}".rstrip())
        if agreement.unexplained:
            lines.append(f"    UNEXPLAINED: {agreement.unexplained}")
    if comparison.is_explained:
        lines += ["", "EXPLAINED: the profile has the package's bytes on all data"]
    else:
        lines += ["", f"NOT EXPLAINED: the rules were read in {peer.distribution} {peer.version}"]
    return "\n".join(lines)


def shares_of(agreement: Agreement) -> tuple[str, str, str]:
    """Return the shares of scales, codes and decoded values that differ; 0 where none does."""
    counts = (agreement.scales, agreement.blocks), (agreement.codes, agreement.elements)
    scales, codes, decoded = (_share(*count) for count in (*counts, (agreement.decoded, agreement.elements)))
    return scales, codes, decoded


def reasons(agreement: Agreement) -> str:
    """Return the rules behind the differences with how many scales and codes each has changed."""
    found = [f"{cause.rule} ({_counts(cause.scales, cause.codes)})" for cause in agreement.causes]
    if agreement.factor > FACTOR_DIGITS:
        found.append(f"fp32 factor {agreement.factor:.1%} off")
    return ", ".join(found)


def agreement_table(comparison: Comparison) -> str:
    """Return the package's table of docs/agreement.md: what was called, its rules, and a row for every data set."""
    peer = comparison.peer
    state = "equal on all data" if comparison.is_explained else "**not equal**: the table explains only a part"
    return "\n".join(
        [
            f"**{peer.distribution} {comparison.version}** on {comparison.day}, torch {torch.__version__}:",
            f"`{peer.call}`. The profile's bytes and the package's: {state}.",
            "",
            *(f"- `{rule}`: {says}" for rule, says in differing_rules(peer.profile)),
            "",
            "| data | scales differ | codes differ | decoded values differ | because |",
            "|---|---|---|---|---|",
            *(
                f"| {' | '.join((agreement.data, *shares_of(agreement), reasons(agreement) or 'equal'))} |"
                for agreement in comparison.agreements
            ),
        ]
    )


def _counts(scales: int, codes: int) -> str:
    parts = [f"{count:,} {what}{'s' * (count != 1)}" for count, what in ((scales, "scale"), (codes, "code")) if count]
    return ", ".join(parts)


def _share(count: int, total: int) -> str:
    if count == 0:
        return "0"
    return f"{count / total:.2%}" if count / total >= 1e-4 else f"{count / total:.1e}"
