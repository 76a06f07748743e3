"""`python -m bench` runs the benchmark, `python -m bench plot FILE …` draws results."""

import sys

from bench.run import main

try:
    status = main(sys.argv[1:])
except ValueError as error:
    print(f"bench: {error}", file=sys.stderr)
    status = 2
sys.exit(status)
