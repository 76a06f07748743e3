"""torchtitan 0.3.0's own Trainer trains its debug models in a recipe, on a CPU; titan_runs.py says what stands in."""

from __future__ import annotations

import copy
import gc
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import titan_runs as runs
from torchtitan.components.quantization.nvfp4 import nvfp4_bf16_tail_fqns
from torchtitan.config import CompileConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.linear import Linear
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel_non_fused_qkv

import halfbyte as hb
from halfbyte.integrations import torchtitan as ours
from halfbyte.policy import plain_name

PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"
HERE = "halfbyte.integrations.torchtitan"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    runs.alone()
    yield
    gc.enable()  # torchtitan collects by itself, and keeps backwards in one thread
    torch.autograd.set_multithreading_enabled(True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shallow(config, layers: int = 2):
    """Leave a model this many blocks."""
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return config


def short(layers: int = 2, steps: int = 2, **options):
    """Return the config of a llama of few blocks."""
    return shallow(runs.small(llama3_debugmodel(), ".", steps=steps, **options), layers)


def whole(parameters) -> list[torch.Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


def same(left, right) -> bool:
    left, right = list(left), list(right)
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_twenty_steps_of_the_debug_model_beside_its_bf16():
    _, plain = runs.run(runs.small(llama3_debugmodel(), "."))
    torch.distributed.destroy_process_group()
    trainer, losses = runs.run(ours.quantize_config_(runs.small(llama3_debugmodel(), ".")))
    assert len(plain) == len(losses) == 20 and losses[-1] < 0.6 * losses[0]
    gaps = [abs(a - b) / b for a, b in zip(losses, plain, strict=True)]
    assert gaps[0] < 1e-3 and max(gaps) < 0.02 and losses != plain, gaps
    state = trainer.checkpointer.run_state
    assert state.next_position == 20 and state.step == 20 and state.seed == 0
    layers = {n: m for n, m in trainer.model_parts[0].named_modules() if isinstance(m, ours.RecipeLinear)}
    assert len(layers) == 25 and all(m.recipe == hb.recipes.nvfp4() for m in layers.values())
    assert not any("layers.5" in name or "lm_head" in name for name in layers)


def test_forward_and_gradients_are_those_of_quantize():
    config = short()
    spec = copy.deepcopy(config.model_spec.model)
    trainer = ours.quantize_config_(config, keep=hb.Keep(last_fraction=0)).build()
    model = trainer.model_parts[0]
    plain = spec.build()
    plain.init_weights()
    plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    plain._skip_lm_head = True
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Linear:
                twin = nn.Linear.__new__(nn.Linear)
                twin.__dict__.update(child.__dict__)
                setattr(parent, name, twin)
    for parameter in plain.parameters():  # as FSDP2's mixed precision gathers them
        parameter.data = parameter.data.to(torch.bfloat16)
    hb.quantize_(plain, "nvfp4", keep=hb.Keep(last_fraction=0), share_amax=(("*.w1", "*.w3"),))
    batch, _ = next(iter(trainer.dataloader))
    results = []
    for net in (model, plain):
        y = net(batch["input"], positions=batch["positions"])
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
        results.append((y, [g.float() for g in whole(p.grad for p in net.parameters() if p.grad is not None)]))
    trainer.close()
    assert torch.equal(results[0][0], results[1][0])
    assert len(results[0][1]) > 10 and same(results[0][1], results[1][1])


def test_blocks_that_torchtitan_compiles_compute_the_same_bits():
    """Up to what Inductor rounds otherwise: the graph is run as it was traced."""
    losses = {}
    for backend in ("", "aot_eager"):
        config = short()
        if backend:
            config.compile = CompileConfig(enable=True, components=["model"], backend=backend)
        trainer, losses[backend] = runs.run(ours.quantize_config_(config, keep=hb.Keep(last_fraction=0)))
        torch.distributed.destroy_process_group()
        assert trainer.checkpointer.run_state.next_position == 2
    assert losses["aot_eager"] == losses[""]


def test_the_block_of_the_page_is_a_config():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    exec(compile("".join(blocks), str(PAGE), "exec"), namespace)
    config = namespace["small_llama"]()
    found = {n: c.recipe for n, c, _, _ in config.model_spec.model.traverse(ours.RecipeLinear.Config)}
    assert len(found) == 26 and found["layers.0.feed_forward.w2"] == hb.recipes.four_over_six().key
    assert config.override.imports[0][1]["schedule"] == "0.9:bf16/nvfp4"


def fsdp_on_a_rank(rank: int, world: int, folder: str, recipe: str, backend: str, replicas: int):
    """Train two steps on this rank, and return its place and the whole weights."""
    runs.alone(rank, world)
    config = short()
    config.dump_folder = folder
    config.training.max_norm = 1e9  # norms of shards add in another order
    config.parallelism.spmd_backend, config.parallelism.data_parallel_replicate_degree = backend, replicas
    trainer, losses = runs.run(ours.quantize_config_(config, recipe, keep=hb.Keep(last_fraction=0)), weights=True)
    state = trainer.checkpointer.run_state
    return state.rank, state.next_position, losses, [p.tolist() for p in whole(trainer.model_parts[0].parameters())]


@pytest.mark.parametrize("replicas", [1, 2], ids=["FSDP2", "replicas"])
def test_two_ranks_of_fsdp2_are_one_process_that_takes_them_in_turn(tmp_path, replicas):
    backend = (
        "partial_dtensor"  # with spmd_types, torchtitan 0.3.0's own model needs a torch after 2.13 on several ranks
    )
    recipe = "naive_fp4"  # all three GEMMs, and nothing drawn
    results = ranks.run(2, fsdp_on_a_rank, str(tmp_path), recipe, backend, replicas, seconds=200)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert results[0][3] == results[1][3]
    config = short(accumulate=2)
    config.training.max_norm = 1e9
    config.parallelism.spmd_backend = backend
    trainer, losses = runs.run(ours.quantize_config_(config, recipe, keep=hb.Keep(last_fraction=0)), weights=True)
    assert losses == pytest.approx(results[0][2], rel=1e-6)
    assert same([torch.tensor(p) for p in results[0][3]], whole(trainer.model_parts[0].parameters()))


def checkpointed(steps: int, **options):
    config = short(steps=steps)
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.last_save_model_only = True, 2, False
    return ours.quantize_config_(config, keep=hb.Keep(last_fraction=0), **options)


def test_a_checkpoint_goes_on_with_the_same_bits():
    options = {"seed": 5, "schedule": "3:bf16/nvfp4"}
    at_once, losses = runs.run(checkpointed(4, **options))
    layer = at_once.model_parts[0].get_submodule("layers.0.feed_forward.w1")
    assert layer.recipe == hb.recipes.get("bf16/nvfp4") and layer.recipe_before == hb.recipes.nvfp4()
    expected = whole(at_once.model_parts[0].parameters())
    for folder in Path("checkpoint").iterdir():
        if folder.name != "step-2":
            for file in sorted(folder.rglob("*"), reverse=True):
                file.unlink()
            folder.rmdir()
    torch.distributed.destroy_process_group()
    with pytest.raises(
        ValueError, match=r"trained layers\.0\.attention\.\S+ in fprop=.*with the recipe, rules and keep"
    ):
        runs.run(ours.quantize_config_(_same_folder(4), "mxfp8", keep=hb.Keep(last_fraction=0)))
    torch.distributed.destroy_process_group()
    resumed, later = runs.run(checkpointed(4, **options))
    state = resumed.checkpointer.run_state
    assert (state.seed, state.step, state.next_position) == (5, 4, 4)
    assert later == losses[2:] and same(expected, whole(resumed.model_parts[0].parameters()))


def _same_folder(steps: int):
    config = short(steps=steps)
    config.checkpoint.enable = True
    return config


@pytest.mark.parametrize("evaluation", ["high_precision", "as_trained"])
def test_validation_is_in_high_precision_unless_asked_for(evaluation):
    trainer = ours.quantize_config_(short(), keep=hb.Keep(last_fraction=0), evaluation=evaluation).build()
    model, (batch, _) = trainer.model_parts[0], next(iter(trainer.dataloader))
    seen = {}
    layer = model.get_submodule("layers.0.feed_forward.w1")
    layer.register_forward_hook(lambda module, x, y: seen.update(x=x[0], y=y, plain=x[0] @ module.weight.mT))
    model.eval()
    with torch.no_grad():
        model(batch["input"], positions=batch["positions"])
    assert torch.equal(seen["y"], seen["plain"]) is (evaluation == "high_precision")
    model.train()
    model(batch["input"], positions=batch["positions"])
    assert not torch.equal(seen["y"], seen["plain"]) and layer.recipe == hb.recipes.nvfp4()
    trainer.close()


class Calls(TorchDispatchMode):
    """Counts our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_repeats_no_gemm_of_ours():
    counts, losses = {}, {}
    for kind, policy in {"selective": SelectiveAC, "full": FullAC, "none": None}.items():
        config = short(steps=1)
        config.activation_checkpoint = None if policy is None else policy.Config()
        config = ours.quantize_config_(config, keep=hb.Keep(last_fraction=0))
        with Calls() as calls:
            _, losses[kind] = runs.run(config)
        counts[kind] = calls.counts["halfbyte.gemm_nt.default"]
        torch.distributed.destroy_process_group()
    assert counts["selective"] == counts["none"] < counts["full"]
    assert losses["selective"] == losses["full"] == losses["none"]


def moe(steps: int):
    """Return the config of a deepseek of one dense block and one of experts."""
    return shallow(runs.small(deepseek_v3_debugmodel(), ".", steps=steps))


def test_experts_multiply_in_the_recipe():
    config = moe(steps=2)
    trainer, losses = runs.run(ours.quantize_config_(config, keep=hb.Keep(last_fraction=0)))
    inner = trainer.model_parts[0].get_submodule("layers.1.moe.routed_experts.inner_experts")
    gate = trainer.model_parts[0].get_submodule("layers.1.moe.router.gate")
    assert isinstance(inner, ours.RecipeExperts) and not isinstance(gate, hb.nn.Linear)
    assert losses[1] < losses[0]
    x = torch.linspace(-1, 1, 24 * 256, dtype=torch.bfloat16).view(24, 256).sin().requires_grad_()
    counts = torch.tensor([3, 0, 9, 4, 0, 0, 8, 0])
    alone = ours.RecipeExperts.Config(dim=256, hidden_dim=64, num_experts=8).build()
    torch.manual_seed(1)
    for parameter in alone.parameters():
        nn.init.normal_(parameter, std=0.1)
    state = hb.RunState(4)
    for product in (alone.w1_recipe, alone.w2_recipe, alone.w3_recipe):
        product.join(state)
    y = alone(x, counts)
    y.square().sum().backward()
    grads = [x.grad, *(p.grad for p in alone.parameters())]
    x.grad = None
    w1, w2, w3 = (p.detach().clone().requires_grad_() for p in (alone.w1_EFD, alone.w2_EDF, alone.w3_EFD))
    ends = counts.cumsum(0).int()

    def product(a, w, own):
        return hb.functional.grouped_linear(a, w.bfloat16(), ends, "nvfp4", rng=own.peek(0, a.device))

    h = nn.functional.silu(product(x, w1, alone.w1_recipe)) * product(x, w3, alone.w3_recipe)
    expected = product(h, w2, alone.w2_recipe)
    expected.square().sum().backward()
    assert torch.equal(y, expected) and same(grads, [x.grad, w1.grad, w2.grad, w3.grad])


def test_overrides_that_a_command_line_names():
    config = short(steps=2)
    entries = [f'{HERE}.recipe_linear={{"recipe": "naive_fp4"}}', f'{HERE}.recipe_checkpoint={{"seed": 3}}']
    argv = ["--module", HERE, "--config", "llama3_debugmodel_first_85_pct_layers_nvfp4", "--override.imports"]
    parsed = ConfigManager().parse_args([*argv, *entries, f"{HERE}.recipe_selective_ac"])
    config.override = parsed.override
    trainer, losses = runs.run(config)
    layers = {n: m for n, m in trainer.model_parts[0].named_modules() if isinstance(m, ours.RecipeLinear)}
    assert len(layers) == 10 and all(m.recipe == hb.recipes.naive_fp4() for m in layers.values())
    assert trainer.checkpointer.run_state.seed == 3
    torch.distributed.destroy_process_group()
    _, other = runs.run(ours.quantize_config_(short(steps=2), "naive_fp4", keep=hb.Keep(last_fraction=0)))
    assert losses == other


def test_subclasses_of_linear_keep_their_forward():
    config = ours.quantize_config_(shallow(runs.small(gpt_oss_debugmodel(), ".")), keep=hb.Keep(last_fraction=0))
    found = {name: type(c).__qualname__ for name, c, _, _ in config.model_spec.model.traverse(Linear.Config)}
    assert found["layers.0.attention.wo"] == "ScaledBiasRowwiseLinear.Config"
    assert found["layers.0.attention.qkv_linear.wqkv"] == "RecipeLinear.Config"
    config = shallow(runs.small(gpt_oss_debugmodel(), "."))
    config.override.imports = [f"{HERE}.recipe_linear", f"{HERE}.recipe_checkpoint"]
    lines = apply_overrides(config.override, config)
    assert len(lines) == 3 and not any("ScaledBias" in line for line in lines)


def test_the_layers_of_their_config_and_siblings_of_one_config():
    config = ours.llama3_8b_first_85_pct_layers_nvfp4()
    found = [n for n, c, _, _ in config.model_spec.model.traverse(Linear.Config) if type(c) is ours.RecipeLinear.Config]
    theirs = nvfp4_bf16_tail_fqns(32, 0.15)
    names = [n for n, _, _, _ in llama3_8b().model_spec.model.traverse(Linear.Config)]
    assert found == [name for name in names if any(fqn in name for fqn in theirs)] and len(found) == 27 * 5
    split = qwen3_debugmodel_non_fused_qkv
    with pytest.raises(ValueError, match=r"torchtitan builds \S+wk .rule.*wv .* from one config; give them one recipe"):
        ours.quantize_config_(split(), rules={"*.wk": None})
    converted = ours.quantize_config_(split(), rules={"*.wk": "naive_fp4", "*.wv": "naive_fp4"}).model_spec.model
    kv = {n: hb.spec.parse_recipe(c.recipe) for n, c, _, _ in converted.traverse(ours.RecipeLinear.Config)}
    assert kv["layers.0.attention.qkv_linear.wkv"] == hb.recipes.naive_fp4()
    assert kv["layers.0.attention.qkv_linear.wq"] == hb.recipes.nvfp4()


def tensor_parallel_on_a_rank(rank: int, world: int, folder: str, is_sequence_parallel: bool):
    """Train a step with ranks that share layers; return its place, and of every layer which results are those of
    hb.linear on the whole tensors, bit for bit.
    """
    runs.alone(rank, world)
    config = short(layers=1, steps=1)
    config.dump_folder, config.training.global_batch_size = folder, 2
    config.training.max_norm = 1e9
    config.parallelism.spmd_backend, config.parallelism.tensor_parallel_degree = "partial_dtensor", world
    config.parallelism.enable_sequence_parallel = is_sequence_parallel
    calls, forward = {}, ours.RecipeLinear.forward

    def watched(self, input):
        y = forward(self, input)
        seen = calls.setdefault(plain_name(self.title.split("(")[0]), {"layer": self, "x": input, "y": y})
        seen["weights"] = whole(member.weight for member in self.amax_group or (self,))
        seen["w"], seen["place"] = whole([self.weight])[0], self.peek(0, input.device)
        y.register_hook(lambda dy: seen.update(dy=dy.full_tensor()))
        if input.requires_grad:
            input.register_hook(lambda dx: seen.update(dx=dx.full_tensor()))
        return y

    ours.RecipeLinear.forward = watched
    trainer, losses = runs.run(ours.quantize_config_(config, "nvfp4", keep=hb.Keep(last_fraction=0)), weights=True)
    found = {}
    for name, seen in calls.items():
        x, w = (t.requires_grad_() for t in (*whole([seen["x"]]), seen["w"]))
        amax = torch.stack([weight.abs().max() for weight in seen["weights"]]).amax().float()
        y = hb.linear(x, w, None, "nvfp4", rng=seen["place"], weight_amax=amax)
        y.backward(seen["dy"])
        gradient = seen["layer"].weight.grad.full_tensor()
        near = torch.allclose(y.float(), seen["y"].full_tensor().float(), rtol=2e-2, atol=2e-2)
        same_y, same_dw = torch.equal(y, seen["y"].full_tensor()), torch.equal(w.grad.float(), gradient)
        found[name] = (str(seen["y"].placements[0]), near, same_y, torch.equal(x.grad, seen["dx"]), same_dw)
    return trainer.checkpointer.run_state.rank, losses, found


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tokens whole", "tokens in parts"])
def test_ranks_that_share_layers_have_the_operands_of_one_process(tmp_path, is_sequence_parallel):
    """Of three GEMMs one sums over what lies in parts: its result is near, those of the other two have every bit."""
    results = ranks.run(2, tensor_parallel_on_a_rank, str(tmp_path), is_sequence_parallel, seconds=200)
    assert results[0] == results[1] and results[0][0] == 0  # both draw alike
    _, losses, found = results[0]
    print(found)
    assert len(found) == 5
    for place, near, same_y, same_dx, same_dw in found.values():
        assert near and same_dw and same_y is place.startswith("S") and (same_dx or place.startswith("S"))
    config = short(layers=1, steps=1)
    config.parallelism.spmd_backend, config.training.max_norm = "partial_dtensor", 1e9
    _, alone = runs.run(ours.quantize_config_(config, "nvfp4", keep=hb.Keep(last_fraction=0)), weights=True)
    assert losses == pytest.approx(alone, rel=1e-3)


STEPS = 200


def many_steps_on_a_rank(rank: int, world: int, folder: str, recipe: str, tensor_parallel: int):
    """Train, in bf16 for no recipe; return the losses and the tokens a second of all ranks."""
    runs.alone(rank, world)
    config = short(layers=1, steps=STEPS)
    config.dump_folder, config.parallelism.spmd_backend = folder, "partial_dtensor"
    config.parallelism.tensor_parallel_degree = tensor_parallel
    if recipe:
        config = ours.quantize_config_(config, recipe, keep=hb.Keep(last_fraction=0))
    begin = time.perf_counter()
    _, losses = runs.run(config, weights=True)
    tokens = STEPS * config.training.global_batch_size * config.training.seq_len
    return losses, tokens / (time.perf_counter() - begin)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tensor_parallel", [1, 2], ids=["FSDP2", "tensor parallel"])
def test_two_hundred_steps_on_two_ranks_beside_their_bf16(tmp_path, tensor_parallel):
    ends = {}
    for recipe in ("", "nvfp4"):
        given = str(tmp_path / f"{recipe or 'bf16'}"), recipe, tensor_parallel
        (losses, rate), (others, _) = ranks.run(2, many_steps_on_a_rank, *given, seconds=3000)
        assert losses == others and len(losses) == STEPS and losses[-1] < 0.5 * losses[0]
        ends[recipe] = sum(losses[-20:]) / 20
        print(f"{recipe or 'bf16'}: loss of the last 20 of {STEPS} steps {ends[recipe]:.4f}, {rate:.0f} tokens/s")
    assert ends["nvfp4"] == pytest.approx(ends[""], rel=0.03) and ends["nvfp4"] != ends[""]


def test_refusals():
    config = short()
    config.override.imports = [f"{HERE}.recipe_linear"]
    trainer = config.build()
    batch, _ = next(iter(trainer.dataloader))
    with pytest.raises(
        ValueError, match=r"no RunState to draw random bits from: let .*recipe_checkpoint to --override\.imp"
    ):
        trainer.model_parts[0](batch["input"], positions=batch["positions"])
    trainer.close()
    torch.distributed.destroy_process_group()
    config = short()
    config.override.imports = [f"{HERE}.recipe_checkpoint"]
    with pytest.raises(ValueError, match="Llama3Model: no layer follows a recipe; let .*recipe_linear to --override"):
        config.build()
    config = ours.quantize_config_(short(), schedule="1:bf16/nvfp4")
    assert config.training.disable_cuda_graphs and not short().training.disable_cuda_graphs
    config.training.disable_cuda_graphs = False
    with pytest.raises(ValueError, match="disable_cuda_graphs=False with schedule='1:bf16/nvfp4': .*replay the first"):
        config.build()
    torch.distributed.destroy_process_group()
    config = ours.quantize_config_(short(), hb.recipes.delayed_amax(every=2))
    assert config.training.disable_cuda_graphs
    config.training.disable_cuda_graphs = False
    with pytest.raises(ValueError, match=r"disable_cuda_graphs=False with recipe.amax=Delayed\(every=2"):
        config.build()
    torch.distributed.destroy_process_group()
    config = ours.quantize_config_(short())
    config.parallelism.spmd_backend = "full_dtensor"
    with pytest.raises(ValueError, match="spmd_backend='full_dtensor': .*; use 'spmd_types' or 'partial_dtensor'"):
        config.build()
    torch.distributed.destroy_process_group()
    with pytest.raises(ValueError, match=r"rules: '\*q_proj' matches no layer; names look like layers.0.attention"):
        ours.quantize_config_(short(), rules={"*q_proj": None})
    with pytest.raises(ValueError, match="nothing would be converted of 11 layers: kept: .*Change rules or keep"):
        ours.quantize_config_(short(), keep=hb.Keep(first_blocks=2))
    with pytest.raises(ValueError, match="evaluation='bf16': use one of 'high_precision', 'as_trained'"):
        ours.quantize_config_(short(), evaluation="bf16")
    with pytest.raises(TypeError, match="config=dict: give torchtitan's Trainer.Config"):
        ours.quantize_config_({})
    with pytest.raises(ValueError, match="recipe='fp4' is not a preset"):
        ours.quantize_config_(short(), "fp4")
