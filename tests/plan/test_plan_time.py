"""Multiplications and seconds in `halfbyte plan`, and the constants of its time against the records they are from."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfbyte as hb
from bench.records import load
from halfbyte import recipes
from halfbyte.memory import fake_parameters
from halfbyte.plan import PlanRequest, calibration, plan, seconds, work
from halfbyte.plan import architecture as models
from halfbyte.plan.assumptions import assumptions, constants
from halfbyte.plan.hardware import B200, H200
from halfbyte.plan.kept import Probe
from halfbyte.spec import MXFP8, NVFP4, GemmSpec

RECORDS = load()
SMALL = {"model": "1b", "gpus": 1, "mesh": "dp_shard=1", "sequences": 8, "sequence": 2048}


def measured(stamp: str, case: str, shape: tuple) -> dict:
    (found,) = (
        r for r in RECORDS if r.stamp == stamp and r.values["case"] == case and tuple(r.values["shape"]) == shape
    )
    return found.values


def run(stamp: str) -> dict:
    return next(r.run for r in RECORDS if r.stamp == stamp)


def test_every_constant_is_what_its_record_says():
    c = calibration
    assert run(c.BF16_SHARE.record)["memory_GiB"] == H200.memory_GiB
    assert c.BF16_SHARE.value == pytest.approx(run(c.BF16_SHARE.record)["bf16_TFLOP_s"] / 989.4, rel=1e-3)
    assert c.COPY_SHARE.value == pytest.approx(run(c.COPY_SHARE.record)["copy_TB_s"] / 4.8, rel=1e-3)
    one, two = (measured(c.TAIL.record, "quantize/1x16", (n, 8192))["us"] for n in (8192, 16_384))
    assert c.TAIL.value * 1e6 == pytest.approx(2 * one - two, rel=0.02)
    slow = measured(c.STOCHASTIC.record, "row_col/sr+sr-rht", (16_384, 8192))["us"]
    assert c.STOCHASTIC.value == pytest.approx(16_384 * 8192 / slow * 1e6, rel=1e-2)
    grouped = measured(c.GROUP_RAMP.record, "grouped/linear-nvfp4", (64, 32_768, 7168, 2048))
    rate = 6 * 32_768 * 7168 * 2048 / grouped["bf16_us"] * 1e6
    share = rate / (989.4e12 * c.BF16_SHARE.value)
    assert c.GROUP_RAMP.value == pytest.approx(512 * (1 / share - 1), rel=0.03)
    gather = next(
        r.values
        for r in RECORDS
        if r.stamp == c.NVLINK_SHARE.record and (r.values["model"], r.values["weights"]) == ("3b", "plain")
    )
    received = gather["gathered_bytes"] * 3 / 4
    assert c.NVLINK_SHARE.value == pytest.approx(received / gather["gather_ms"] * 1e3 / 450e9, rel=1e-2)


def gathering(stamp: str, model: str, way: str) -> dict:
    return next(r.values for r in RECORDS if r.stamp == stamp and (r.values["model"], r.values["way"]) == (model, way))


def step_ms(stamp: str, model: str, way: str) -> float:
    return gathering(stamp, model, way)["step_ms"]


def host_ms(stamp: str, model: str, way: str) -> float:
    return gathering(stamp, model, way)["host_step_ms"]


def test_what_a_host_takes_is_what_steps_took_that_no_kernel_paced():
    c = calibration
    layers = {"1b": 16, "300m": 21}
    for constant, way in ((c.HOST_CODES, "codes"), (c.HOST_VALUES, "bf16")):
        blocks = [step_ms(constant.record, model, way) / count for model, count in layers.items()]
        assert constant.value * 1e3 == pytest.approx(sum(blocks) / 2, rel=0.01)
    found = {}
    for way in ("bf16", "codes"):  # the host's own time, which waits for no other rank
        both = (host_ms(c.COMPILED, "1b", way) / 16, host_ms(c.COMPILED_SMALL, "300m", way) / 21)
        assert both[0] == pytest.approx(both[1], rel=0.03), "of a block, so the same in both models"
        found[way] = sum(both) / 2
    assert c.HOST_COMPILED.value * 1e3 == pytest.approx(found["bf16"], rel=0.001)
    assert f"over codes {found['codes']:.2f} ms" in c.HOST_COMPILED.means
    assert found["codes"] == pytest.approx(found["bf16"], rel=0.035), "one constant is for both"
    experts = [
        measured(c.HOST_EXPERTS.record, f"steps/{model}", (8, 2048))["bf16_us"] / 1e6 / count
        for model, count in (("moe-60m", 7), ("moe-300m", 12))
    ]
    assert c.HOST_EXPERTS.value == pytest.approx(sum(experts) / 2, rel=0.01)


def test_a_small_model_waits_for_its_host_and_a_large_one_does_not():
    sharded = {
        "gpus": 2,
        "mesh": "dp_shard=2",
        "sequences": 4,
        "sequence": 2048,
        "sharding": "fsdp",
        "host": "measured",
    }
    small = plan(PlanRequest(model="300m", gather="nvfp4", kernels="fused", **sharded))
    assert small.step.total == pytest.approx(21 * 12.5e-3) and small.step.seconds[seconds.HOST] > 0.15
    twice = plan(PlanRequest(model="300m", gather="nvfp4", kernels="fused", accumulate=2, **sharded))
    assert twice.step.total == pytest.approx(2 * small.step.total)
    eager = plan(PlanRequest(model="300m", gather="bf16", kernels="eager", **sharded))
    assert eager.step.total == pytest.approx(21 * 11.3e-3)
    for gather in ("bf16", "nvfp4"):
        compiled = plan(PlanRequest(model="300m", gather=gather, **sharded))
        assert compiled.step.total == pytest.approx(21 * 9.74e-3)
    large = plan(PlanRequest(model="8b", **(sharded | {"gpus": 8, "mesh": "dp_shard=8"})))
    assert large.step.seconds[seconds.HOST] == 0 and large.step.total > 32 * 12.5e-3
    alone = plan(PlanRequest(model="60m", gpus=1, mesh="dp_shard=1", sequences=1, sequence=512, host="measured"))
    assert alone.step.seconds[seconds.HOST] == 0
    ahead = plan(PlanRequest(model="300m", gather="nvfp4", kernels="fused", **(sharded | {"host": "ahead"})))
    assert ahead.step.total == pytest.approx(small.step.total - small.step.seconds[seconds.HOST])
    said = "\n".join(assumptions(ahead.job))
    assert "launches a step in 262 ms, where that is longer: host='measured' lets the GPU wait for it" in said
    assert "always has work queued" in said and "always has work queued" not in "\n".join(assumptions(small.job))


def test_the_share_of_a_step_is_that_of_the_bf16_step_it_is_fitted_to():
    values = measured(calibration.STEP_SHARE.record, "train/1b", (8, 2048))
    job = plan(PlanRequest(**SMALL, recipe="bf16", holds_logits=True)).job
    parts = seconds.passes(job).values()
    kernels = sum(sum(seconds.kernel_seconds(part, H200, step_share=1.0).values()) for part in parts)
    assert calibration.STEP_SHARE.value == pytest.approx(kernels / values["bf16_us"] * 1e6, rel=5e-3)


def test_what_has_no_record_is_called_an_assumption():
    stamps = {r.stamp for r in RECORDS}
    for name, constant in constants().items():
        assert (
            constant.record in stamps
            if constant.record
            else name in {"ATTENTION_SHARE", "NETWORK_SHARE", "EAGER_TRAFFIC"}
        )
    lines = plan(PlanRequest(**SMALL)).job
    said = "\n".join(hb.plan.assumptions.assumptions(lines))
    assert all(f"{name} = " in said for name in constants()) and said.count("(not measured)") == 3


def test_flops_are_six_for_each_weight_and_token_and_attention():
    found = plan(PlanRequest(**{**SMALL, "accumulate": 2}, recipe="bf16")).step
    linears = 1_235_814_400 - 33 * 2048
    attention = 3.5 * 16 * 4 * 2048 * 2048 / 2
    assert found.flops == {"bf16": pytest.approx(2 * 16_384 * (6 * linears + attention))}
    assert found.useful == pytest.approx(found.flops["bf16"], rel=1e-4)
    full = plan(PlanRequest(**{**SMALL, "accumulate": 2}, recipe="bf16", recompute="full")).step
    blocks = linears - 128_256 * 2048
    again = 2 * 16_384 * (2 * blocks + attention / 3.5)
    assert full.flops["bf16"] - found.flops["bf16"] == pytest.approx(again) and full.useful == found.useful


def test_operands_are_multiplied_in_the_precision_that_the_hardware_has():
    nvfp4, mxfp8, mixed = (recipes.get(name) for name in ("nvfp4", "mxfp8", "nvfp4_mxfp8_bwd"))
    assert [work.precision(g, B200) for g in (nvfp4.fprop, mxfp8.dgrad, mixed.fprop, mixed.wgrad)] == [
        "fp4",
        "fp8",
        "fp4",
        "fp8",
    ]
    assert {work.precision(g, H200) for g in (nvfp4.fprop, mxfp8.dgrad, None)} == {"bf16"}
    assert work.precision(GemmSpec(a=NVFP4()), B200) == "bf16"
    found = plan(PlanRequest(**SMALL, hardware="b200", recipe="nvfp4_mxfp8_bwd@all")).step.flops
    linears = 1_235_814_400 - 33 * 2048 - 128_256 * 2048
    assert found["fp4"] == pytest.approx(2 * 16_384 * linears) and found["fp8"] == pytest.approx(4 * 16_384 * linears)
    assert (work.bits(NVFP4()), work.bits(MXFP8())) == (4.5, 8.25)


def test_tensor_parallelism_and_experts_divide_the_multiplications():
    base = {"model": "deepseek-v3", "gpus": 128}
    whole = plan(PlanRequest(**base, mesh="dp_shard=128")).step
    split = plan(PlanRequest(**base, mesh="dp_shard=32,tp=4,ep=16")).step
    assert split.flops["bf16"] == pytest.approx(whole.flops["bf16"] / 4)
    expected = 6 * 8192 * (37_552_282_624 - 129_280 * 7168)
    attention = 3.5 * 61 * 2 * 8192 * (8192 / 2) * 128 * (192 + 128)
    assert whole.useful == pytest.approx(expected + attention, rel=1e-6)


def test_the_quantization_of_a_layer_moves_what_adds_up_by_hand():
    job = plan(PlanRequest(**SMALL, recipe="nvfp4@all")).job
    matrix = next(m for m in job.architecture.matrices(job.architecture.kinds[0]) if m.name == "mlp.down_proj")
    parts = work.linear_work(job, matrix, job.recipe)
    x, w, dy = 16_384 * 8192, 2048 * 8192, 16_384 * 2048
    assert parts["forward"].moved["quantization"] == 2 * x + 2 * w + (2 + 2 + 0.5625) * w
    assert parts["forward"].slow == [work.Slow(x, (2 + 2 + 0.5625) * x)]
    assert parts["backward"].slow == [work.Slow(dy, 6 * dy)]
    assert parts["backward"].moved["decoding"] == (0.5625 + 2) * (x + w)
    native = work.linear_work(plan(PlanRequest(**SMALL, recipe="nvfp4@all", hardware="b200")).job, matrix, job.recipe)
    assert native["forward"].slow == [work.Slow(x, (2 + 2 * 0.5625) * x)] and not native["backward"].moved["decoding"]
    assert not work.linear_work(job, matrix, recipes.bf16())["forward"].moved


class Traffic(TorchDispatchMode):
    """Bytes that ops between GEMMs read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read, written = (
            [t for t in tree_leaves(part) if isinstance(t, torch.Tensor)] for part in ((args, kwargs), result)
        )
        storages = {t.untyped_storage()._cdata for t in read}
        is_view = written and all(t.untyped_storage()._cdata in storages for t in written)
        is_view = is_view and not func._schema.is_mutable  # autograd adds gradients in place where it may
        ours = ("quantize" in str(func) or "gemm" in str(func) or "amax" in str(func)) and func.namespace == "halfbyte"
        if not (is_view or ours or "empty" in str(func) or "attention" in str(func) or func.namespace == "prim"):
            self.bytes += sum(t.numel() * t.element_size() for t in (*read, *written))
        return result


