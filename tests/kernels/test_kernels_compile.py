"""Every kernel is launched by a recorded call on every target where it may run, and what does not fit is reported.

The kernels here are defined for the interpreter, so recordings are made in a process of their own. `make test-targets`
compiles them.
"""

import ast
import datetime
import json
import os
import subprocess
import sys
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halfbyte import kernels
from halfbyte.kernels import record, scenario_values
from halfbyte.kernels.device import magnitudes
from halfbyte.kernels.gemm import route
from halfbyte.kernels.target import assumed, nvidia, target_of
from halfbyte.verify import matrix

ONLY = {
    **dict.fromkeys(("gemm_tma_kernel", "rows_tma_kernel", "split_tma_kernel"), ("sm_90", "sm_100", "sm_103")),
    "clear_tail_kernel": ("sm_90", "sm_100", "sm_103", "sm_120"),  # behind torch's grouped GEMM
    "e2m1_pair_kernel": ("sm_100", "sm_103", "sm_120"),
    "quantize_neighbours_kernel": tuple(t for t in record.TARGETS if t.startswith("sm_")),  # quick errors are PTX
}
"""On which targets a kernel is launched, where it is not launched on all."""


def run(script):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@lru_cache
def launched():
    """Return the places of the kernels that the source launches, as kernel[grid](...), and of those it defines."""
    found, defined = set(), set()
    root = Path(kernels.__file__).parent
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = node.func.value
                found.add(kernel.attr if isinstance(kernel, ast.Attribute) else kernel.id)
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                defined.add((".".join(path.relative_to(root).with_suffix("").parts), node.name))
    return found, defined


RECORDED = """
import json
from halfbyte.kernels import record
for name, target in record.TARGETS.items():
    kernels = {one.launch.kernel for one in record.recorded(target)}
    print(json.dumps([name, sorted((kernel.module.split(".", 2)[-1], kernel.fn.__name__) for kernel in kernels)]))
"""


@pytest.mark.full  # `make test-targets` runs it
def test_every_kernel_is_recorded_on_every_target_where_it_may_run():
    found, defined = launched()
    entries = {(module, name) for module, name in defined if name in found}
    assert entries == {(module, name) for module, name in defined if name.endswith("_kernel")} and len(entries) >= 39
    recorded = {target: set(map(tuple, names)) for target, names in map(json.loads, run(RECORDED).splitlines())}
    assert list(recorded) == list(record.TARGETS)
    for target, names in recorded.items():
        expected = {entry for entry in entries if target in ONLY.get(entry[1], record.TARGETS)}
        assert names == expected, target


def test_what_is_verified_is_recorded():
    assert set(matrix.ALL_SPECS.values()) <= {*scenario_values.TUNED, *scenario_values.OTHERS}
    pairs = {*matrix.PAIRS.values(), *matrix.LONG_PAIRS.values()}
    assert pairs <= {*scenario_values.TUNED_PAIRS, *scenario_values.OTHER_PAIRS}


ONE_LAUNCH = """
import json, torch
from halfbyte.kernels import backend, record
from halfbyte.kernels.scenario_values import misaligned, tensor
from halfbyte.kernels.target import target_of
from triton.runtime.jit import JITFunction
import pytest
run = JITFunction.run
for target in ("sm_80", "sm_120", "gfx942"):
    for x in (tensor(256, 512), misaligned(256, 512)):
        with record.recording(record.TARGETS[target]) as launches:
            backend.finite_amax(x)
        (launch,) = launches
        names = list(launch.signature)
        known = {names[place[0]]: repr(getattr(value, "value", value)) for place, value in launch.constants.items()}
        divisible = [names[place[0]] for place, known_of in launch.attributes.items() if record.DIVISIBLE in known_of]
        assert ("*bf16:16" in launch.name) == (x.data_ptr() % 16 == 0)
        print(json.dumps([launch.kernel.fn.__name__, launch.signature, known, divisible, launch.options["num_warps"]]))
assert JITFunction.run is run
with pytest.raises(ValueError, match="device meta.*TRITON_INTERPRET=1"):
    target_of(x.device)
"""


def test_a_launch_is_specialized_as_triton_does_it():
    cases = product(("False", "True", "False"), (True, False))  # of sm_80, sm_120 and gfx942
    for line, (overlap, aligned) in zip(run(ONE_LAUNCH).splitlines(), cases, strict=True):
        name, signature, known, divisible, warps = json.loads(line)
        assert name == "amax_rows_kernel" and warps == 8
        pointers = {key: kind for key, kind in signature.items() if kind.startswith("*")}
        assert pointers == {"x_ptr": "*bf16", "out_ptr": "*fp32", "space_ptr": "*i32"}
        # One row of 131,072 columns that lie together: 1 is a constant, 131,072 divisible by 16.
        assert known["rows"] == known["stride_c"] == "1" and signature["cols"] == "i32"
        assert known["PACKED"] == str(aligned) and known["OVERLAP"] == overlap
        assert ("x_ptr" in divisible) == aligned and {"out_ptr", "cols", "stride_r"} <= set(divisible)


