"""The benchmark: cases with their bars, run beside the machine's own ceilings. `python -m bench --help` says how."""
