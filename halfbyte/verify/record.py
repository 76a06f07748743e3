"""What verification found: one record per check, and how a group of them is summed up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

Outcome = Literal["passed", "failed", "not run"]

PASSED, FAILED, NOT_RUN = get_args(Outcome)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: its group, its name, how it ended and what was seen."""

    group: str
    name: str
    outcome: Outcome
    detail: str = ""
    seconds: float = field(default=0.0, compare=False)


Finding = tuple[str, str, Callable[[], "str | None"]]
"""(group, name, function): the function returns None if all is well, else what is wrong."""


def run_checks(findings: Iterable[Finding]) -> list[Check]:
    """Run checks one by one; an exception is a failure of its check, not of the run."""
    checks = []
    for group, name, function in findings:
        start = time.perf_counter()
        try:
            problem = function()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:300]
        outcome, seconds = FAILED if problem else PASSED, time.perf_counter() - start
        checks.append(Check(group=group, name=name, outcome=outcome, detail=problem or "", seconds=seconds))
    return checks


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast one operation ran: its rate and the share of the ceiling in the same unit."""

    name: str
    microseconds: float
    rate: float
    unit: Literal["TB/s", "TFLOP/s"]
    share: float


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Everything `halfbyte verify` prints."""

    machine: dict[str, str]
    checks: list[Check]
    fingerprint: str
    ceilings: str = ""
    speeds: list[Speed] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.outcome == FAILED]

    def groups(self) -> dict[str, list[Check]]:
        """Return the checks by group, in the order they ran."""
        groups: dict[str, list[Check]] = {}
        for check in self.checks:
            groups.setdefault(check.group, []).append(check)
        return groups

    def as_json(self) -> dict:
        """Return plain values; checks that passed are counted, the others listed."""
        values = asdict(self)
        values["checks"] = [asdict(check) for check in self.checks if check.outcome != PASSED]
        counts = {name: sum(c.outcome == PASSED for c in group) for name, group in self.groups().items()}
        seconds = {name: round(sum(c.seconds for c in group), 1) for name, group in self.groups().items()}
        return values | {
            "passed": self.passed,
            "passed_checks": counts,
            "process_seconds": seconds,
            "row": row(self),
        }


def text(report: Verification) -> str:
    """Return the table for people."""
    lines = [f"{name:<12}{value}" for name, value in report.machine.items()]
    lines += ["", f"{'what':<34}{'checks':>7}  result"]
    for name, group in report.groups().items():
        ran = [check for check in group if check.outcome != NOT_RUN]
        failed = [check for check in ran if check.outcome == FAILED]
        result = f"{len(failed)} FAILED" if failed else "passed" if ran else f"not run: {group[0].detail}"
        lines.append(f"{name:<34}{len(ran):>7}  {result}")
        lines += [f"    {check.name}: {check.detail}" for check in failed[:8]]
        if len(failed) > 8:
            lines.append(f"    and {len(failed) - 8} more")
    if report.speeds:
        lines += ["", f"ceilings    {report.ceilings}", "", f"{'speed':<34}{'µs':>9}{'rate':>16}{'of ceiling':>12}"]
        for s in report.speeds:
            lines.append(f"{s.name:<34}{s.microseconds:>9.1f}{f'{s.rate:.4g} {s.unit}':>16}{s.share:>11.0%}")
    lines += [
        "",
        f"fingerprint {report.fingerprint}",
        f"{'PASSED' if report.passed else 'FAILED'} in {report.seconds:.0f} s",
    ]
    return "\n".join(lines)


ROW_HEAD = "| machine | versions | bytes | hardware FP4 | GEMM | fingerprint | speed |\n|---|---|---|---|---|---|---|"


def row(report: Verification) -> str:
    """Return the machine's row in docs/hardware.md."""
    groups = report.groups()

    def state(*names: str) -> str:
        group = [check for name in names for check in groups.get(name, [])]
        if any(check.outcome == FAILED for check in group):
            return "**fails**"
        passed = sum(check.outcome == PASSED for check in group)
        return f"{passed} equal" if passed else "not run"

    emulated = [name for name in groups if name not in (HARDWARE_CAST, NATIVE_GEMM, GEMM)]
    speed = ", ".join(f"{s.name} {s.rate:.3g} {s.unit} ({s.share:.0%})" for s in report.speeds) or "not measured"
    machine = report.machine
    cells = (
        machine["device"],
        machine["versions"],
        state(*emulated),
        f"cast {state(HARDWARE_CAST)}, scaled_mm {state(NATIVE_GEMM)}",
        state(GEMM).replace("equal", "within tolerance"),
        f"`{report.fingerprint}`",
        speed,
    )
    return f"| {' | '.join(cells)} |"


HARDWARE_CAST = "hardware FP4 cast"
NATIVE_GEMM = "scaled_mm on FP4 tensor cores"
GEMM = "gemm_nt against fp64"
