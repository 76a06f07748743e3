"""What `explain` says is what is launched: kernel, programs and every constant, and its mistakes name a remedy."""

import inspect
import os
import subprocess
import sys

import pytest
import quantize_checks as checks
import torch

import halfbyte as hb
from halfbyte import cli
from halfbyte.kernels import backend, launch
from halfbyte.kernels.amax import plain
from halfbyte.kernels.quantize.one import quantize_side
from halfbyte.layout import Operand
from halfbyte.ops.explain import read_spec
from halfbyte.sides import Side, both_sides


class Recorder:
    def __init__(self):
        self.launches = []

    def launched(self, launched):
        signature = inspect.signature(launched.kernel.fn).parameters
        constexprs = {name for name, p in signature.items() if "constexpr" in str(p.annotation)}
        constants = {name: value for name, value in launched.arguments.items() if name in constexprs}
        constants |= {name: launched.options[name] for name in ("num_warps", "num_stages") if name in launched.options}
        constants = {name: getattr(value, "value", value) for name, value in constants.items()}
        self.launches.append((launched.kernel.__name__, launched.grid, constants))


def x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


PLAIN, RHT, TILE = hb.NVFP4(), hb.NVFP4(rotation=hb.Hadamard()), hb.NVFP4(block=(16, 16))
OFFSETS = torch.tensor([40, 40, 64])


def quantized(shape, *specs):
    return lambda: backend.quantize_row_col(x(*shape), *both_sides(*specs, **checks.draws("cpu")))


def product():
    a, b = (quantize_side(x(n, 64), Side(PLAIN)) for n in (40, 24))
    recorder = Recorder()
    with launch.watching(recorder):
        backend.gemm_nt(*(backend.decode(Operand(side, PLAIN, 64)) for side in (a, b)))
    return recorder.launches


def stored():
    blocks = quantize_side(x(48, 160), Side(PLAIN))
    recorder = Recorder()
    with launch.watching(recorder):
        backend.dequantize(Operand(blocks, PLAIN, 160), torch.bfloat16)
    return recorder.launches


def grouped_product():
    tokens, _ = backend.grouped_quantize_row_col(x(64, 64), OFFSETS, Side(PLAIN), None)
    experts, _ = backend.grouped_quantize_row_col(x(3, 48, 64), None, Side(TILE), None)
    recorder = Recorder()
    with launch.watching(recorder):
        sides = Operand(tokens, PLAIN, 64), Operand(experts, TILE, 64)
        backend.grouped_gemm_nt(*sides, OFFSETS, 64, torch.empty(64, 48, dtype=torch.bfloat16))
    return recorder.launches


