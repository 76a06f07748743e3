"""Models and meshes of `halfbyte plan`: counts against published ones, and what is refused."""

import pytest

from halfbyte.plan import Mesh, PlanRequest, plan
from halfbyte.plan import architecture as models
from halfbyte.plan import mesh as meshes
from halfbyte.plan.hardware import find_hardware as hardware


def deepseek_by_hand() -> int:
    """DeepSeek-V3 without its MTP module, added up from the widths of its config.json."""
    dim, heads = 7168, 128
    attention = dim * 1536 + 1536 + 1536 * heads * 192 + dim * (512 + 64) + 512 + 512 * heads * 256 + heads * 128 * dim
    norms = 2 * dim
    dense, expert = 3 * dim * 18_432, 3 * dim * 2048
    experts = 256 * expert + expert + 256 * dim
    return 61 * (attention + norms) + 3 * dense + 58 * experts + 2 * 129_280 * dim + dim


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-8b", 8_030_261_248, 8_030_261_248),  # as Hugging Face counts Meta's checkpoints
        ("llama3-70b", 70_553_706_496, 70_553_706_496),
        ("deepseek-v3", deepseek_by_hand(), deepseek_by_hand() - 58 * 248 * 3 * 7168 * 2048),
    ],
)
def test_large_models_have_the_published_parameters(name, total, active):
    shape = models.find_architecture(name)
    assert (shape.parameters, shape.active_parameters) == (total, active)
    assert round(deepseek_by_hand() / 1e9) == 671


@pytest.mark.parametrize("name", ["tiny", "300m", "1b", "moe-300m"])
def test_presets_have_the_parameters_that_they_say(name):
    shape = models.find_architecture(name)
    assert shape.parameters == shape.config.parameters
    assert shape.active_parameters == shape.config.active_parameters
    assert shape.expert_parameters == (0 if shape.config.moe is None else 12 * 8 * 3 * 768 * 1024)


def test_matrices_of_a_block_of_each_kind():
    shape = models.find_architecture("deepseek-v3")
    dense, sparse = (shape.matrices(kind) for kind in shape.kinds)
    sizes = {m.name: (m.rows, m.cols, m.experts, m.per_token) for m in sparse}
    assert sizes["mlp.gate_up_proj"] == (4096, 7168, 256, 8)
    assert sizes["mlp.down_proj"] == (7168, 2048, 256, 8)
    assert sizes["shared_expert.up_proj"] == (2048, 7168, 1, 1)
    assert sizes["self_attn.q_b_proj"] == (24_576, 1536, 1, 1)
    assert {m.name: (m.rows, m.cols) for m in dense}["mlp.down_proj"] == (7168, 18_432)