def test_eager_code_moves_as_many_times_the_bytes_as_its_ops_say():
    shape = models.find_architecture("1b")
    probe = Probe(shape.block(shape.kinds[0], compiled=False), 2048, 64).bfloat16()
    hb.quantize_(probe, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, fake_parameters(probe, mode):
        x, residual = (torch.empty(4, 2048, 2048, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        table = torch.empty(2048, 64)
        with Traffic() as counted:
            *parts, _ = probe.block(x, residual, table, table)
            torch.autograd.backward(parts, [torch.empty_like(part) for part in parts])
    compiled = plan(PlanRequest(**{**SMALL, "sharding": "zero1"})).job
    total = {"forward": work.Work(), "backward": work.Work()}
    work.between(compiled, compiled.spans[0].kind, total)
    moved = sum(part.moved["between GEMMs"] for part in total.values()) / compiled.tokens
    assert counted.bytes / (4 * 2048) / moved == pytest.approx(calibration.EAGER_TRAFFIC.value, rel=0.05)


def test_exposed_communication_is_what_outlasts_the_kernels_and_a_block():
    found = plan(PlanRequest(model="llama3-8b", gpus=8, mesh="dp_shard=8", recipe="bf16"))
    hidden = sum(c.seconds(H200) for c in found.collectives)
    assert found.step.seconds[seconds.EXPOSED] == pytest.approx(hidden / 32)
    several = plan(PlanRequest(model="llama3-8b", gpus=8, mesh="dp_shard=8", recipe="bf16", accumulate=3))
    assert several.step.seconds[seconds.EXPOSED] == pytest.approx(hidden / 32), "of one block of one micro-batch"
    far = plan(PlanRequest(model="llama3-8b", gpus=512, mesh="dp_shard=512", recipe="bf16", sequence=512))
    busy = {name: sum(seconds.kernel_seconds(part, H200).values()) for name, part in seconds.passes(far.job).items()}
    gathers = {p: sum(c.seconds(H200) for c in far.collectives if c.phase == p) for p in busy}
    assert gathers["forward"] > busy["forward"]
    beyond = sum(max(0, gathers[p] - busy[p]) + min(gathers[p], busy[p]) / 32 for p in busy)
    assert far.step.seconds[seconds.EXPOSED] == pytest.approx(beyond)


def test_experts_of_few_tokens_multiply_more_slowly():
    def rate(tokens: float) -> float:
        one = work.Work(grouped=[work.Grouped("bf16", 1e15, tokens)])
        return 1e15 / seconds.kernel_seconds(one, H200, 1.0)["GEMMs in bf16"]

    dense = H200.flops["bf16"] * calibration.BF16_SHARE.value
    ramp = calibration.GROUP_RAMP.value
    assert rate(ramp) == pytest.approx(dense / 2) and rate(3 * ramp) == pytest.approx(dense * 3 / 4)
    assert rate(1e12) == pytest.approx(dense)


def test_products_of_experts_take_their_time_beside_all_others_of_a_precision():
    rate, tokens = H200.flops["bf16"] * calibration.BF16_SHARE.value, calibration.GROUP_RAMP.value
    several = work.Work(grouped=[work.Grouped("bf16", 1e15, tokens), work.Grouped("bf16", 3e15, tokens)])
    several.flops["bf16"] = 5e15
    expected = (5e15 + 2 * (1e15 + 3e15)) / rate
    assert seconds.kernel_seconds(several, H200, 1.0)["GEMMs in bf16"] == pytest.approx(expected)


def test_every_micro_batch_casts_weights_and_gradients():
    """6 bytes for each weight on its way to bf16, and as many for its gradient on its way back."""
    for count in (1, 3):
        found = plan(PlanRequest(**SMALL, accumulate=count))
        rate = 4.8e12 * calibration.COPY_SHARE.value * calibration.STEP_SHARE.value
        assert found.step.seconds["casts"] == pytest.approx(count * 12 * found.job.numel / rate)
