"""What ranks check about ZeroOptimizer; every function runs on every rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import small_models
import torch
import torch.distributed as dist

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer, buckets, scales
from halfbyte.tensor import PrimaryWeight

TIMEOUT = timedelta(seconds=20)


TILED = hb.GemmSpec(a=hb.NVFP4(), b=hb.NVFP4(block=(16, 16)))
LEAN = hb.Recipe(fprop=TILED, dgrad=TILED)
"""Codes in both GEMMs that read a weight, and nothing else that takes time."""


class Bigram(torch.nn.Module):
    """The least that learns and has a shared amax: an MLP between embedding and head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(11, dim)
        self.mlp = small_models.Mlp(dim)
        self.lm_head = torch.nn.Linear(dim, 11, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.mlp(self.embed_tokens(tokens)))


def build(
    rank: int, weights: str, recipe="nvfp4", dim: int = 16, *, blocks: int = 2, seed: int = 0, group=None, **config
):
    torch.manual_seed(seed)
    model = (small_models.Decoder(blocks, dim) if blocks else Bigram(dim)).bfloat16()
    report = hb.quantize_(model, recipe, keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    options = ZeroConfig(**{"weights": weights, "bucket_numel": 3000, "max_norm": 1.0, "timeout": TIMEOUT, **config})
    adamw = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1, fused=True)
    zero = ZeroOptimizer(model, adamw, group, param_options=decay_matrices, config=options)
    return model, report.state, zero


def decay_matrices(name, param):
    return {} if param.dim() >= 2 else {"weight_decay": 0.0}


