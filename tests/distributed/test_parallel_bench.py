"""bench.parallel on two ranks: every way runs, and the bytes that it counts are those counted by hand."""

import math

import parallel_bench_checks as checks
import pytest
import ranks

from bench import parallel

GATHERED = checks.LAYERS * 2 * (checks.TOKENS // 2) * 128
"""Elements of x that come from the other rank in a forward of nano: for q/k/v and for gate/up, 128 wide."""
IN_BF16 = {
    f"{stage} {name} bfloat16": 2 * GATHERED
    for stage in ("forward", "backward")
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
}
ROOM = checks.LAYERS * int(parallel.SPARE * checks.TOKENS * 2 / 2)
"""Copies that come from the other rank in a forward of moe-tiny, 64 wide, with a capacity."""


@pytest.fixture(scope="module")
def found() -> dict:
    made = ranks.run(2, checks.lines, seconds=200)[0]
    return {(line["case"], line["way"], line["recipe"], line["has_capacity"]): line for line in made}


def large(line: dict) -> dict[str, int]:
    """Return the bytes of all but numbers, such as amaxes and counts of tokens."""
    return {name: count for name, count in line["arriving_bytes"].items() if count > 1000}


def test_every_way_is_timed(found):
    assert found.keys() == set(parallel.WAYS)
    for how, line in found.items():
        assert all(math.isfinite(line[name]) and line[name] > 0 for name in ("step_ms", "host_ms", "of_bf16")), how
        assert line["awaited_ms"] >= line["host_ms"] and ("dropped" in line) == line["has_capacity"], how
        assert len(line["steps_ms"]) == len(line["rounds_ms"]) == checks.ROUNDS, how
        assert (line["arriving_bytes"] == {}) == (line["way"] == parallel.ALONE), how


def test_bytes_of_layers(found):
    for recipe in ("bf16", "nvfp4"):
        assert large(found[parallel.DENSE, "values", recipe, False]) == IN_BF16
    sums = {name: count for name, count in IN_BF16.items() if "reduce_scatter" in name}
    codes = GATHERED // 2 + GATHERED // 16
    as_codes = {"forward all_gather_into_tensor uint8": codes, "backward all_gather_into_tensor uint8": 3 * codes}
    assert large(found[parallel.DENSE, "codes", "nvfp4", False]) == sums | as_codes


def test_bytes_of_experts(found):
    way, values = "all_to_all_single", ROOM * 64 * 2
    both = {f"{stage} {way} bfloat16": 2 * values for stage in ("forward", "backward")}
    for recipe in ("bf16", "nvfp4"):
        assert large(found[parallel.MIXTURE, "plain", recipe, True]) == both
    sent = {f"forward {way} uint8": ROOM * (32 + 4 + 4), f"forward {way} bfloat16": values}
    assert large(found[parallel.MIXTURE, "nvfp4", "nvfp4", True]) == both | sent


def test_ratios_are_to_bf16_shared_alike(found):
    for (case, way, recipe, room), line in found.items():
        ways = {"codes": "values", "nvfp4": "plain"}
        assert line["of_bf16"] == line["step_ms"] / found[case, ways.get(way, way), "bf16", room]["step_ms"]
        alone = [found[case, parallel.ALONE, name, False]["step_ms"] for name in (recipe, "bf16")]
        assert line["alone_of_bf16"] == alone[0] / alone[1]
