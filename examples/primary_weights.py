"""A model whose weights exist in NVFP4 only; every rank keeps fp32 masters of its share.

python examples/primary_weights.py                                    one process
torchrun --nproc-per-node 2 examples/primary_weights.py               two, on a CPU or with a GPU each
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import halfbyte as hb


def train(steps: int, weights: str) -> tuple[list[float], nn.Module]:
    """Train with NVFP4 or with whole bf16 weights; return this rank's losses and the model."""
    torch.manual_seed(0)  # the same model on all ranks
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)).to(device, torch.bfloat16)
    keep = hb.Keep(names=(), last_fraction=0)
    report = hb.quantize_(model, "nvfp4", keep=keep, state=hb.RunState(seed=1))
    optimizer = hb.distributed.ZeroOptimizer(
        model,
        partial(torch.optim.AdamW, lr=1e-2),
        config=hb.distributed.ZeroConfig(weights=weights, max_norm=1.0),
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for index in range(steps):
        data = torch.Generator().manual_seed(1000 * index + rank)  # other data on each rank
        x = torch.randn(64, 64, generator=data).to(device, torch.bfloat16)
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        report.state.advance()
        optimizer.step()  # sums and clips gradients, steps the masters, casts them, gathers codes and scales
        losses.append(loss.item())
    optimizer.synchronize()  # before parameters are read outside of a forward
    return losses, model


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of the linear layers' weights, in both orientations where they are NVFP4."""
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    both = [(w.qdata, w.block_scale) if isinstance(w, hb.tensor.PrimaryWeight) else (w,) for w in weights]
    transposed = [2 if isinstance(w, hb.tensor.PrimaryWeight) else 1 for w in weights]
    return sum(n * sum(t.nbytes for t in tensors) for n, tensors in zip(transposed, both, strict=True))


def main(steps: int = 30) -> dict[str, list[float]]:
    """Train both ways and return the losses, which are equal bit for bit."""
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(dist.get_node_local_rank())
    losses = {}
    for weights in ("nvfp4", "plain"):
        losses[weights], model = train(steps, weights)
        print(f"{weights:>5}: loss {losses[weights][0]:.4f} -> {losses[weights][-1]:.4f}, {bytes_of(model):,} bytes")
    print("equal bit for bit" if losses["nvfp4"] == losses["plain"] else "DIFFERENT")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