CALLS = {
    "small": ((32, 64), (PLAIN, None), {}, quantized((32, 64), PLAIN, None)),
    "column": ((80, 256), (None, RHT), {}, quantized((80, 256), None, RHT)),
    "strips": ((16, 1040), (TILE, TILE), {}, quantized((16, 1040), TILE, TILE)),
    "small pair": ((64, 256), (PLAIN, RHT), {}, quantized((64, 256), PLAIN, RHT)),
    "pair": ((48, 96), (PLAIN, hb.MXFP8()), {}, quantized((48, 96), PLAIN, hb.MXFP8())),
    "apart": ((48, 128), (PLAIN, hb.NVFP4(rotation=hb.Hadamard(size=64))), {},
              quantized((48, 128), PLAIN, hb.NVFP4(rotation=hb.Hadamard(size=64)))),
    "amax": ((48, 96), (PLAIN, RHT), {"op": "amax"}, lambda: plain.row_col_amax(x(48, 96), PLAIN, RHT, None)),
    "groups": ((64, 96), (PLAIN, RHT), {"groups": 3},
               lambda: backend.grouped_quantize_row_col(x(64, 96), OFFSETS, Side(PLAIN), Side(RHT))),
    "experts": ((3, 16, 256), (PLAIN, None), {"op": "grouped_experts"},
                lambda: backend.grouped_quantize_row_col(x(3, 16, 256), None, Side(PLAIN), None)),
    "dequantize": ((48, 160), (PLAIN,), {"op": "dequantize"}, stored),
    "gemm": ((40, 24, 64), (PLAIN, PLAIN), {}, product),
    "grouped gemm": ((64, 48, 64), (PLAIN, TILE), {"groups": 3}, grouped_product),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_said_is_launched(name):
    shape, specs, options, call = CALLS[name]
    said = hb.ops.explain(shape, *specs, **options, target="interpreter").steps
    recorder = Recorder()
    with launch.watching(recorder):
        result = call()
    launches = recorder.launches if not isinstance(result, list) else result
    assert [(step.kernel, step.programs, step.constants) for step in said if step.programs] == launches


SCENARIOS = """
import sys
from halfbyte.kernels import record
from halfbyte.kernels.launch import Launched, rehearsing
from halfbyte.kernels.scenarios import scenarios
from halfbyte.kernels.target import assumed
from halfbyte.ops.explain import steps_of

unwrapped = lambda value: getattr(value, "value", value)
count = 0
for name in sys.argv[2:]:
    target = record.TARGETS[name]
    for scenario in list(scenarios(target))[:: int(sys.argv[1])]:
        with record.recording(target) as launches:
            scenario.call()
        with assumed(target), rehearsing() as events:
            scenario.call()
        said = [step for step in steps_of(events) if step.programs]
        assert [launch.kernel.__name__ for launch in launches] == [step.kernel for step in said], scenario.name
        for launch, step in zip(launches, said):
            names = list(launch.signature)
            places = [place for place in launch.constants if len(place) == 1]
            compiled = {names[place[0]]: unwrapped(launch.constants[place]) for place in places}
            for key, value in step.constants.items():
                assert value == (compiled[key] if key in compiled else launch.options[key]), (scenario.name, key)
        choices = {}  # what was chosen last for a kernel is what it was launched with
        for event in events:
            if not isinstance(event, Launched):
                choices[event.kernel] = event
            elif event.kernel.__name__ in choices:
                choice, count = choices[event.kernel.__name__], count + 1
                given = {**event.arguments, **event.options}
                for key, value in choice.constants.items():
                    assert unwrapped(given[key]) == unwrapped(value), (scenario.name, key)
print(count)
"""


def compare_scenarios(every, *targets):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCENARIOS, str(every), *targets]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_scenarios_launch_what_is_said():
    assert compare_scenarios(151, "sm_90") > 15


@pytest.mark.full
def test_all_scenarios_launch_what_is_said():
    assert compare_scenarios(1, "sm_80", "sm_90", "sm_100", "gfx942") > 20_000


def test_an_explanation_says_why_and_why_not():
    text = str(hb.ops.explain((16384, 2880), "nvfp4/1x16", target="sm_90"))
    assert text.startswith("quantize on sm_90\n1. amax_rows_kernel: ")
    assert "2. quantize_rows_kernel: " in text and "R=1, N=512" in text
    assert "not quantize_small_kernel: 47185920 values are not 1 to 16384" in text


def test_without_a_gpu_plain_torch_runs():
    (step,) = hb.ops.explain((64, 64), "nvfp4", target="cpu").steps
    assert "reference" in step.kernel and not step.programs and "GPU" in step.why
    if not torch.cuda.is_available():
        assert hb.ops.explain((64, 64), "nvfp4").target == "cpu"


def test_a_rehearsal_launches_nothing():
    kept = torch.zeros(32, 64, dtype=torch.bfloat16)
    with launch.rehearsing() as events:
        blocks = quantize_side(kept.fill_(3), Side(PLAIN))
        before = blocks.qdata.clone()
    assert len(events) == 2 and torch.equal(before, blocks.qdata)
    assert launch.rehearsal() is None
    recorder = Recorder()
    with launch.watching(recorder):
        quantize_side(kept, Side(PLAIN))
    assert len(recorder.launches) == 1


@pytest.mark.parametrize(
    ("word", "spec"),
    [
        ("nvfp4", PLAIN),
        ("nvfp4/16x16", TILE),
        (PLAIN.key, PLAIN),
        ("mxfp8/e5m2", hb.MXFP8(element="e5m2")),
        ("nvfp4.wgrad.b", hb.recipes.nvfp4().wgrad.b),
        ("bf16", None),
        (None, None),
        (RHT, RHT),
    ],
)
def test_words_for_specs(word, spec):
    assert read_spec(word) == spec