UNFIT = """
from dataclasses import replace
from halfbyte.kernels import backend, record
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.kernels.scenario_values import places, tensor
from halfbyte.sides import Side
from halfbyte.spec import NVFP4
from triton import knobs
knobs.compilation.always_compile = True  # Triton's cache does not know what has_ptx answered
STOCHASTIC = NVFP4(rounding="stochastic")
with record.recording(record.TARGETS["sm_80"]) as launches:
    backend.gemm_nt(Decoded(tensor(64, 128)), Decoded(tensor(64, 128)))
(launch,) = launches
names = list(launch.signature)
constants = {**launch.constants, **{(names.index(name),): size for name, size in (("BM", 64), ("BN", 64), ("BK", 128))}}
wide = replace(launch, constants=constants, options={**launch.options, "num_stages": 7})
broken = replace(launch, constants={**constants, (names.index("BM"),): 63})
found = [record.Recorded(one, record.TARGETS["sm_80"], "a call", True) for one in (launch, wide, broken)]
for name in record.AMD:
    with record.recording(record.TARGETS[name]) as launches:
        backend.quantize_row_col(tensor(256, 512), Side(STOCHASTIC, **places(STOCHASTIC)), None)
    found += [record.Recorded(one, record.TARGETS[name], "a call", True) for one in launches]
for one, outcome in record.compile_all(found, 2):
    print(found.index(one), one.problem(outcome), outcome if one.target.ptx else one.launch.options["backend_name"])
"""


def test_launches_that_do_not_fit_or_compile_are_reported():
    first, *others = sorted(line for line in run(UNFIT).splitlines() if line[:2].strip().isdecimal())
    assert first.startswith("0 None Usage(")
    # Random bytes, conversions and the packing of codes are all PTX on NVIDIA's.
    assert others[2:] and all(line[2:] == "None hip" for line in others[2:]), others[2:]
    assert "shared memory" in others[0] and "gemm_pointer_kernel" in others[0] and "as in a call" in others[0]
    assert "does not compile" in others[1]


NARROW = """
import json
from halfbyte.kernels import fused, record
from halfbyte.kernels.scenario_values import tensor
from halfbyte.spec import NVFP4, Hadamard
RHT = NVFP4(rotation=Hadamard())
CASES = (  # of a sum or not, centered, row, col, columns
    *((name, True, False, "tensor", RHT, 512) for name in ("sm_90", "sm_100", "sm_103")),
    *((name, True, True, "", None, 512) for name in ("sm_90", "sm_100", "sm_103")),
    *((name, False, True, "tensor", None, 1024) for name in ("sm_90", "sm_89")),
)
for name, is_sum, centered, row, col, cols in CASES:
    x, weight = tensor(4096, cols), tensor(cols)
    with record.recording(record.TARGETS[name]) as launches:
        fused.norm_with_amaxes(x, (weight, None), (1e-5, centered, x.dtype), row, col, None, x if is_sum else None)
    (launch,) = launches
    used = record.compile_launch(launch, record.TARGETS[name])
    print(json.dumps([name, launch.options["maxnreg"], used.stack_bytes]))
"""


@pytest.mark.full  # `make test-targets` runs it
def test_narrow_norms_do_not_spill():
    found = [json.loads(line) for line in run(NARROW).splitlines()]
    assert [spilled for *_, spilled in found] == [0] * 8
    assert [cap for name, cap, _ in found if name == "sm_90"] == [None] * 3, "timed without one"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (record.Usage("sm_90", 255, 0, 227 << 10), None),
        (record.Usage("sm_90", 255, 8, 0), "spills 8 bytes"),
        (record.Usage("sm_120", 64, 0, (99 << 10) + 16), "limit is 101376"),
        (record.Usage("gfx942", 64, 0, (64 << 10) + 16), "limit is 65536"),
    ],
)
def test_limits(usage, expected):
    problem = usage.problem()
    assert problem is None if expected is None else expected in problem


class Kernel:
    def __init__(self, name):
        self.fn = SimpleNamespace(__name__=name)


kernel_named = lru_cache(Kernel)


def one(name, target, tuned, scenario="a call"):
    launch = SimpleNamespace(kernel=kernel_named(name), name=name)
    return record.Recorded(launch, record.TARGETS[target], scenario, tuned)


