"""A block of the Llama family under torch's tensor and sequence parallel plan, each layer beside a whole one."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from functools import partial

import ranks
import torch
from shared_experts import Answers
from tensor_parallel_checks import ALL, differing_operands, recorded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.distributed import tp_styles
from halfbyte.nn.linear import forward_shared


class Attention(nn.Module):
    """Grouped-query attention over the heads that are here."""

    def __init__(self, dim: int, heads: int, groups: int):
        super().__init__()
        self.size = dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, groups * self.size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 8, groups: int = 4, hidden: int = 144):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.self_attn, self.mlp = Attention(dim, heads, groups), Mlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def sequence_plan(colwise=ColwiseParallel, rowwise=RowwiseParallel) -> dict:
    """Return the plan of torch's tutorial: tokens in parts between the layers, features inside them."""
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": gathered,
        "mlp": gathered,
        **{f"self_attn.{name}_proj": colwise() for name in "qkv"},
        "self_attn.o_proj": rowwise(output_layouts=Shard(1), use_local_output=False),
        **{f"mlp.{name}_proj": colwise() for name in ("gate", "up")},
        "mlp.down_proj": rowwise(output_layouts=Shard(1), use_local_output=False),
    }


def converted(recipe: str, dtype: torch.dtype = torch.float32, blocks: int = 1, **sizes: int):
    """Return blocks in one model and its RunState, equal on all ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(**sizes) for _ in range(blocks))).to(dtype)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.view(-1)[:: p.numel() // 5] *= 20  # each sibling has another amax
    model.to(ranks.device())
    state = hb.RunState(7, rank=0)  # ranks that share layers draw alike
    hb.quantize_(model, ALL[recipe], keep=hb.Keep(names=(), last_fraction=0), state=state)
    return model, state


class Watch:
    """Notes of every linear layer its input, the gradient of its output (DTensors made whole), and which one runs."""

    def __init__(self, model: nn.Module):
        self.given: dict[str, list[Tensor]] = {}
        self.running = ""
        for name, module in model.named_modules():
            if isinstance(module, hb.nn.Linear):
                module.register_forward_pre_hook(self._before(name))
                module.register_forward_hook(self._after(name), prepend=True)

    def _before(self, name: str):
        def hook(module, args):
            self.running, self.given[name] = name, [args[0].full_tensor().detach().clone()]

        return hook

    def _after(self, name: str):
        def hook(module, args, y):
            y.register_hook(lambda dy: self._of_gradient(name, dy))

        return hook

    def _of_gradient(self, name: str, dy) -> None:
        self.running = name
        self.given[name].append(dy.full_tensor().detach().clone())


def layers_in(model: nn.Module, x: Tensor) -> tuple[dict, dict]:
    """Return inputs and gradients of every layer of a parallel model, and the operands that it multiplied here."""
    watch = Watch(model)
    with recorded(lambda: watch.running) as found:
        y = model(x)
        y.backward(torch.ones_like(y).mul_(0.01))
    return watch.given, {name: [one for one in found if one[2] == name] for name in watch.given}


def block_operands(rank: int, world: int, recipe: str, dtype: torch.dtype, shards: int = 1) -> list[str]:
    """Return what differs between the layers of a parallel block and whole ones with the same inputs, on rank 0.

    shards: ranks of FSDP2, which see the same tokens here.
    """
    warnings.simplefilter("ignore", UserWarning)
    meshes = ranks.mesh(shards, world // shards, names=("dp", "tp"))
    mesh = meshes["tp"]
    model, _ = converted(recipe, dtype)
    alone = copy.deepcopy(model)
    parallelize_module(model[0], mesh, sequence_plan())
    if shards > 1:
        fully_shard(model[0], mesh=meshes["dp"])
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(ranks.device(), dtype)
    given, here = layers_in(model, distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_())
    every = ranks.gathered(here)
    if rank:
        return []
    found = [] if len(given) == 7 else [f"{sorted(given)}"]
    for name, (layer_x, dy) in given.items():
        with recorded() as expected:
            y = alone.get_submodule(name)(layer_x.requires_grad_())
            y.backward(dy)
        parts = [one[name] for one in every[: world // shards]]
        found += [f"{name}: {line}" for line in differing_operands(ranks.on_cpu(expected), parts)]
    return found


def recomputed_block(rank: int, world: int) -> list[str]:
    """Return which results of a parallel block differ, bit for bit, when its activations are computed again."""
    mesh, ends = ranks.mesh(world), []
    for again in (False, True):
        model, _ = converted("nvfp4")
        parallelize_module(model[0], mesh, sequence_plan())
        x = torch.randn(1, 16 * world, 64, generator=torch.Generator().manual_seed(1)).to(ranks.device())
        x = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.backward(torch.ones_like(y).mul_(0.01))
        ends.append({"y": y.to_local()} | {n: p.grad.to_local() for n, p in model.named_parameters()})
    return [name for name, t in ends[0].items() if not torch.equal(t, ends[1][name])]


def each(rank: int, world: int, function, every: list) -> list[str]:
    """Return what differs in any of several calls."""
    return [line for arguments in every for line in function(rank, world, *arguments)]


def codes_plan() -> dict:
    """Return the plan whose activations travel as codes."""
    rowwise = {"use_local_output": False}
    return {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": hb.distributed.NVFP4Colwise("q_proj", "k_proj", "v_proj"),
        "self_attn.o_proj": hb.distributed.NVFP4Rowwise(**rowwise),
        "mlp": hb.distributed.NVFP4Colwise("gate_proj", "up_proj"),
        "mlp.down_proj": hb.distributed.NVFP4Rowwise(**rowwise),
    }


@contextmanager
def watched_styles(model: nn.Module):
    """Note of every call of layers by our styles: their names, x, and the gradients of their outputs, made whole."""
    names = {id(module.weight): name for name, module in model.named_modules() if isinstance(module, hb.nn.Linear)}
    calls, running, run = {}, [""], tp_styles.run_parts

    def noted(x, layers, *rest):
        called = tuple(names[id(weight)] for weight in layers.weights)
        running[0] = called[0]
        outputs = run(x, layers, *rest)
        calls[called] = [x.full_tensor().detach().clone(), *[None] * len(called)]
        for i, y in enumerate(outputs):
            y.register_hook(partial(of_gradient, called, i))
        return outputs

    def of_gradient(called, i, dy):
        running[0], calls[called][1 + i] = called[0], dy.full_tensor().detach().clone()

    tp_styles.run_parts = noted
    try:
        with recorded(lambda: running[0]) as found:
            yield calls, found
    finally:
        tp_styles.run_parts = run


def codes_operands(rank: int, world: int, recipe: str, dtype: torch.dtype, sequences: int) -> list[str]:
    """Return what differs between a block whose activations travel as codes and whole layers, on rank 0."""
    warnings.simplefilter("error", UserWarning)  # nothing is gathered in its values
    warnings.filterwarnings("ignore", message=".*cut blocks.*")  # weights may be
    mesh = ranks.mesh(world)
    model, _ = converted(recipe, dtype)
    alone = copy.deepcopy(model)
    parallelize_module(model[0], mesh, codes_plan())
    x = torch.randn(sequences, 128 * world, 64, generator=torch.Generator().manual_seed(1)).to(ranks.device(), dtype)
    with watched_styles(model) as (calls, here):
        y = model(distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_())
        y.backward(torch.ones_like(y).mul_(0.01))
    every = ranks.gathered(here)
    if rank:
        return []
    found = [] if [len(names) for names in calls] == [3, 1, 2, 1] else [f"{list(calls)}"]
    for names, (layer_x, *dys) in calls.items():
        with recorded() as expected:
            outputs = forward_shared(layer_x.requires_grad_(), [alone.get_submodule(name) for name in names])
            torch.autograd.backward(outputs, dys)
        parts = [[one for one in made if one[2] == names[0]] for made in every]
        found += [f"{names}: {line}" for line in differing_operands(ranks.on_cpu(expected), parts)]
    return found


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank receives from others, by collective, pass and dtype."""

    def __init__(self, world: int):
        super().__init__()
        self.world, self.stage, self.bytes = world, "forward", {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind is DTensor for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            whole = out if name == "all_gather_into_tensor" else args[0]
            sent = whole.numel() * whole.element_size() * (self.world - 1) // self.world * (1 + (name == "all_reduce"))
            key = self.stage, name, str(whole.dtype).removeprefix("torch.")
            self.bytes[key] = self.bytes.get(key, 0) + sent
        return out


def traffic(rank: int, world: int, recipe: str, codes: bool, dim: int) -> dict:
    """Return the bytes that arrive in one forward and backward of a block in bf16."""
    mesh = ranks.mesh(world)
    model, _ = converted(recipe, torch.bfloat16, dim=dim, hidden=2 * dim)
    parallelize_module(model[0], mesh, codes_plan() if codes else sequence_plan())
    x = torch.randn(1, 128 * world, dim).to(ranks.device(), torch.bfloat16)
    x = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    model(x).float().sum()  # what DTensors learn once
    with Traffic(world) as counted:
        y = model(x)
        counted.stage = "backward"
        y.backward(torch.ones_like(y))
    return counted.bytes


def compiled_block(rank: int, world: int, codes: bool) -> list[str]:
    """Return which results of a compiled parallel block are not those of the eager one, bit for bit."""
    mesh, ends = ranks.mesh(world), []
    for compiled in (False, True):
        model, _ = converted("nvfp4")
        parallelize_module(model[0], mesh, codes_plan() if codes else sequence_plan())
        run = torch.compile(model, backend="aot_eager") if compiled else model
        x = torch.randn(1, 16 * world, 64, generator=torch.Generator().manual_seed(1)).to(ranks.device())
        y = run(distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_())
        y.backward(torch.ones_like(y).mul_(0.01))
        ends.append({"y": y.to_local()} | {n: p.grad.to_local() for n, p in model.named_parameters()})
    return [name for name, t in ends[0].items() if not torch.equal(t, ends[1][name])]


def fused_mlp(rank: int, world: int) -> list[str]:
    """Return which results of a fused MLP under torch's styles are not those of one process."""
    mesh, ends = ranks.mesh(world), []
    for shared in (False, True):
        torch.manual_seed(0)
        model = hb.nn.LayerNormMLP(64, 96, state=hb.RunState(1, rank=0)).to(ranks.device())
        if shared:
            first = {name: ColwiseParallel() for name in ("gate_proj", "up_proj")}
            parallelize_module(model, mesh, {**first, "down_proj": RowwiseParallel()})
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(ranks.device()).requires_grad_()
        y = model(x)
        y.backward(torch.ones_like(y))
        ends.append({"y": y, "dx": x.grad} | {n: p.grad for n, p in model.named_parameters()})
    own = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in ends[1].items()}
    # Kernels add up parts of the features in another order than all of them, which moves a code of what follows.
    limit = 1e-5 if ranks.device().type == "cpu" else 1e-2
    return [name for name, t in ends[0].items() if (own[name] - t).norm() > limit * t.norm()]


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return what every misuse of the styles is answered with."""
    found, mesh = Answers(), ranks.mesh(world)

    def projections() -> nn.Module:
        names = ("q_proj", "k_proj", "v_proj")
        return nn.ModuleDict({name: hb.nn.Linear(64, 64, bias=False, recipe="nvfp4") for name in names})

    def colwise(*names: str, change=lambda m: None) -> None:
        module = projections()
        change(module)
        parallelize_module(module, mesh, hb.distributed.NVFP4Colwise(*names))

    found.ask("a name twice", lambda: colwise("q_proj", "q_proj"))
    found.ask("a layer twice", lambda: colwise("q_proj", "k_proj", change=lambda m: m.update({"k_proj": m["q_proj"]})))

    def tie(module: nn.Module, name: str) -> None:
        module.get_submodule(name).weight = module["q_proj"].weight

    found.ask("tied", lambda: colwise("q_proj", "k_proj", change=lambda m: tie(m, "k_proj")))
    found.ask("tied to another", lambda: colwise("q_proj", change=lambda m: tie(m, "v_proj")))
    found.ask("nothing", lambda: colwise("q_proj", "up_proj"))
    found.ask("nothing twice", lambda: colwise("up_proj", "gate_proj"))
    style, two = hb.distributed.NVFP4Colwise("q_proj"), ranks.mesh(1, world, names=("dp", "tp"))
    found.ask("mesh of two", lambda: style._apply(projections(), two))
    fused, _ = converted("nvfp4")
    hb.nn.fuse_(fused)
    found.ask("fused", lambda: parallelize_module(fused[0].self_attn, mesh, {"q_proj": hb.distributed.NVFP4Colwise()}))
    found.ask("cached", lambda: colwise("q_proj", change=hb.cache_weights))

    def sums_elsewhere(module: nn.Module) -> None:
        module["q_proj"].weight.main_grad = torch.zeros(64, 64)

    found.ask("main_grad", lambda: colwise("q_proj", change=sums_elsewhere))
    first = {"q_proj": ColwiseParallel()}
    found.ask("two styles", lambda: colwise("q_proj", change=lambda m: parallelize_module(m, mesh, first)))

    def of_a_rank(module: nn.Module) -> None:
        module["k_proj"].recipe = "mxfp8" if rank else "nvfp4"

    found.ask("other recipe", lambda: colwise("q_proj", "k_proj", change=of_a_rank))
    frozen = projections().requires_grad_(False)
    tie(frozen, "k_proj")
    parallelize_module(frozen, mesh, hb.distributed.NVFP4Colwise("q_proj", "k_proj"))  # nothing is learned apart
    assert torch.equal(frozen["q_proj"].weight.to_local(), frozen["k_proj"].weight.to_local())
    assert not any(weight.requires_grad for weight in frozen.parameters()), "what was frozen stays so"
    return found


def values_of(rank: int, world: int) -> dict[str, bool]:
    """Return whose values count where every rank has others, of rows, columns and a bias, by src_data_rank."""
    found, mesh = {}, ranks.mesh(world)
    for source in (0, 1, None):
        for style, dim in ((hb.distributed.NVFP4Colwise(), 0), (hb.distributed.NVFP4Rowwise(), 1)):
            layer = nn.Sequential(hb.nn.Linear(32, 32, recipe="nvfp4").to(ranks.device()))
            for param in layer.parameters():
                param.data.fill_(rank)
            parallelize_module(layer, mesh, {"0": style}, src_data_rank=source)
            wanted = rank if source is None else source
            weight, bias = layer[0].weight, layer[0].bias
            same = all(bool((param.to_local() == wanted).all()) for param in (weight, bias))
            found[f"{source} {dim}"] = same and weight.to_local().shape[dim] == 32 // world
    return found


def whole_tokens(rank: int, world: int) -> list[str]:
    """Return what differs where x is a DTensor that is whole on every rank from one whose tokens lie in parts."""
    mesh, ends = ranks.mesh(world), []
    for place in (Shard(1), Replicate()):
        torch.manual_seed(0)
        layer = nn.Sequential(hb.nn.Linear(32, 48, recipe=ALL["row_scaled"], state=hb.RunState(1, rank=0)))
        parallelize_module(layer.to(ranks.device()), mesh, {"0": hb.distributed.NVFP4Colwise(use_local_output=False)})
        x = torch.randn(2, 16 * world, 32, generator=torch.Generator().manual_seed(1)).to(ranks.device())
        x = distribute_tensor(x, mesh, [place], src_data_rank=None).requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        weight = layer[0].weight.grad
        ends.append({"y": y.full_tensor(), "dx": x.grad.full_tensor(), "dw": weight.full_tensor()})
    return [name for name, t in ends[0].items() if not torch.equal(t, ends[1][name])]
