"""The tables of docs/agreement.md: `python -m bench.agreement` prints them, `--write` renews the page.

The page holds a table between `<!-- agreement: NAME -->` and `<!-- /agreement -->`. A package that does not run here
keeps the table that it has, which says of which day and version it is; why it did not run is printed.
tests/clients/test_agreement.py compares the page with what is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from halfbyte.verify.against import agreement_table
from halfbyte.verify.agreement import compare_with
from halfbyte.verify.peers import PEERS, quantizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "agreement.md"
DAY = re.compile(r" on \d{4}-\d\d-\d\d")
BLOCK = re.compile(r"<!-- agreement: ([\w-]+) -->\n(.*?)<!-- /agreement -->", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Print the tables, or renew the page; the exit status is 1 if a package's bytes are not its profile's."""
    parser = argparse.ArgumentParser(prog="python -m bench.agreement", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew docs/agreement.md")
    for name in (name for name, peer in PEERS.items() if peer.file):
        parser.add_argument(f"--{name}", type=Path, help=f"the folder that the wheel of {name} was unpacked into")
    options = vars(parser.parse_args(arguments))
    tables, wrong = {}, []
    for name, peer in PEERS.items():
        try:
            comparison = compare_with(peer, *quantizer(peer, options.get(name)))
        except ValueError as error:
            print(f"{name} did not run: {error}", file=sys.stderr)
            continue
        tables[name] = agreement_table(comparison)
        wrong += [] if comparison.is_explained else [name]
    if options["write"]:
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    else:
        print("\n\n".join(tables.values()))
    if wrong:
        print(f"not the bytes of their profiles: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def renewed(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with the tables that there are; one of which the day alone is new stays as it is.

    Raises:
        ValueError: the page has no place for one.
    """
    places = {match.group(1) for match in BLOCK.finditer(page)}
    missing = [name for name in tables if name not in places]
    if missing:
        raise ValueError(f"{PAGE.name} has no place for {', '.join(missing)}: add <!-- agreement: NAME --> to it")

    def one(match: re.Match[str]) -> str:
        body = f"{tables[match.group(1)]}\n" if match.group(1) in tables else match.group(2)
        if DAY.sub("", body) == DAY.sub("", match.group(2)):
            body = match.group(2)
        return f"<!-- agreement: {match.group(1)} -->\n{body}<!-- /agreement -->"

    return BLOCK.sub(one, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