def test_only_tuned_launches_may_not_spill():
    spilling = record.Usage("sm_90", 255, 8, 0)
    assert "spills 8 bytes" in one("k", "sm_90", True).problem(spilling)
    assert one("k", "sm_90", False).problem(spilling) is None
    assert one("k", "gfx950", True).problem(record.Usage("gfx950", 255, 8, 0)) is None, "tuned for NVIDIA's"


def test_known_spills_do_not_grow():
    (name, target), most = next(iter(record.SPILLS.items()))
    tuned = one(name, target, True)
    assert tuned.problem(record.Usage(target, 9, most, 0)) is None
    assert "spills" in tuned.problem(record.Usage(target, 9, most + 4, 0))
    assert "spills" in one(name, "sm_90", True).problem(record.Usage("sm_90", 9, most, 0))


def test_a_sample_has_every_kernel_on_every_target():
    targets = ("sm_80", "sm_90", "gfx950")
    found = [one(name, target, n % 4 == 0, f"{n}") for name in "abc" for target in targets for n in range(20)]
    chosen = record.sample(found, 20)
    assert len(chosen) == 20 == len({id(r) for r in chosen})
    for several in (chosen, record.sample(found, 12)):
        assert len({(r.launch.name, r.target.name) for r in several}) == 9
        assert len({(r.launch.name, r.tuned) for r in several}) == 6
    assert [r.target.ptx for r in record.sample(found, 40)[12:]] == [True] * 28
    assert chosen == record.sample(found, 20) != record.sample(found, 20, seed=1)


def test_three_days_compile_the_sample_and_each_every_kernel():
    targets = ("sm_80", "sm_90", "gfx950")
    found = [one(name, target, True) for name in "abc" for target in targets]
    found += [one("d", target, True) for target in targets[:2]] + [one("e", "sm_90", True)]
    days = [record.of_the_day(found, datetime.date(2026, 12, day)) for day in (29, 30, 31)]
    assert {id(r) for third in days for r in third} == {id(r) for r in found}
    for third in days:
        assert {r.launch.name for r in third} == set("abcde")
        assert {r.target.name for r in third} == set(targets)
        assert len(third) < 7
    everyday = [r for r in days[0] if r in days[1] and r in days[2]]
    assert everyday == found[-1:], "a kernel of one launch is compiled every day"


def test_failures_are_counted(monkeypatch, capsys):
    found = {"sm_80": [one("a", "sm_80", True)], "gfx950": [one("b", "gfx950", False)]}
    monkeypatch.setattr(record, "recorded", lambda target: found[target.name])
    usage = record.Usage("sm_80", 9, 4, 0)
    monkeypatch.setattr(record, "compile_all", lambda chosen, jobs: ((r, usage) for r in chosen))
    assert record.main(["sm_80", "gfx950", "--all"]) == 1
    printed = capsys.readouterr().out
    assert "spills 4 bytes (9 registers): a, as in a call" in printed and "2 of 2 compiled, 1 unfit" in printed
    assert "most bytes spilled on sm_80: a 4\nmost bytes spilled on gfx950: b 4\n" in printed


def test_an_unknown_target_is_named(capsys):
    with pytest.raises(SystemExit):
        record.main(["sm_90", "gfx90"])
    assert "gfx90: launches are recorded for sm_80, " in capsys.readouterr().err


def test_a_target_is_assumed_for_a_while():
    device = torch.device("cpu")
    with assumed(record.TARGETS["sm_103"]):
        assert target_of(device) == nvidia(103, 148)
        assert magnitudes.parts_of(2960, 1, 2, device) == 296
        assert route.tma_tiles(target_of(device)) == route.TMA_TILES[1:]
    with assumed(record.TARGETS["gfx942"]):
        assert magnitudes.parts_of(6080, 1, 2, device) == 608 and route.tma_tiles(target_of(device)) == ()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
def test_the_interpreter_records_nothing():
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1: .* unset it"), record.recording(record.TARGETS["sm_90"]):
        pass


READS = """
import re
import torch, triton
from triton.compiler import ASTSource
from halfbyte.kernels import record
from halfbyte.kernels.amax.several import greatest_amax

target = record.TARGETS["sm_90"]
for dtype in (torch.bfloat16, torch.float32):
    with record.recording(target) as launches:
        greatest_amax([torch.empty(rows, 776, dtype=dtype, device="meta") for rows in (37, 5, 5)])
    (launch,) = launches
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    text = triton.compile(source, target=record.gpu(target), options=launch.options).asm["ptx"]
    print(launch.kernel.fn.__name__, len(re.findall(r"ld\\.global\\.v4\\.b32", text)))
"""


def test_siblings_are_read_16_bytes_at_a_time():
    """Of each of three tensors four times: 4096 words by 256 threads. The lengths are not specialized."""
    assert run(READS).split("\n")[:2] == ["amax_several_kernel 12"] * 2
