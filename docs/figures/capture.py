"""Where the tensors of the figures come from: a linear layer of `make train`'s model after its bf16 run.

python docs/figures/capture.py writes tensors.safetensors: x [64, K], w [N, K] and dy [64, N] of a block's down
projection, 64 tokens of held-out text. The figures are drawn from that file, so every machine draws the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from halfbyte.train import config as configs
from halfbyte.train import data, loop
from halfbyte.train import model as models

FILE = Path(__file__).with_name("tensors.safetensors")
BLOCK, TOKENS = 2, 64


def trained(out: Path) -> tuple[models.Decoder, data.Data]:
    """Train `make train`'s model in bf16, or take what `out` holds, and return it with its text."""
    config = configs.two_cores()
    config = replace(config, run=replace(config.run, out=out / "bf16", cache=out / "cache"))
    text = data.load(config.data, config.run.cache)
    loop.train(config, "bf16", text)
    newest = max((config.run.out / "checkpoints").glob("*.pt"))
    model = models.Decoder(replace(models.get(config.model), vocab_size=text.vocab_size))
    model.load_state_dict(torch.load(newest, weights_only=True)["model"])
    return model, text


def main(out: Path = Path("runs/figures")) -> None:
    """Write the three tensors of one layer and one pass."""
    model, text = trained(out)
    layer = model.layers[BLOCK].mlp.down_proj
    kept: dict[str, torch.Tensor] = {"w": layer.weight.detach()}

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        kept["x"] = inputs[0].detach().flatten(0, -2)
        output.register_hook(lambda dy: kept.update(dy=dy.flatten(0, -2)))

    layer.register_forward_hook(keep)
    (inputs, targets) = data.Batches(text.held_out, seed=0, sequence=TOKENS, batch=1, device=torch.device("cpu"))[0]
    F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()).backward()
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in kept.items()}, FILE)


if __name__ == "__main__":
    main()
