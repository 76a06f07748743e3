"""A newcomer's path: a model of transformers is loaded under a recipe, trained, looked into, exported and loaded.

The model and its tokenizer of bytes are made here, so nothing is downloaded; main(source=…) takes a folder of yours or
a model of the hub. Needs pip install 'halfbyte[transformers]'.

python examples/finetune_transformers.py     on a CPU or a GPU, less than a minute
"""

import argparse
import inspect
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import halfbyte as hb
from halfbyte.integrations.transformers import HalfbyteCallback, HalfbyteConfig, load_exported

LENGTH, BATCH = 48, 8


def make_base(folder: Path) -> Path:
    """Write a small Llama and its tokenizer, one token for each byte, as save_pretrained does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<end>": 0, **{character: i + 1 for i, character in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4 * LENGTH,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def rows_of(text: str, tokenizer) -> list[dict[str, list[int]]]:
    """Return text in pieces of LENGTH tokens, as a Trainer takes them."""
    ids = tokenizer(text)["input_ids"]
    pieces = (ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH))
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


@torch.no_grad()
def loss_of(model, rows) -> float:
    """Return the loss on rows, in the recipes of the model."""
    ids = torch.tensor([row["input_ids"] for row in rows], device=model.device)
    return model.eval()(input_ids=ids, labels=ids).loss.item()


def main(steps: int = 50, source: str = "", out: str = "") -> dict[str, object]:
    """Return the losses on text that was held out, before, after and loaded again, and what the model wrote."""
    folder = Path(out or tempfile.mkdtemp())
    source = source or str(make_base(folder / "base"))

    # Load: a HalfbyteConfig converts the model while it is read. Weights stay masters under their names.
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=HalfbyteConfig("nvfp4")
    )
    print(model.hf_quantizer.report)  # every layer, its recipe, and why

    # Train: the callback draws other random bits for every micro-batch and keeps their place in checkpoints.
    *rows, held_out = [rows_of(inspect.getsource(module), tokenizer) for module in (argparse, tempfile, inspect)]
    rows, held_out = [row for part in rows for row in part], held_out[:16]
    callback = HalfbyteCallback()
    options = {"per_device_train_batch_size": BATCH, "max_steps": steps, "learning_rate": 3e-3, "report_to": "none"}
    options |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": max(1, steps // 5)}
    args = transformers.TrainingArguments(str(folder / "run"), **options)
    before = loss_of(model, held_out)
    transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
    callback.release()  # from here on the model in eval mode computes in its recipe, as it is served
    after = loss_of(model, held_out)

    # Look: what each weight loses (with a batch, also what activations and gradients do).
    print(hb.inspect(model, recipes=("nvfp4",)))

    # Export: the bytes that were trained, as engines load them; then load and write.
    exported = hb.export.save(model, folder / "served", tokenizer=tokenizer)
    print(
        f"{exported.folder}: {100 * exported.share_changed:.3g} % of the quantized bytes differ from the trained ones"
    )
    loaded = load_exported(exported.folder).to(model.device)
    again = loss_of(loaded, held_out)
    prompt = transformers.AutoTokenizer.from_pretrained(exported.folder)("def main(", return_tensors="pt").to(
        model.device
    )
    wrote = tokenizer.decode(loaded.generate(**prompt, max_new_tokens=24, do_sample=False)[0])
    print(f"loss before {before:.4f}, after {after:.4f}, loaded {again:.4f}\n{wrote}")
    return {"before": before, "after": after, "loaded": again, "changed": exported.share_changed, "wrote": wrote}


if __name__ == "__main__":
    main()
