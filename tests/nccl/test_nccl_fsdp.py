"""Over NCCL too, FSDP2's 4-bit gather and its bf16 gather give the same bits."""

import fsdp_checks as checks
import test_fsdp
from jobs import asks, job

WORLDS = (2, 4)
CASES = (
    ["even", "uneven rows", "empty shards", "fp32 masters", "four over six, uneven", "rows, uneven"],
    ["decoder", "decoder, fp32 masters", "accumulated", "under autocast", "apart, uneven, columns"],
    ["apart, gradients in 8 bits", "experts, nvfp4", "experts, fp32 masters, more ranks than experts", "fused layers"],
)


@asks(*[job(world, checks.cases, names, name=names[0]) for world in WORLDS for names in CASES])
def test_4_bit_gather_is_bf16_gather_and_local_quantization(found):
    for rank, cases in enumerate(found):
        for name, case in cases.items():
            assert case["differs"] == [], f"rank {rank}, {name}"
            assert case["finite"] and case["moved"] and case["casts"] == 0, f"rank {rank}, {name}"


@asks(*[job(n, checks.arrived, test_fsdp.SIZES, name, name=name) for n in WORLDS for name in ("nvfp4", "rl")])
def test_what_arrives_is_the_quantized_weight(found, request):
    each = 1 if request.node.name.endswith("rl]") else 4
    assert all(all(rank["equal"]) and len(rank["equal"]) == each * len(test_fsdp.SIZES) for rank in found)


@asks(*[job(world, checks.columns_arrived, test_fsdp.SIZES, "nvfp4_mxfp8_bwd") for world in WORLDS])
def test_what_a_backward_is_sent_is_the_quantized_transpose(found):
    assert all(all(rank["equal"]) and rank["moved"] for rank in found)


@asks(*[job(world, checks.long_run, 200) for world in WORLDS])
def test_200_steps(found):
    for rank in found:
        assert rank["differs"] == [] and rank["finite"]
        assert rank["losses"][-1] < 0.5 * rank["losses"][0], "it trains"
