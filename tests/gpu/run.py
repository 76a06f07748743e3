"""Run the GPU tests in several processes on one GPU: python3 tests/gpu/run.py [pytest options].

They share Triton's cache. Each process's report follows when it ends; the exit status is that of the worst.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

FOLDER = Path(__file__).parent
NOTHING_COLLECTED = 5


def run(share: int, count: int, options: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider", f"--share={share}/{count}"]
    return subprocess.run([*command, *options], capture_output=True, text=True, cwd=FOLDER.parent.parent)


def main(options: list[str]) -> int:
    count = max(1, min(12, (os.cpu_count() or 1) - 2))
    start, worst = time.monotonic(), 0
    with ThreadPoolExecutor(count) as pool:
        for done in as_completed([pool.submit(run, share, count, options) for share in range(count)]):
            result = done.result()
            if result.returncode == NOTHING_COLLECTED:
                continue
            worst = max(worst, result.returncode)
            print((result.stdout if result.returncode else result.stdout.splitlines()[-1]) + result.stderr, flush=True)
    print(f"{'FAILED' if worst else 'passed'}: {count} processes, {time.monotonic() - start:.0f} s")
    return worst


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
