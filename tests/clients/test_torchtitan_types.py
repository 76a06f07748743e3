"""Ranks that share layers under torchtitan's spmd_types: plain parts, and a checker of types that is told of them.

FSDP2 of torch before 2.14 refuses to hold such parts, also where it would gather nothing: there it is left out;
`make test-integrations-full` runs these tests with torch 2.15 as well, in whose FSDP2 they are.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import titan_runs as runs
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.decoder_sharding import colwise_config, dense_param_placement, rowwise_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import parallelize
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_dist_gemm
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

import halfbyte as hb
from halfbyte.integrations import titan_types
from halfbyte.integrations import torchtitan as ours
from halfbyte.integrations.titan_limits import refuse_uncalled
from halfbyte.policy import plain_name

spmd = titan_types.spmd
KNOWS_PARTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def shared(folder: str, world: int, steps: int, *, is_sequence_parallel: bool, backend: str = "spmd_types"):
    """Return the config of a llama of one block whose layers all ranks share."""
    config = runs.small(llama3_debugmodel(), folder, steps=steps)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.training.global_batch_size, config.training.max_norm = 2, 1e9
    config.parallelism.spmd_backend, config.parallelism.tensor_parallel_degree = backend, world
    config.parallelism.enable_sequence_parallel = is_sequence_parallel
    if not KNOWS_PARTS:
        parallelize.apply_fsdp_to_decoder = lambda *arguments, **options: None
        for _, cfg, _, _ in config.model_spec.model.traverse(Linear.Config):
            cfg.param_init = None  # that of fused projections wants the whole: of a part it fails without FSDP2
        runs._fill = fill_parts
    return config


def fill_parts(model: nn.Module) -> None:
    """Give every parameter its part of values that depend on its name alone."""
    world, rank = ranks.dist.get_world_size(), ranks.dist.get_rank()
    for path, module in model.named_modules():
        sharding = getattr(module, "_sharding_config", None)
        for name, parameter in module.named_parameters(recurse=False):
            kind = None if sharding is None else sharding.state_shardings[name].per_axis_spmd_types()[titan_types.TP]
            dim, shape = getattr(kind, "dim", None), list(parameter.shape)
            if dim is not None:
                shape[dim] *= world
            called = f"{path}.{name}".replace("_checkpoint_wrapped_module.", "")
            generator = torch.Generator().manual_seed(zlib.crc32(called.encode()))
            whole = torch.randn(shape, generator=generator) * 0.05 + (parameter.dim() == 1)
            with torch.no_grad():
                parameter.copy_(whole if dim is None else whole.chunk(world, dim)[rank])


def joined(part: Tensor, dim: int) -> Tensor:
    return torch.cat(ranks.gathered(part.detach()), dim)


def summed(part: Tensor) -> Tensor:
    return torch.stack([one.float() for one in ranks.gathered(part.detach())]).sum(0)


def layers_on_a_rank(rank: int, world: int, folder: str, is_sequence_parallel: bool):
    """Train a step; return the losses and of every layer which results are those of hb.linear on the whole tensors."""
    runs.alone(rank, world)
    config = shared(folder, world, 1, is_sequence_parallel=is_sequence_parallel)
    calls, forward = {}, ours.RecipeLinear.forward

    def watched(self, input):
        y = forward(self, input)
        seen = calls.setdefault(plain_name(self.title.split("(")[0]), {"layer": self, "x": input, "y": y})
        seen["weights"] = [member.weight.detach().clone() for member in self.amax_group or (self,)]
        seen["w"], seen["place"] = self.weight.detach().clone(), self.peek(0, input.device)
        y.register_hook(lambda dy: seen.update(dy=dy.clone()))
        input.register_hook(lambda dx: seen.update(dx=dx.clone()))
        return y

    ours.RecipeLinear.forward = watched
    trainer, losses = runs.run(ours.quantize_config_(config, "nvfp4", keep=hb.Keep(last_fraction=0)), weights=True)
    found = {}
    for name, seen in sorted(calls.items()):
        dim = seen["layer"].as_part.dim
        x = joined(seen["x"], -1) if dim else seen["x"].detach()
        w, dy = joined(seen["w"], dim), seen["dy"] if dim else joined(seen["dy"], -1)
        amax = torch.stack([joined(weight, dim).abs().max() for weight in seen["weights"]]).amax().float()
        leaves = x.requires_grad_(), w.requires_grad_()
        y = hb.linear(*leaves, None, "nvfp4", rng=seen["place"], weight_amax=amax)
        y.backward(dy)
        grad = seen["layer"].weight.grad
        dw = grad.full_tensor() if hasattr(grad, "full_tensor") else joined(grad, dim)
        own = summed(seen["y"]) if dim else joined(seen["y"], -1)
        found[name] = (
            dim,
            torch.allclose(y.float(), own.float(), rtol=2e-2, atol=2e-2),
            torch.equal(y, own.to(y.dtype)),
            bool(dim) and torch.equal(x.grad, joined(seen["dx"], -1)),
            torch.equal(w.grad.float(), dw.float()),
        )
    return trainer.checkpointer.run_state.rank, losses, found


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tokens whole", "tokens in parts"])
def test_plain_parts_have_the_operands_of_one_process(tmp_path, is_sequence_parallel):
    """Of three GEMMs one sums over what lies in parts: its result is near, those of the other two have every bit."""
    results = ranks.run(2, layers_on_a_rank, str(tmp_path), is_sequence_parallel, seconds=200)
    assert results[0] == results[1] and results[0][0] == 0  # both draw alike
    _, losses, found = results[0]
    assert len(found) == 5 and {dim for dim, *_ in found.values()} == {0, 1}
    for dim, near, same_y, same_dx, same_dw in found.values():
        assert near and same_dw and (same_dx if dim else same_y)
    if is_sequence_parallel:
        return
    (alone,) = ranks.run(1, losses_on_a_rank, str(tmp_path), "nvfp4", False, "spmd_types", seconds=200)
    assert losses == pytest.approx(alone[:1], rel=1e-3)


def losses_on_a_rank(rank: int, world: int, folder: str, recipe: str, is_checked: bool, backend: str):
    """Train two steps, with the checker of types or not."""
    runs.alone(rank, world)
    config = shared(folder, world, 2, is_sequence_parallel=True, backend=backend)
    config.debug.spmd_typechecking = is_checked
    if recipe:
        config = ours.quantize_config_(config, recipe, keep=hb.Keep(last_fraction=0))
    return runs.run(config, weights=True)[1]


def checked_layers_on_a_rank(rank: int, world: int):
    """Return what the checker of types knows of what layers return, and how it meets an x that lies otherwise."""
    runs.alone(rank, world)
    dims = ParallelDims(1, 1, 1, world, 1, 1, world, "spmd_types")
    set_spmd_backend("spmd_types")
    found, axis = {}, dims.get_dense_tp_mesh().get_group()
    whole = ShardingConfig(state_shardings={"weight": dense_param_placement(tp=spmd.R)})
    for name, sharding in (("rows", colwise_config()), ("columns", rowwise_config()), ("kept", whole)):
        config = ours.RecipeLinear.Config(in_features=32, out_features=48, sharding_config=sharding, recipe="bf16")
        layer = config.build()
        layer.adopt("naive_fp4" if name != "kept" else "bf16", None)
        if name == "kept":
            titan_types.learn_types(layer, SimpleNamespace(tp=1))  # of ranks that share nothing
            Module.parallelize(layer, dims)
        else:
            layer.parallelize(dims)
        x, other = torch.randn(2, 2, 8, 32 // world if name == "columns" else 32).unbind()
        with get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
            lies, where = (spmd.V, spmd.PartitionSpec(None, None, axis)) if name == "columns" else (spmd.R, None)
            spmd.assert_type(x, {axis: lies}, where)
            y = layer(x)
            parts = spmd.get_partition_spec(y) or (None,) * 3
            found[name] = [spmd.get_axis_local_type(y, axis).name, [i for i in range(3) if parts[i]], y.shape[2]]
            spmd.assert_type(other, {axis: spmd.P if name == "columns" else spmd.I})
            try:
                layer(other)
            except spmd.SpmdTypeError:
                found[name].append("refuses another x")
    return found


def test_the_checker_of_types_knows_what_layers_take_and_return():
    for found in ranks.run(2, checked_layers_on_a_rank, seconds=120):
        assert found == {
            "rows": ["V", [2], 24, "refuses another x"],
            "columns": ["I", [], 48, "refuses another x"],  # summed behind the layer
            "kept": ["R", [], 48],
        }


@pytest.mark.skipif(not KNOWS_PARTS, reason="without FSDP2 weights lose their types where memory is given to them")
@pytest.mark.parametrize("recipe", ["nvfp4", "rl"])
def test_the_checker_of_types_is_content_and_changes_nothing(tmp_path, recipe):
    plain, checked = (
        ranks.run(2, losses_on_a_rank, str(tmp_path), recipe, is_checked, "spmd_types", seconds=200)
        for is_checked in (False, True)
    )
    assert plain == checked and plain[0] == plain[1] and len(plain[0]) == 2


@pytest.mark.skipif(not KNOWS_PARTS, reason="without FSDP2 weights would have another dtype")
def test_both_backends_train_alike(tmp_path):
    ours_, theirs = (
        ranks.run(2, losses_on_a_rank, str(tmp_path), "nvfp4", False, backend, seconds=200)[0]
        for backend in ("spmd_types", "partial_dtensor")
    )
    assert ours_ == theirs


def test_layers_whose_weights_another_module_multiplies_by_are_refused(tmp_path, monkeypatch):
    config = ours.quantize_config_(runs.small(llama3_debugmodel_dist_gemm(), tmp_path), keep=hb.Keep(last_fraction=0))
    message = r"AllGatherFusedQKVLinear multiplies by the weights of wqkv itself.*tp_gemm_backend='default'"
    with torch.device("meta"):
        model = config.model_spec.model.build()
    with pytest.raises(ValueError, match="layers.0.attention.qkv_linear: " + message):
        refuse_uncalled(SimpleNamespace(tp=2), [model], ours.RecipeLinear)
    refuse_uncalled(SimpleNamespace(tp=1), [model], ours.RecipeLinear)
    if KNOWS_PARTS:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NGPU": "2"}.items():
            monkeypatch.setenv(name, value)
        config.comm.mode, config.training.disable_cuda_graphs = "fake_backend", True
        config.parallelism.tensor_parallel_degree = 2
        with pytest.raises(ValueError, match=message):
            config.build()


REFUSED = {
    "whole": (
        ShardingConfig(state_shardings={"weight": dense_param_placement(tp=spmd.R)}),
        False,
        "every rank has all of its weight",
    ),
    "bias": (rowwise_config(), True, "its output is summed over ranks, each of which would add the whole bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_other_bytes_is_refused_by_name(case):
    sharding, has_bias, reason = REFUSED[case]
    layer = ours.RecipeLinear.Config(in_features=32, out_features=48, bias=has_bias, sharding_config=sharding).build()
    dims = SimpleNamespace(tp=2, spmd_backend="spmd_types")
    backend = "tensor_parallel_degree=2 with spmd_backend='spmd_types': "
    with pytest.raises(ValueError, match=rf"RecipeLinear.*{backend}{reason}.*; use spmd_backend='partial_dtensor', or"):
        layer.parallelize(dims)
