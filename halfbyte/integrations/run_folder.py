"""A folder of `halfbyte train` as a model of transformers: its decoder is Llama's, parameter by parameter."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfbyte.convert import quantize_
from halfbyte.nn.linear import describe_recipe
from halfbyte.policy import Keep
from halfbyte.schedule import Schedule
from halfbyte.spec import Recipe, parse_recipe
from halfbyte.values import split_outside

CHECKPOINTS = "checkpoints"
NAME = re.compile(r"step-(\d{8,})(\.pt)?")
EVERYWHERE = "@all"
BYTES = "bytes"
END = 0
"""The token that ends a document."""
AGAIN = "the run's command with --steps unchanged makes it again"


class RunModel(NamedTuple):
    """The model of a run, converted to its recipe, and what its GEMMs computed in."""

    model: Any
    compute_dtype: torch.dtype


def is_run(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a run of `halfbyte train`, which names no architecture."""
    return isinstance(config.get("identity"), Mapping) and "shape" in config["identity"]


def load_run(source: Path, config: Mapping[str, Any]) -> RunModel:
    """Return the newest checkpoint of a run as LlamaForCausalLM, under the recipe of the run.

    Raises:
        ValueError: its model has experts, there is no checkpoint of one process, or it cannot be read; its last step
            multiplied by no weights in NVFP4.
    """
    import transformers

    identity = config["identity"]
    shape = identity["shape"]
    if shape.get("moe") is not None:
        raise ValueError(
            f"{source}: a run of halfbyte train with experts, whose blocks no architecture of transformers has; dense "
            "models are exported"
        )
    llama = transformers.LlamaConfig(
        hidden_size=shape["dim"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=config["data"]["vocab_size"],  # of the run's tokenizer; the shape has the preset's
        rms_norm_eps=shape["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=shape["tie_embeddings"],
        bos_token_id=None,
        eos_token_id=END,  # Llama's own are others, at which engines would stop
        max_position_embeddings=identity["data"]["sequence"],
        architectures=["LlamaForCausalLM"],
    )
    model = transformers.LlamaForCausalLM(llama)
    saved = _checkpoint(source)
    weights = saved["model"]
    model.load_state_dict({name if name.startswith("lm_head.") else f"model.{name}": w for name, w in weights.items()})
    recipe = _last_recipe(source, identity, saved)
    layers = split_outside(identity["recipe"], "+")[0]  # what is behind it changes the run, not which layers follow
    keep = Keep(names=(), last_fraction=0.0) if layers.endswith(EVERYWHERE) else None
    quantize_(model, recipe, keep=keep)
    return RunModel(model.eval(), getattr(torch, config["dtype"]))


def tokenizer_of_run(source: Path, config: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a run, as one of transformers.

    Raises:
        FileNotFoundError: the file of its BPE is gone.
        ValueError: it cannot be read.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tokenizer_file(source, config)
    if path is None:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        kept = [byte for byte in range(256) if chr(byte) in alphabet]  # the other bytes have letters from 256 on
        letters = {byte: chr(byte) for byte in kept}
        letters |= {byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(kept)))}
        letters[END] = "<|endoftext|>"  # text holds no NUL
        found = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.decoder = decoders.ByteLevel()
    else:
        try:
            found = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{path}: the tokenizer of {source} cannot be read ({error}); {AGAIN}") from error
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found,
        eos_token=found.id_to_token(END),
        clean_up_tokenization_spaces=False,
        model_max_length=config["identity"]["data"]["sequence"],
    )


def tokenizer_file(run: Path, config: Mapping[str, Any]) -> Path | None:
    """Return where the BPE of a run lies, in the cache that it used; None for bytes.

    Raises:
        FileNotFoundError: it is gone.
    """
    if config["identity"]["data"]["tokenizer"] == BYTES:
        return None
    name = f"{config['identity']['corpus_sha256'][:16]}-{config['data']['tokenizer']}.json"
    path = Path(config["run"]["cache"]) / name
    if not path.exists() and (base := _folder_of_training(run, Path(config["run"].get("out", "")))) is not None:
        path = base / path
    if not path.exists():
        raise FileNotFoundError(f"{path}: the tokenizer of {run} is gone; {AGAIN}")
    return path


def _folder_of_training(run: Path, out: Path) -> Path | None:
    """Return the folder in which a run was started whose `out` was relative to it; None where it has moved since."""
    parts, ending = run.resolve().parts, Path(os.path.normpath(out)).parts
    if out.is_absolute() or not ending or parts[-len(ending) :] != ending:
        return None
    return Path(*parts[: -len(ending)])


def _last_recipe(source: Path, identity: Mapping[str, Any], saved: Mapping[str, Any]) -> Recipe:
    """Return the recipe of the last step before a checkpoint, whose schedule may have changed it."""
    recipe = parse_recipe(identity["recipe_key"])
    state = saved["run_state"]
    changed = Schedule.from_state_dict(state["schedule"]).at(saved["step"] - 1) if "schedule" in state else None
    recipe = changed or recipe
    if recipe.fprop is None or recipe.fprop.b is None:
        trained = identity["recipe"] if changed is None else f"{describe_recipe(changed)} at its end, by its schedule"
        raise ValueError(f"{source}: the run trained in {trained}, so there are no bytes of NVFP4 to export")
    return recipe


def _checkpoint(source: Path) -> dict[str, Any]:
    """Return the newest checkpoint of a run."""
    folder = source / CHECKPOINTS
    found = sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name)) if folder.is_dir() else []
    if not found:
        raise ValueError(f"{source}: a run of halfbyte train without a checkpoint; let it reach one")
    if not found[-1].suffix:
        raise ValueError(
            f"{found[-1]}: a checkpoint of several ranks; go on with one process (the same command without torchrun, "
            "--dp-shard and --dp-replicate, and more --steps), whose checkpoint is one file"
        )
    try:
        return torch.load(found[-1], map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may fail in any way
        line = str(error).partition("\n")[0]
        raise ValueError(f"{found[-1]}: cannot be read ({line}); restore it from a copy") from error
