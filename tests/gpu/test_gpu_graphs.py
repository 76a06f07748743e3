"""CUDA graphs, inductor, offloading and checkpointing on a GPU: the bits of an eager step, and fewer bytes there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import halfbyte as hb
from halfbyte.train import config as configs
from halfbyte.train import data, loop
from halfbyte.train.graphs import WARM_UP, GraphedStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")
NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)


class Block(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = hb.nn.forward_shared(x, (self.q_proj, self.k_proj, self.v_proj))
        return x + self.o_proj(torch.nn.functional.silu(q) * k + v)


def model_and_state(recipe, depth=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth))).to(CUDA)
    state = hb.RunState(3).to(CUDA)
    hb.quantize_(model, recipe, keep=NOTHING_KEPT, state=state)
    return model, state


def inputs(count, tokens=192):
    generator = torch.Generator(CUDA).manual_seed(1)
    return [torch.randn(tokens, 256, device=CUDA, generator=generator) for _ in range(count)]


def train(recipe, *, graph: bool, cached: bool | str = False, compiled=False, steps=WARM_UP + 3, follows=None):
    """Return losses and final weights of steps of two micro-batches, and where the next would draw."""
    model, state = model_and_state(recipe)
    lr = torch.tensor(1e-3, device=CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
    if cached:
        hb.cache_weights(model, optimizer, dtype=torch.bfloat16, decoded=cached == "decoded")

    if follows:
        state.follow({"model": model, "optimizer": optimizer}[follows])
    for block in model if compiled else ():
        block.compile(fullgraph=True, dynamic=False)

    def step(*batches):
        total = torch.zeros((), device=CUDA)
        for x in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            if not follows:
                state.advance()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return (total,)

    run = GraphedStep(step, CUDA) if graph else step
    losses = [run(*inputs(2))[0].clone() for _ in range(steps)]
    return [*losses, *(p.detach() for p in model.parameters()), torch.tensor(state.next_position)]


@pytest.mark.parametrize("follows", ["model", "optimizer"])
def test_replays_move_a_position_that_follows(follows):
    """A followed model moves as a loop of one's own does, a followed optimizer once a step."""
    expected = train("nvfp4", graph=False, follows=None if follows == "model" else follows)
    for a, b in zip(expected, train("nvfp4", graph=True, follows=follows), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cached", [False, True, "decoded"])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd", "four_over_six"])
def test_a_replayed_training_step_is_the_eager_step_at_its_position(recipe, cached):
    eager = train(recipe, graph=False, cached=cached)
    for a, b in zip(eager, train(recipe, graph=True, cached=cached), strict=True):
        assert torch.equal(a, b)
    if cached:
        for a, b in zip(eager, train(recipe, graph=False, cached=False), strict=True):
            assert torch.equal(a, b)


def test_a_captured_step_follows_the_rank():
    """`set_rank` and `load_state_dict` write where the graph reads."""
    results = []
    for graph in (False, True):
        model, state = model_and_state(hb.recipes.nvfp4(hadamard=hb.Hadamard(signs="fresh")), depth=1)
        (x,) = inputs(1)

        def gradient(x, model=model, state=state):
            model.zero_grad()
            model(x).square().sum().backward()
            state.advance()
            return (model[0].q_proj.weight.grad.clone(),)

        step = GraphedStep(gradient, CUDA) if graph else gradient
        for _ in range(WARM_UP + 1):
            step(x)
        start = state.state_dict()
        for rank in (0, 3, 0):
            state.set_rank(rank).load_state_dict(start)
            results.append(step(x)[0].clone())
    eager, replayed = results[:3], results[3:]
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    assert torch.equal(eager[0], eager[2]) and not torch.equal(eager[0], eager[1])


def test_compiled_blocks_replay_like_compiled_blocks():
    torch._dynamo.reset()
    plain = train("nvfp4", graph=False, cached=True, compiled=True)
    for a, b in zip(plain, train("nvfp4", graph=True, cached=True, compiled=True), strict=True):
        assert torch.equal(a, b)


