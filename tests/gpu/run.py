"""Run the GPU tests in several processes on each GPU: python3 tests/gpu/run.py [pytest options].

They share Triton's cache and claim one test after the other; each sees all GPUs, another one first. Each process's
report follows when it ends, then the slowest tests, what each file took and what was skipped; the exit status is that
of the worst, and 1 if nothing ran: without a GPU, or if every test was skipped. A run that is stopped (SIGTERM, ctrl-C)
names what was running.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
NOTHING_COLLECTED = 5
MOST_PROCESSES = 16  # on one GPU: each needs some GiB of its memory
SLOWEST = 8


def start(claims: str, output: Path, gpus: list[str], options: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider", f"--claims={claims}"]
    how = {"cwd": FOLDER.parent.parent, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}}
    with output.open("w") as file:
        return subprocess.Popen([*command, *options], stdout=file, stderr=subprocess.STDOUT, **how)


def turned(gpus: list[str], index: int) -> list[str]:
    """Give all GPUs in the order in which process `index` sees them: the first is where its tests run."""
    first = index % len(gpus)
    return gpus[first:] + gpus[:first]


def times(claims: str) -> list[tuple[float, str]]:
    """Give (seconds, test) of what has run, infinity for what runs, longest first."""
    return sorted(((float(seconds or "inf"), test) for test, seconds, *_ in records(claims)), reverse=True)


def records(claims: str) -> list[list[str]]:
    """Give [test, seconds, "ran" or "skipped"] of what has run, and [test, ""] for what runs."""
    lines = [line for record in Path(claims).iterdir() for line in record.read_text().splitlines()]
    return [line.split("\t") for line in lines]


def by_file(ran: list[tuple[float, str]]) -> list[str]:
    """Say for every file how many of its tests ended and their seconds, longest first."""
    files: dict[str, list[float]] = {}
    for seconds, test in ran:
        if seconds < float("inf"):
            files.setdefault(Path(test.partition("::")[0]).stem, []).append(seconds)
    ordered = sorted(files.items(), key=lambda one: -sum(one[1]))
    return [f"{name} {len(seconds)} in {sum(seconds):.0f} s" for name, seconds in ordered]


def skipped(claims: str) -> list[str]:
    """Name the tests that were skipped, as one is that needs two GPUs where there is one."""
    return sorted(test for test, _, *outcome in records(claims) if outcome == ["skipped"])


def nothing_ran(claims: str) -> str:
    """Say why no test ran, "" if one did or runs."""
    found = records(claims)
    if any(outcome != ["skipped"] for _, _, *outcome in found):
        return ""
    return f"all {len(found)} tests were skipped" if found else "no test was collected"


def visible() -> list[str]:
    """Name the GPUs as CUDA_VISIBLE_DEVICES does; none where torch sees none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] or [str(index) for index in range(count)]


def wait(processes: dict[subprocess.Popen, Path]) -> int:
    """Print each process's report when it ends; give the worst status."""
    worst, left = 0, dict(processes)
    while left:
        for process in [process for process in left if process.poll() is not None]:
            text, status = left.pop(process).read_text(), process.returncode
            if status != NOTHING_COLLECTED:
                worst = max(worst, abs(status))
                print(text if status or not text else text.splitlines()[-1], flush=True)
        time.sleep(0.1)
    return worst


def main(options: list[str]) -> int:
    gpus = visible()
    if not gpus:
        print("FAILED: nothing ran: torch sees no GPU; `make test` runs the tests that need none")
        return 1
    count = max(1, min(MOST_PROCESSES * len(gpus), (os.cpu_count() or 1) - 1))
    begin, worst = time.monotonic(), 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with TemporaryDirectory() as claims, TemporaryDirectory() as reports:
        outputs = [Path(reports, str(index)) for index in range(count)]
        processes = {
            start(claims, output, turned(gpus, index), options): output for index, output in enumerate(outputs)
        }
        try:
            worst = wait(processes)
        except KeyboardInterrupt:
            for stop in (signal.SIGTERM, signal.SIGINT):  # make passes on what was sent to all
                signal.signal(stop, signal.SIG_IGN)
            for process, output in processes.items():
                if process.poll() is None:
                    process.kill()
                    print(output.read_text(), flush=True)
        finally:
            ran, missing = times(claims), nothing_ran(claims)
            for seconds, test in ran[:SLOWEST]:
                print("still running" if seconds == float("inf") else f"{seconds:.0f} s", test, flush=True)
            for test in skipped(claims):
                print("skipped", test, flush=True)
            print("; ".join(by_file(ran)), flush=True)
            print(f"{len(ran)} tests, {sum(s for s, _ in ran if s < float('inf')):.0f} s in all", flush=True)
    why = f"nothing ran: {missing}; " if missing else ""
    worst = worst or int(bool(missing))
    print(
        f"{'FAILED' if worst else 'passed'}: {why}{count} processes, {len(gpus)} GPUs, {time.monotonic() - begin:.0f} s"
    )
    return worst


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
