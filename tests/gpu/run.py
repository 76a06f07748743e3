"""Run the GPU tests in several processes on one GPU: python3 tests/gpu/run.py [pytest options].

They share Triton's cache and claim one test after the other. Each process's report follows when it ends; the exit
status is that of the worst.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
NOTHING_COLLECTED = 5
MOST_PROCESSES = 16  # each needs some GiB of GPU memory


def run(claims: str, options: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider", f"--claims={claims}"]
    return subprocess.run([*command, *options], capture_output=True, text=True, cwd=FOLDER.parent.parent)


def main(options: list[str]) -> int:
    count = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1))
    start, worst = time.monotonic(), 0
    with TemporaryDirectory() as claims, ThreadPoolExecutor(count) as pool:
        for done in as_completed([pool.submit(run, claims, options) for _ in range(count)]):
            result = done.result()
            if result.returncode == NOTHING_COLLECTED:
                continue
            worst = max(worst, result.returncode)
            print((result.stdout if result.returncode else result.stdout.splitlines()[-1]) + result.stderr, flush=True)
    print(f"{'FAILED' if worst else 'passed'}: {count} processes, {time.monotonic() - start:.0f} s")
    return worst


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
