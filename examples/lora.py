"""LoRA over a base of 4-bit codes: adapters beside it, or merged in every forward, and what merging costs each.

A small Llama learns text in NVFP4, is frozen to codes (4.5 bits a weight) and learns other text through adapters.

python examples/lora.py     on a CPU or a GPU, about a minute
"""

import argparse
import copy
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import halfbyte as hb

LENGTH, BATCH = 48, 8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def batches(text: str, steps: int, device: str):
    """Yield [BATCH, LENGTH] bytes of a text."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.tensor(list(text.encode())).unfold(0, LENGTH, 1)
    for _ in range(steps):
        yield windows[torch.randint(len(windows), (BATCH,), generator=generator)].to(device)


def train(model: LlamaForCausalLM, state: hb.RunState, text: str, steps: int, lr: float) -> None:
    """Train whatever requires a gradient."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for ids in batches(text, steps, str(model.device)):
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.advance()  # other random bits for the next step


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, text: str) -> float:
    """Return the loss on the last bytes of a text, which nothing trained on."""
    held_out = torch.tensor(list(text.encode()))[-64 * LENGTH :].view(64, LENGTH).to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        return model(input_ids=held_out, labels=held_out).loss.item()


def pretrain(text: str, steps: int) -> LlamaForCausalLM:
    """Return a model whose weights were trained in NVFP4."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES)).to("cuda" if torch.cuda.is_available() else "cpu")
    keep = hb.Keep(names=("lm_head",), last_fraction=0)  # every layer but the head, so that all of the base is codes
    state = hb.quantize_(model, "nvfp4", keep=keep, state=hb.RunState(1)).state
    train(model, state, text[: -64 * LENGTH], steps, lr=3e-3)
    return model


def main(steps: int = 200) -> dict[str, dict[str, float]]:
    """Return the losses on the other text: of the base, with adapters, and with adapters merged into the codes."""
    text = inspect.getsource(argparse)
    other = text.swapcase()
    base = pretrain(text, steps)
    losses = {}
    for kind in ("beside", "merge_aware"):
        model = copy.deepcopy(base)
        state = model.model.layers[0].mlp.down_proj.run_state  # the copy's own, which all of its layers draw from
        with torch.autocast(model.device.type, torch.bfloat16):  # codes are those of weights rounded to bf16
            made = hb.lora_(model, rank=8, alpha=16.0, targets=("*_proj",), merge_aware=kind == "merge_aware")
        before = evaluate(model, other)
        train(model, state, other[: -64 * LENGTH], steps, lr=1e-2)
        trained = evaluate(model, other)
        merged = hb.merge_lora_(model)
        losses[kind] = {"base": before, "trained": trained, "merged": evaluate(model, other)}
        print(f"{kind}: {made.frozen.bits:.3g} bits a weight, {made.parameters:,} trained parameters")
        print("  loss " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses[kind].items()))
        print(f"  merging: error of a weight up to {100 * merged.error:.3g} %")
    return losses


if __name__ == "__main__":
    main()
