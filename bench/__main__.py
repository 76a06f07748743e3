"""`python -m bench` runs the benchmark, `python -m bench plot FILE …` draws results."""

import sys

from bench.run import main

sys.exit(main(sys.argv[1:]))
