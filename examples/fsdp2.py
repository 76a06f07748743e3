"""FSDP2 that gathers NVFP4 codes: a quarter of the bytes of its bf16 gather, and the same losses, bit for bit.

python examples/fsdp2.py                                    one process
torchrun --nproc-per-node 2 examples/fsdp2.py               two, on a CPU or with a GPU each
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import halfbyte as hb

WIDTH = 128


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x))))


def build(device: str) -> tuple[nn.Module, hb.RunState]:
    """Return fp32 masters, converted, then wrapped block by block: every rank keeps its rows."""
    torch.manual_seed(0)  # the same model on all ranks
    model = nn.Sequential(*(Block() for _ in range(3))).to(device)
    state = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(seed=1)).state
    hb.distributed.place_ranks_(model)  # random bits of its own on each rank
    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, state


def train(steps: int, gather: str, device: str) -> list[float]:
    """Train with one gather or the other; return this rank's losses."""
    model, state = build(device)
    arranged = hb.distributed.fsdp_gather_nvfp4_(model) if gather == "nvfp4" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for index in range(steps):
        data = torch.Generator().manual_seed(1000 * index + dist.get_rank())  # other data on each rank
        x = torch.randn(64, WIDTH, generator=data).to(device, torch.bfloat16)
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()
        losses.append(loss.item())
    if arranged is not None and dist.get_rank() == 0:
        print(arranged.report, f"codes gathered: {arranged.traffic['gathered']:,} bytes", sep="\n")
    return losses


def main(steps: int = 20) -> dict[str, list[float]]:
    """Train both ways and return the losses, which are equal bit for bit."""
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_node_local_rank(0)}"
        torch.cuda.set_device(device)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    losses = {gather: train(steps, gather, device) for gather in ("bf16", "nvfp4")}
    for gather, found in losses.items():
        print(f"{gather:>5}: loss {found[0]:.4f} -> {found[-1]:.4f}")
    print("equal bit for bit" if losses["nvfp4"] == losses["bf16"] else "DIFFERENT")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