@pytest.mark.parametrize(
    ("shape", "specs", "options", "message"),
    [
        ((64, 64), ("nvfp5",), {}, "spec='nvfp5': give a key"),
        ((64, 64), ("nvfp4/3x3",), {}, "key='nvfp4/3x3"),
        ((64, 64), ("nvfp4.dgrad.ab",), {}, "spec='nvfp4.dgrad.ab': give a key"),
        ((64, 64), ("nvfp4.dgrad.",), {}, "spec='nvfp4.dgrad.': give a key"),
        ((64,), ("nvfp4",), {}, r"shape=\(64,\): quantize takes two"),
        ((64, -1), ("nvfp4",), {}, r"shape=\(64, -1\): -1 is no size; give an int, 0 or more"),
        ((64, 64.0), ("nvfp4",), {}, r"shape=\(64, 64.0\): 64.0 is no size"),
        ((1 << 40, 1 << 40), ("nvfp4",), {"target": "sm_90"}, "more than 2\\*\\*48 elements"),
        ((1 << 30, 8, 1 << 30), ("nvfp4", "nvfp4"), {"target": "sm_90"}, "more than 2\\*\\*48 elements"),
        ((64, 64, 64), ("nvfp4",), {}, "gemm takes two"),
        ((64, 64), (), {}, "one or two"),
        ((64, 64), ("nvfp4",), {"op": "sort"}, "op='sort': use one of quantize"),
        ((64, 64), ("nvfp4",), {"target": "sm_1"}, "target='sm_1': use one of sm_80"),
        ((64, 64), ("nvfp4",), {"groups": -1}, "groups=-1: grouped_quantize takes a number of groups, 1 or more"),
        ((64, 64), ("nvfp4",), {"op": "grouped_quantize"}, "groups=0: grouped_quantize takes a number of groups"),
        ((0, 16, 16), ("nvfp4",), {"op": "grouped_experts", "target": "sm_90"}, r"shape=\(0, 16, 16\): .* one expert"),
        ((64, 64), ("nvfp4",), {"target": ["sm_90"]}, r"target=\['sm_90'\]: use one of sm_80"),
        ((64, 64), ("nvfp4",), {"op": "amax", "groups": 2}, "groups=2: amax takes none"),
        ((64, 64), ("bf16",), {"op": "dequantize", "target": "sm_90"}, "spec=bf16"),
        ((64, 64), ("bf16",), {"op": "dequantize", "target": "cpu"}, "spec=bf16"),
        ((64, 64), ("nvfp4/",), {}, "spec='nvfp4/': "),
        ((64, 64), ("nvfp4", "mxfp8"), {"op": "dequantize", "target": "sm_90"}, "dequantize takes one"),
        ((64, 64), ("nvfp4", "nvfp4", "nvfp4"), {"target": "sm_90"}, "quantize takes one or two"),
    ],
)
def test_mistakes(shape, specs, options, message):
    with pytest.raises(ValueError, match=message):
        hb.ops.explain(shape, *specs, **options)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize(
    "shape, spec, options, message",
    [
        ((64, 64), 3, {}, "spec=3: give hb.NVFP4"),
        ((64, 64), torch.bfloat16, {}, "spec=torch.bfloat16: give hb.NVFP4"),
        ((64, 64), hb.NVFP4, {}, "spec=<class .*NVFP4'>: give hb.NVFP4"),
        ((64, 64), hb.recipes.nvfp4(), {}, "a recipe has six operands; give that of one"),
        ((64, 64), "nvfp4", {"groups": 2.5}, "groups=2.5: give an int"),
        ((64, 64), "nvfp4", {"groups": True}, "groups=True: give an int"),
        ((64, 64), "nvfp4", {"groups": None}, "groups=None: give an int"),
        ((64, 64), "nvfp4", {"op": ["quantize"]}, r"op=\['quantize'\]: give its name"),
        (16, "nvfp4", {}, "shape=16: give its sizes"),
        (None, "nvfp4", {}, "shape=None: give its sizes"),
        ("16x16", "nvfp4", {}, "shape='16x16': give its sizes"),
    ],
)
def test_mistaken_types(target, shape, spec, options, message):
    with pytest.raises(TypeError, match=message):
        hb.ops.explain(shape, spec, target=target, **options)


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942", "interpreter"])
@pytest.mark.parametrize("options", [{}, {"op": "dequantize"}])
@pytest.mark.parametrize("shape", [(0, 16), (64, 0)])
def test_nothing_is_launched_for_no_elements(shape, options, target):
    (step,) = hb.ops.explain(shape, "nvfp4", target=target, **options).steps
    assert step.kernel == "nothing" and step.why == "it has no elements"


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_103"])
@pytest.mark.parametrize("spec", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("rows", [0, 64])
def test_groups_of_a_product_without_a_contraction_are_not_given_to_tensor_cores(rows, spec, target):
    """torch's grouped GEMM takes scales in regions of whole tiles, of which no columns have none."""
    found = hb.ops.explain((rows, 128, 0), spec, spec, groups=2, target=target).steps
    assert "scaled_grouped_mm" not in [step.kernel for step in found]
    if target != "sm_90" and spec == "mxfp8":  # of NVFP4 only newer versions of torch multiply groups
        assert ("scaled_grouped_mm", "there is nothing to sum") in found[0].instead


def test_a_negative_size_is_named_by_the_command(capsys):
    assert cli.main(["explain", "-1x3", "nvfp4"]) == 2
    assert "SHAPE '-1x3': sizes are 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("options", ({}, {"target": "sm_90"}, {"op": "grouped_gemm", "groups": 2}))
@pytest.mark.parametrize("operands", ((hb.NVFP4(), hb.MXFP8()), (hb.NVFP4(rotation=hb.Hadamard(size=16)), None)))
def test_products_that_are_refused_are_not_explained(operands, options):
    x = torch.randn(64, 64)
    with pytest.raises(ValueError) as refused:
        hb.gemm_nt(*(x if spec is None else hb.quantize(x, spec) for spec in operands))
    with pytest.raises(ValueError) as same:
        hb.ops.explain((64, 64, 64), *operands, **options)
    assert str(same.value) == str(refused.value)


def test_the_command(capsys):
    assert cli.main(["explain", "64x256", "nvfp4", "nvfp4.wgrad.a", "--target", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert out == f"{hb.ops.explain((64, 256), 'nvfp4', 'nvfp4.wgrad.a', target='sm_90')}\n"
    words = ["nvfp4(rht=64,sr=off).wgrad.a", "four_over_six(scope=weights).dgrad.b"]
    assert cli.main(["explain", "64x256", *words, "--target", "sm_90"]) == 0
    own = hb.recipes.nvfp4(hadamard=hb.Hadamard(size=64), stochastic_rounding=False).wgrad.a
    other = hb.recipes.four_over_six(scope="weights").dgrad.b
    assert capsys.readouterr().out == f"{hb.ops.explain((64, 256), own, other, target='sm_90')}\n"
    assert cli.main(["explain", "64x256", "nvfp4(rht=64)"]) == 2
    assert "spec='nvfp4(rht=64)': name an operand of the recipe" in capsys.readouterr().err
    assert cli.main(["explain", "64x256", "nvfp4(rht=3).wgrad.a"]) == 2
    assert "rht='3'; write none, 16" in capsys.readouterr().err
    assert cli.main(["explain", "64", "nvfp4"]) == 2
    assert cli.main(["explain", "64yy", "nvfp4"]) == 2
    assert "SHAPE '64yy': give sizes" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["quantize", "amax"])
@pytest.mark.parametrize("target", ["sm_90", "cpu"])
def test_what_is_not_quantized_launches_nothing_and_says_so(op, target):
    for specs in (("bf16",), (None, "bf16")):
        said = hb.ops.explain((16, 16), *specs, op=op, target=target)
        assert said.target == target and [step.kernel for step in said.steps] == ["nothing"]
        assert "bf16 stays as it is; give the spec of rows" in str(said)


def test_a_spec_without_a_kernel_is_said_to_be_refused(monkeypatch):
    spec = hb.NVFP4(rotation=hb.Hadamard(signs="none"))
    module = sys.modules["halfbyte.ops.explain"]
    monkeypatch.setattr(module, "without_kernel", lambda known: "its rotation" if known == spec else None)
    (step,) = hb.ops.explain((256, 256), spec, target="sm_90").steps
    assert "refused" in step.kernel and "has no kernel" in step.why and not step.programs
    assert hb.ops.explain((256, 256), hb.NVFP4(), spec, target="sm_90").steps == (step,)
    assert hb.ops.explain((256, 256, 256), "nvfp4", "quartet2.fprop.b", target="sm_90").steps[-1].programs
    (step,) = hb.ops.explain((256, 256), spec, target="cpu").steps
    assert "plain torch" in step.kernel