def test_a_mesh_is_read_and_written():
    mesh = meshes.parse_mesh("dp_shard=64, tp=8,ep=4")
    assert mesh == Mesh(dp_shard=64, tp=8, ep=4) and meshes.parse_mesh(str(mesh)) == mesh
    assert (mesh.gpus, mesh.data_ranks) == (512, 64)
    assert str(Mesh()) == "dp_shard=1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=8", "'dp=8' is not one of dp_replicate=N, dp_shard=N, tp=N, ep=N, nor is it auto"),
        ("tp=x", "'tp=x' is not one of"),
        ("tp=2,tp=4", "tp is there twice; give it once"),
        ("dp_shard=0", "mesh.dp_shard=0: give a whole number, 1 or more"),
        ("dp_shard=8,ep=3", "ep=3 does not divide dp_shard=8, whose ranks split the experts"),
        ("ep=2", "give a multiple, as in ep=2,dp_shard=2"),
    ],
)
def test_what_is_no_mesh(text, message):
    with pytest.raises(ValueError) as error:
        meshes.parse_mesh(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": "dp_shard=4,tp=2", "gpus": 16}, "= 8 GPUs, and gpus=16; use dp_shard=8, or gpus=8"),
        ({"mesh": "dp_shard=4,tp=3", "gpus": 8}, "= 12 GPUs, and gpus=8; use gpus=12, or --mesh auto"),
        ({"mesh": "tp=16", "gpus": 16}, "tp=16 does not divide kv_heads=8 of llama3-8b; use a divisor of it"),
        ({"mesh": "dp_shard=2,ep=2", "gpus": 2}, "ep=2: llama3-8b has no experts; use ep=1"),
        ({"model": "60m", "mesh": "tp=4", "gpus": 4}, "parts of hidden=1376 of 60m are no whole blocks of 16"),
        (
            {"model": "moe-1b", "mesh": "dp_shard=16,ep=16", "gpus": 16},
            "ep=16 does not divide experts=8; use a divisor",
        ),
        ({"mesh": "tp=2", "gpus": 2, "sequence": 1001}, "tp=2 does not divide sequence=1001"),
        ({"mesh": "dp_shard=2", "gpus": 2, "sharding": "none"}, "dp_shard=2 with sharding='none': use dp_replicate"),
        ({"mesh": "dp_shard=2,tp=2", "gpus": 4, "sharding": "zero1"}, "'zero1' shards over dp_shard alone, and mesh="),
        ({"mesh": "dp_shard=2", "gpus": 2, "recipe": "mxfp8", "gather": "nvfp4"}, "use gather='bf16', or recipe nvfp4"),
        ({"mesh": "dp_shard=1", "gpus": 1, "gather": "nvfp4"}, "with sharding='none': no weight travels; use gather="),
        (
            {"mesh": "dp_shard=1", "gpus": 1, "values": "fp32"},
            "it says what FSDP2 gathers; use sharding='fsdp', or values=",
        ),
        (
            {"mesh": "dp_shard=1", "gpus": 1, "reduce": "fp32"},
            "it says what FSDP2 reduces; use sharding='fsdp', or reduce=",
        ),
        ({"gpus": 0}, "gpus=0: give a whole number, 1 or more"),
        ({"gpus": 10**400}, "gpus=10**399 or more: a plan counts to 1,073,741,824; give fewer"),
        ({"sequence": 10**18}, "sequence=1000000000000000000: a plan counts to 1,099,511,627,776; give fewer"),
        ({"sequences": 10**41, "mesh": "dp_shard=8"}, "sequences=10**40 or more: a plan counts to"),
        ({"sequences": 2**20, "sequence": 2**20 + 1}, "a plan counts to 1,099,511,627,776 tokens of a micro-batch"),
        ({"mesh": "dp_shard=" + "1" * 5001}, "mesh: dp_shard has 5,001 digits; give a number of GPUs"),
        ({"high_precision_blocks": 2.0}, "high_precision_blocks=2.0: give a share, from 0 to 1"),
        ({"high_precision_blocks": float("nan")}, "high_precision_blocks=nan: give a share, from 0 to 1"),
        ({"recipe": "nvfp4+late(0.2)"}, "recipe='nvfp4+late(0.2)': steps of a schedule differ, and a plan is of one;"),
        ({"recipe": "nvfp4@all+schedule(0.5:bf16)"}, "plan each of its recipes alone, with gather='bf16' where"),
        ({"recipe": "nvfp4+order"}, "leave +order out, and halve sequences=1 and double accumulate=1 instead"),
        ({"recipe": "bf16", "gather": "nvfp4"}, "gpus=8: no mesh can be; gather='nvfp4': the recipe's weights are not"),
        (
            {"sharding": "zero1", "recipe": "quartet2", "gather": "nvfp4"},
            "gpus=8: no mesh can be; gather='nvfp4': the recipe's weights are not",
        ),
        (
            {"mesh": "dp_shard=8", "recompute": "selective", "kernels": "compiled"},
            "recompute='selective' with kernels='compiled': compiled blocks write over what it keeps;",
        ),
        ({"gpus": 1, "mesh": "dp_shard=1", "accumulate": 0}, "accumulate=0: give a whole number, 1 or more"),
        ({"gpus": 1, "model": "7b"}, "model='7b' cannot be planned; use one of llama3-8b, llama3-70b, deepseek-v3"),
        ({"gpus": 1, "hardware": "v100"}, "hardware='v100' is not known; use one of h100, h200, b200, gb300"),
        ({"gpus": 1, "recipe": "fp3"}, "recipe='fp3' is not a preset"),
        (
            {"gpus": 1},
            "gpus=1: llama3-8b fits on no mesh of h200; least is dp_shard=1, recompute=nothing: needs 140 GiB of 129",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(given, message):
    with pytest.raises(ValueError) as error:
        plan(PlanRequest(**{"recompute": "nothing", **given}))
    assert message in str(error.value)


def test_a_plan_counts_to_the_number_that_it_names():
    common = {"model": "tiny", "mesh": "dp_shard=1", "recipe": "bf16", "sequence": 32}
    assert plan(PlanRequest(gpus=1, accumulate=2**40, **common)).job.accumulate == 2**40
    with pytest.raises(ValueError, match="accumulate=1099511627777: a plan counts to 1,099,511,627,776; give fewer"):
        plan(PlanRequest(gpus=1, accumulate=2**40 + 1, **common))


def test_hardware_has_dense_rates_with_a_source():
    for name, bf16, fp4 in (
        ("h100", 989.4, None),
        ("h200", 989.4, None),
        ("b200", 2250, 9000),
        ("gb300", 2500, 15_000),
    ):
        found = hardware(name)
        assert found.flops["bf16"] == bf16 * 1e12 and "NVIDIA" in found.source
        assert found.flops.get("fp4") == (None if fp4 is None else fp4 * 1e12) and found.multiplies_fp4 == bool(fp4)