def test_replays_draw_other_bits_which_come_again():
    model, state = model_and_state("nvfp4", depth=1)
    (x,) = inputs(1)

    def gradient(x):
        model.zero_grad()
        model(x).square().sum().backward()
        state.advance()
        return (model[0].q_proj.weight.grad.clone(),)

    step = GraphedStep(gradient, CUDA)
    for _ in range(WARM_UP):
        step(x)
    start = state.state_dict()
    first = [step(x)[0] for _ in range(3)]
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    state.load_state_dict(start)
    for a, b in zip(first, [step(x)[0] for _ in range(3)], strict=True):
        assert torch.equal(a, b)
    state.load_state_dict(start)
    for a in first:
        assert torch.equal(a, gradient(x)[0])


def test_the_trainer_gives_the_same_losses_with_and_without_a_graph(tmp_path):
    (tmp_path / "text.txt").write_text("sixteen values share one scale and two share one byte " * 400)
    config = configs.tiny()
    config = replace(
        config,
        data=replace(config.data, corpus=str(tmp_path / "text.txt"), accumulate=2),
        optim=replace(config.optim, steps=10),
        recipe_schedule="6:bf16/nvfp4",
        device="cuda",
        dtype="bfloat16",
        fuse="off",
        compile="off",
    )
    corpus, results = data.load_data(config.data, tmp_path), []
    for graph, cached in (("off", False), ("on", False), ("on", True)):
        run = replace(config.run, out=tmp_path / f"{graph}{cached}", graph=graph, cache_weights=cached)
        results.append(loop.train(replace(config, run=run), "nvfp4", corpus)["held_out_loss"])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd"])
def test_inductor_gives_the_bits_of_eager(recipe):
    model, _ = model_and_state(recipe)
    model = model.bfloat16()
    (x,) = inputs(1)
    results = []
    with torch._inductor.config.patch(emulate_precision_casts=True):
        for function in (model, torch.compile(model, fullgraph=True, dynamic=False)):
            model.zero_grad()
            own = x.bfloat16().requires_grad_()
            y = function(own)
            y.backward(torch.ones_like(y))
            results.append([y.detach(), own.grad, *(p.grad for p in model.parameters())])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


def test_torchs_own_graphs_read_cached_weights_where_they_are():
    model, _ = model_and_state("nvfp4_mxfp8_bwd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x,) = inputs(1)
    with hb.cache_weights(model, optimizer), torch.no_grad():
        function = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            y = function(x).clone()
            torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()


def saved_on_gpu(model, x, context) -> int:
    """Return how many bytes on the GPU a forward leaves behind for its backward, its output not counted."""
    x = x.detach().requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with context, torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated() - y.nbytes
    y.sum().backward()
    return after - before


def test_four_bit_bytes_leave_the_gpu():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(1024, 1024, bias=False, device=CUDA))
    x = torch.randn(4096, 1024, device=CUDA, dtype=torch.bfloat16)
    plain = saved_on_gpu(layer, x, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    hb.quantize_(layer, "nvfp4", keep=NOTHING_KEPT, state=hb.RunState(0).to(CUDA))
    kept, moved = [], []

    def pack(tensor):
        moved.append(tensor.nbytes)
        return tensor.cpu()

    saved_on_gpu(layer, x, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))  # compiles
    kept = saved_on_gpu(layer, x, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    left = saved_on_gpu(layer, x, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(CUDA)))
    elements = 4096 * 1024 + 1024 * 1024
    assert plain >= 2 * 1024 * 1024  # autocast's copy of the weight; x is the caller's
    assert elements * 9 // 16 <= kept <= 1.02 * elements * 9 / 16 + 4096
    assert left <= 4096 and sum(moved) <= elements * 9 // 16 + 4096


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_checkpointed_is_bitwise_not_checkpointed(kind):
    model, _ = model_and_state("nvfp4")
    (x,) = inputs(1)
    options = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, hb.selective_checkpoint_ops())
    results = []
    for function in (model, lambda x: checkpoint(model, x, use_reentrant=False, **options)):
        model.zero_grad()
        own = x.detach().requires_grad_()
        function(own).square().sum().backward()
        results.append([own.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
