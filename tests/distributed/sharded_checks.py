"""What sharded models do on one of several ranks: functions for ranks.run, with what they return."""

import copy

import torch
from small_models import NOTHING_KEPT, TOKENS, decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import halfbyte as hb

MLP_PLAN = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}


def converted(**options):
    model = decoder(2)
    return model, hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, **options).state


def trained(model, state):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(TOKENS).square().mean().backward()
        state.advance()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in map(torch.Tensor.detach, model.parameters())]


def fsdp_by_block(rank, world):
    """Whether equal data on all ranks, sharded block by block, trains to the bits of one process."""
    alone = trained(*converted())
    model, state = converted()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    sharded = trained(model, state)
    return all(torch.equal(a, b) for a, b in zip(alone, sharded, strict=True))


def fsdp_layer_by_layer(rank, world):
    """Whether the same holds for every layer alone, where no amax is shared."""
    alone = trained(*converted(share_amax=()))
    model, state = converted(share_amax=())
    for module in model.modules():
        if isinstance(module, hb.nn.Linear):
            fully_shard(module)
    fully_shard(model)
    return all(torch.equal(a, b) for a, b in zip(alone, trained(model, state), strict=True))


def refusals(rank, world):
    """The messages of everything that is refused, by name."""
    mesh = init_device_mesh("cpu", (world,))
    kept, _ = converted(rules={"*mlp*": None})
    expected = kept(TOKENS)
    parallelize_module(kept.layers[0].mlp, mesh, MLP_PLAN)
    assert torch.allclose(kept(TOKENS), expected, atol=1e-5), "in high precision layers run sharded"
    cases = (one_by_one, fused_norm, experts, plain_function)
    return {case.__name__: message_of(case, mesh) for case in (*cases, unquantized, unquantized_while_whole)}


def message_of(case, mesh):
    try:
        case(mesh)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def one_by_one(mesh):
    model, _ = converted()
    for module in model.modules():
        if isinstance(module, hb.nn.Linear):
            fully_shard(module, mesh=mesh)
    model(TOKENS)


def fused_norm(mesh):
    layer = hb.nn.LayerNormLinear(16, 32)
    parallelize_module(layer, mesh, {"norm": SequenceParallel()})
    layer(torch.ones(1, 4, 16))


def experts(mesh):
    layer = hb.nn.GroupedLinear(2, 16, 16)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
    layer(torch.ones(4, 16), torch.tensor([2, 4], dtype=torch.int32))


def plain_function(mesh):
    w = distribute_tensor(torch.ones(16, 16), mesh, [Replicate()])
    hb.linear(torch.ones(4, 16), w, None, hb.recipes.mxfp8())


def unquantized_while_whole(mesh):
    model, _ = converted()
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    model(TOKENS)
    hb.unquantize_(model)


def unquantized(mesh):
    model, _ = converted()
    before = copy.deepcopy(model.state_dict())
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    try:
        hb.unquantize_(model)
    finally:
        assert model.state_dict().keys() == before.keys() and isinstance(model.lm_head, hb.nn.Linear)