def tokens(rank: int, step: int) -> torch.Tensor:
    first = torch.randint(0, 11, (2, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (first + 3 * torch.arange(8)) % 11


def loss_of(model, x):
    logits = model(x[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


def train(rank: int, model, state, zero, steps, micro_batches: int = 1) -> list[tuple[float, float]]:
    out = []
    for step in steps:
        for micro in range(micro_batches):
            x = tokens(rank, step * micro_batches + micro)
            if micro < micro_batches - 1:
                with zero.accumulate():
                    loss_of(model, x).backward()
            else:
                loss = loss_of(model, x)
                loss.backward()
            state.advance()
        norm = zero.step()
        out.append((loss.item(), norm.item()))
    return out


def same_losses(rank: int, world: int, steps: int, recipe, options: dict) -> list:
    """The run that holds only codes has the losses of the run that quantizes whole bf16 weights in every forward."""
    runs = {}
    for weights in ("nvfp4", "plain"):
        model, state, zero = build(rank, weights, recipe, **options)
        is_primary = [isinstance(p, PrimaryWeight) for p in model.parameters()]
        assert any(is_primary) == (weights == "nvfp4")
        runs[weights] = train(rank, model, state, zero, range(steps))
        zero.synchronize()
    assert runs["nvfp4"] == runs["plain"], "losses differ"
    losses = [loss for loss, _ in runs["nvfp4"]]
    assert losses[-1] < losses[0] or steps < 10
    return losses


def four_ranks(rank: int, world: int) -> None:
    same_losses(rank, world, 8, "nvfp4", {"dim": 24})
    saved, after = checkpoint_of_a_run(rank, world)
    # Two of the ranks go on from what four wrote.
    pair = dist.new_group([0, 1])
    if rank < 2:
        other_world_size(rank, pair, saved, after)
    dist.barrier()
    uneven_experts(rank, world)
    groups_in_a_ring(rank)


def two_ranks(rank: int, world: int) -> None:
    same_losses(rank, world, 15, "four_over_six", {"dim": 16, "bucket_numel": 1 << 20})
    messages_of_a_step(rank, world)
    accumulation(rank, world)
    mean_gradients_and_clipping(rank, world)
    a_copy_of_the_model(rank, world)
    refusals(rank, world)
    differing_models(rank, world)
    a_rank_without_experts(rank)
    a_group_of_one(rank)
    notes_are_taken_away(rank, world)
    a_checkpoint_of_one_rank(rank)


def messages_of_a_step(rank: int, world: int) -> None:
    """A step gathers each bucket once, and the scales of all of them in one message: half a byte and a 256th."""
    model, state, zero = build(rank, "nvfp4", dim=64, bucket_numel=5000)
    sent = []

    def count(whole, own, **options):
        assert whole.numel() == world * own.numel()
        sent.append(whole.numel() * whole.element_size())
        return gather(whole, own, **options)

    gather = scales.all_gather
    before = zero.traffic["gathered"]
    with mock.patch.object(scales, "all_gather", count), mock.patch.object(buckets, "all_gather", count):
        train(rank, model, state, zero, range(1))
    coded = [bucket for bucket in zero.buckets if bucket.quantized]
    assert len(coded) > 5 and len(sent) == len(zero.buckets) + 1
    assert zero.traffic["gathered"] - before == sum(sent)
    tiled = sum(param.numel() for param in zero.names.values() if isinstance(param, PrimaryWeight))
    plain = sum(2 * bucket.plan.numel for bucket in zero.buckets if not bucket.quantized)
    padding = sum(bucket.plan.numel for bucket in coded) - tiled
    assert tiled * (1 / 2 + 1 / 256) <= sum(sent) - plain <= tiled * 0.504 + padding + world * len(coded)


def a_checkpoint_of_one_rank(rank: int) -> None:
    """`if rank == 0: state_dict()` is an error after the timeout, not a hang."""
    _, _, zero = build(rank, "nvfp4", blocks=0)  # which on a busy machine takes longer than the timeout below
    zero.config = replace(zero.config, timeout=timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"state_dict: ranks \[1\] did not make the same call within 0.3 s"):
            zero.state_dict()
    dist.barrier()


def checkpoint_of_a_run(rank: int, world: int):
    """A run goes on from its checkpoint with the same losses; the checkpoint is whole and holds no codes."""
    model, state, zero = build(rank, "nvfp4")
    train(rank, model, state, zero, range(4))
    saved, position = zero.state_dict(), state.state_dict()
    plain = small_models.Decoder(2, 16)
    plain.load_state_dict(saved["masters"])
    assert all(type(tensor) is torch.Tensor and tensor.dtype == torch.float32 for tensor in saved["masters"].values())
    after = train(rank, model, state, zero, range(4, 7))
    model, state, zero = build(rank, "nvfp4", seed=5)
    zero.load_state_dict(saved)
    state.load_state_dict(position)
    assert train(rank, model, state, zero, range(4, 7)) == after
    return saved, after


def other_world_size(rank: int, group, saved: dict, after: list) -> None:
    """Masters and optimizer state survive another number of ranks unchanged, and the codes are those of the masters."""
    model, _, zero = build(rank, "nvfp4", group=group)
    zero.load_state_dict(saved)
    again = zero.state_dict()
    for name, master in saved["masters"].items():
        assert torch.equal(again["masters"][name], master), name
        for key, value in saved["state"][name].items():
            same = torch.equal(again["state"][name][key], value) if isinstance(value, torch.Tensor) else True
            assert same and again["state"][name].keys() == saved["state"][name].keys(), (name, key)
    assert [g["weight_decay"] for g in again["groups"]] == [0.1, 0.0] == [g["weight_decay"] for g in saved["groups"]]
    zero.synchronize()
    for name, param in model.named_parameters():
        master = saved["masters"][name].bfloat16()
        if isinstance(param, PrimaryWeight):
            whole = hb.quantize(master, param.spec, amax=param.blocks.amax)
            assert all(torch.equal(a, b) for a, b in zip(param.blocks, whole.blocks, strict=True)), name
        else:
            assert torch.equal(param, master), name


class Experts(torch.nn.Module):
    """Every rank of a half of the ranks has the same experts; the halves have three and one."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 48, dtype=torch.bfloat16) for _ in range((3, 1)[half]))

    def forward(self, x):
        x = self.shared(x)
        return sum(expert(x).sum(-1) for expert in self.experts)


def groups_in_a_ring(rank: int) -> None:
    """Pairs (0, 1), (1, 2), (2, 0), whose experts each rank registers in another order: no rank waits for ever."""
    pairs = {name: dist.new_group(list(ranks)) for name, ranks in (("a", (0, 1)), ("b", (1, 2)), ("c", (0, 2)))}
    everyone = dist.new_group([0, 1, 2])
    if rank == 3:
        return
    names = {0: "ac", 1: "ba", 2: "cb"}[rank]
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16, bias=False).bfloat16() for name in names})
    hb.quantize_(model, "nvfp4", keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    groups = {f"{name}.*": pairs[name] for name in names}
    zero = ZeroOptimizer(model, group=everyone, expert_groups=groups, config=ZeroConfig(timeout=TIMEOUT))
    before = zero.state_dict()["masters"]
    sum(layer(torch.ones(1, 16).bfloat16()).float().sum() for layer in model.values()).backward()
    assert zero.step().isfinite()
    assert not any(torch.equal(before[name], after) for name, after in zero.state_dict()["masters"].items())


def a_group_of_one(rank: int) -> None:
    """Ranks of which each trains alone, as with tensor parallelism alone, do not wait for each other."""
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    model, state, zero = build(rank, "nvfp4", blocks=0, group=own)
    train(rank, model, state, zero, range(1))
    if rank == 0:
        zero.load_state_dict(zero.state_dict())


def notes_are_taken_away(rank: int, world: int) -> None:
    """The key-value store of a long run does not grow with the number of its checkpoints."""
    store = dist.distributed_c10d._get_default_store()
    _, _, zero = build(rank, "nvfp4", blocks=0)
    counts = []
    for _ in range(4):
        zero.state_dict()
        dist.barrier()
        counts.append(sum(store.check([f"halfbyte/ZeroOptimizer.state_dict/0-1/{n}/{rank}"]) for n in range(200)))
        dist.barrier()
    assert counts[0] == counts[-1] <= 2, counts


def uneven_experts(rank: int, world: int) -> None:
    """Experts are reduced over the ranks that hold them, divided by all ranks; the norm counts each of them once."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    torch.manual_seed(half)
    model = Experts(half)
    hb.quantize_(model, "nvfp4", keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    config = ZeroConfig(bucket_numel=2000, max_norm=0.5)
    sgd = partial(torch.optim.SGD, lr=0.5)
    zero = ZeroOptimizer(model, sgd, expert_groups={"experts.*": groups[half]}, config=config)
    before = zero.state_dict()["masters"]
    assert all(isinstance(expert.weight, PrimaryWeight) for expert in model.experts)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank)).bfloat16()
    # What each rank alone would have as gradients, before they are taken from the parameters.
    grads = torch.autograd.grad(model(x).float().square().mean(), list(model.parameters()))
    own = {name: grad.float() for (name, _), grad in zip(model.named_parameters(), grads, strict=True)}
    squares = torch.zeros(())
    for name, grad in own.items():
        is_expert = name.startswith("experts")
        dist.all_reduce(grad, group=groups[half] if is_expert else None)
        grad /= world
        squares += grad.square().sum() / (2 if is_expert else 4)  # each of the ranks that hold it adds its part
    dist.all_reduce(squares)
    model(x).float().square().mean().backward()
    norm = zero.step()
    assert torch.allclose(norm, squares.sqrt(), rtol=1e-4), (norm, squares.sqrt())
    factor = min(1.0, 0.5 / (squares.sqrt().item() + 1e-6))
    after = zero.state_dict()["masters"]
    for name, grad in own.items():
        expected = before[name] - 0.5 * factor * grad
        assert torch.allclose(after[name], expected, rtol=1e-5, atol=1e-6), name
    assert min(bucket.plan.share for bucket in zero.buckets) > 0


def a_rank_without_experts(rank: int) -> None:
    """One rank has all experts of some and the other none; what both have follows both."""
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    torch.manual_seed(0)
    model = Experts(0)
    del model.experts[len(model.experts) * (1 - rank) :]
    zero = ZeroOptimizer(model, partial(torch.optim.SGD, lr=0.5), expert_groups={"experts.*": own})
    before = zero.state_dict()["masters"]
    model.shared(torch.full((1, 32), rank + 1.0).bfloat16()).sum().backward()
    zero.step()
    after = zero.state_dict()["masters"]
    assert len(after) == 2 + 6 * (1 - rank)
    assert torch.equal(after["shared.weight"], before["shared.weight"] - 0.5 * 1.5)


def accumulation(rank: int, world: int) -> None:
    """Micro-batches add up as in one buffer of the whole gradient."""
    runs = {}
    for weights in ("nvfp4", "plain"):
        model, state, zero = build(rank, weights, grad_dtype=torch.float32)
        runs[weights] = train(rank, model, state, zero, range(3), micro_batches=3)
    assert runs["nvfp4"] == runs["plain"]
    once = build(rank, "nvfp4")
    assert train(rank, *once, range(1)) != runs["nvfp4"][:1]


def mean_gradients_and_clipping(rank: int, world: int) -> None:
    """A step equals that of an optimizer on whole parameters with averaged, clipped gradients."""
    torch.manual_seed(0)
    model = small_models.Decoder(1)  # fp32, no recipe: every parameter is plain
    twin = small_models.Decoder(1)
    twin.load_state_dict(model.state_dict())
    config = ZeroConfig(bucket_numel=500, max_norm=0.05)
    zero = ZeroOptimizer(model, partial(torch.optim.AdamW, lr=0.01), config=config)
    adamw = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step in range(3):
        x = tokens(rank, step)
        loss_of(model, x).backward()
        loss_of(twin, x).backward()
        for param in twin.parameters():
            dist.all_reduce(param.grad)
            param.grad /= world
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        assert torch.allclose(zero.step(), norm, rtol=1e-5)
        adamw.step()
        adamw.zero_grad()
    zero.synchronize()
    for (name, param), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.allclose(param, other, rtol=1e-4, atol=1e-6), name


def a_copy_of_the_model(rank: int, world: int) -> None:
    """A copy has the values of its time and is not trained along; it waits for no gather and has no masters."""
    model, state, zero = build(rank, "nvfp4")
    train(rank, model, state, zero, range(1))
    zero.synchronize()
    twin, x = copy.deepcopy(model), tokens(rank, 5)
    before = loss_of(twin, x)
    assert torch.equal(before, loss_of(model, x))
    train(rank, model, state, zero, range(1, 2))
    assert torch.equal(before, loss_of(twin, x))
    assert not torch.equal(before, loss_of(model, x))


def refusals(rank: int, world: int) -> None:
    """A checkpoint that does not fit is refused on every rank, and changes nothing."""
    _, _, zero = build(rank, "nvfp4")
    good = zero.state_dict()

    def without(part: str) -> dict:
        return {**good, part: dict(list(good[part].items())[1:])}

    bad = [
        ({}, "not of a ZeroOptimizer"),
        *(({**good, part: None}, "not of a ZeroOptimizer") for part in ("masters", "state", "groups", "scalars")),
        (without("masters"), "on one side only"),
        (
            {**good, "masters": {name: t.long() for name, t in good["masters"].items()}},
            "is int64 .*, expected is float32",
        ),
        ({**good, "scalars": {"step": "floaty"}}, "'floaty': no dtype"),
        (without("state"), "on one side only"),
        ({**good, "groups": good["groups"][:1]}, "grouped as"),
        ({**good, "masters": {name: t[:1] for name, t in good["masters"].items()}}, r"is float32 \[1, .*expected"),
    ]
    for state, reason in bad:
        # Only one rank has the bad one: the others hear of it.
        with pytest.raises(ValueError, match=f"^rank {world - 1}: .*{reason}"):
            zero.load_state_dict(state if rank == world - 1 else good)
    again = zero.state_dict()
    assert all(torch.equal(again["masters"][name], t) for name, t in good["masters"].items())


def under_fsdp1(rank: int, world: int) -> None:
    """A layer of one value leaves nothing to the second rank, where a size would be divided by."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for features in (1, 64):
        layer, cpu = torch.nn.Linear(features, 1, bias=False), torch.device("cpu")
        wrapped = FullyShardedDataParallel(layer, use_orig_params=True, device_id=cpu)
        for model in (wrapped, torch.nn.Sequential(wrapped)):
            with pytest.raises(ValueError, match="FullyShardedDataParallel has sharded it already.* use fully_shard"):
                ZeroOptimizer(model)


def differing_models(rank: int, world: int) -> None:
    """Other shapes, recipes or settings on one rank are an error on all, and a rank that is missing is named."""
    for options, reason in (
        ({"dim": 16 + 16 * rank}, "the parameters differ"),
        ({"recipe": ("nvfp4", "four_over_six")[rank]}, "the parameters differ"),
        ({"bucket_numel": 1000 + rank}, "config is"),
    ):
        with pytest.raises(ValueError, match=reason):
            build(rank, "nvfp4", **options)
    for recipes in (("mxfp8", "bf16"), ("nvfp4", "nvfp4_forward")):  # those of GEMMs without the weight in tiles too
        with pytest.raises(ValueError, match="the parameters differ"):
            build(rank, "nvfp4", recipes[rank])
    for weights in ("nvfp4", "plain"):
        with pytest.raises(ValueError, match="the parameters differ"):
            ZeroOptimizer(siblings((("q", "k"), ("k", "v"))[rank]), config=ZeroConfig(weights=weights))
    pair = dist.new_group([0, 1])
    for options, reason in (
        ({"expert_groups": {"experts.*": pair}}, r"expert_groups: .* of ranks \[0, 1\] differ: .*experts.1.weight"),
        ({"expert_groups": {"experts.*": pair} if rank else {}}, "the parameters differ"),
        ({"param_options": (None, decay_matrices)[rank]}, "the parameters differ: .*weight_decay"),
        ({"expert_groups": {"other.*": pair}}, r"expert_groups: 'other\.\*' matches no parameter"),
    ):
        torch.manual_seed(0)
        with pytest.raises(ValueError, match=reason):
            ZeroOptimizer(Experts(rank if "expert_groups" in options else 0), **options)
    # Groups of the same ranks count as one, whatever addresses they have on each.
    groups = {f"experts.{i}.*": dist.new_group([0, 1]) for i in (2, 0, 1)}
    torch.manual_seed(0)
    ZeroOptimizer(Experts(0), expert_groups=groups)
    with pytest.raises(ValueError, match=r"expert_groups: .* of ranks \[0, 1\] differ: .*experts.1.weight"):
        ZeroOptimizer(Experts(rank), expert_groups=groups)
    with pytest.raises((ValueError, TypeError)[rank], match=r"^(rank 1: TypeError: )?param_options returned None"):
        ZeroOptimizer(Experts(0), param_options=lambda *_: {} if rank == 0 else None)
    differing_optimizers(rank)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"ranks \[1\] did not make the same call within 0.3 s"):
            build(rank, "nvfp4", timeout=timedelta(seconds=0.3))
    dist.barrier()


def siblings(shared: tuple[str, ...]) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16, bias=False) for name in "qkv"}).bfloat16()
    hb.quantize_(model, "nvfp4", keep=small_models.NOTHING_KEPT, state=hb.RunState(0), share_amax=(shared,))
    return model


def differing_optimizers(rank: int) -> None:
    """Another optimizer, or other options of it, are an error on both ranks; objects in options may differ."""
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    for ours, reason in (
        ((adamw, sgd), r"optimizer: torch.optim.adamw.AdamW on rank 0, torch.optim.sgd.SGD on rank 1"),
        ((partial(sgd, lr=0.1), partial(sgd, lr=0.2)), r"optimizer: .*\('lr', 0.1\).* on rank 0, .*\('lr', 0.2\).*"),
        ((partial(sgd, momentum=0.9), sgd), "optimizer: .*'momentum', 0.9.* on rank 0, .*'momentum', 0"),
        ((adamw, partial(adamw, lr=torch.tensor(0.01))), r"\('lr', 0.001\).* on rank 0"),
        ((adamw, partial(adamw, lr=-1.0)), "Invalid learning rate: -1.0"),
    ):
        with pytest.raises(ValueError, match=reason):
            ZeroOptimizer(torch.nn.Linear(4, 4), ours[rank])

    def with_an_object(groups):
        return sgd([{**group, "note": object()} for group in groups])

    ZeroOptimizer(torch.nn.Linear(4, 4), with_an_object)
