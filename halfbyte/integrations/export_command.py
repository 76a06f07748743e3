"""`halfbyte export SOURCE TARGET`: a folder of transformers, trained under a recipe, as a checkpoint for engines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halfbyte.arguments import ArgumentParser
from halfbyte.export import forms, save, write
from halfbyte.export.files import read_folder_json
from halfbyte.integrations.run_folder import is_run, load_run, tokenizer_of_run
from halfbyte.recipes import read_recipe

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BATCHES, LENGTH = 8, 512


def main(arguments: Sequence[str]) -> int:
    """Run `halfbyte export`; returns 0."""
    options = _parse(arguments)
    source, target = Path(options.source), Path(options.target)
    write.refuse_taken(target.absolute())
    if (options.calibrate is not None) != (options.activations == forms.STATIC):
        raise ValueError("--activations static and --calibrate TEXTFILE go together: factors are found in its text")
    model, dtype = _model(source, options.recipe)
    asked = DTYPES.get(options.compute_dtype)
    if dtype is not None and asked not in (None, dtype):
        words = f"{source} is a run of halfbyte train in {str(dtype).removeprefix('torch.')}; leave it out"
        raise ValueError(f"--compute-dtype={options.compute_dtype}: {words}")
    dtype = asked or dtype
    tokenizer = _tokenizer(source, options.calibrate is not None)
    batches = () if options.calibrate is None else _batches(tokenizer, source, options)
    report = save(
        model,
        target,
        format=options.format,
        activations=options.activations,
        batches=batches,
        compute_dtype=dtype,
        tokenizer=tokenizer,
    )
    print(report)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="halfbyte export",
        description="Write the bytes that a model was trained with as a checkpoint that vLLM, SGLang, TensorRT-LLM and "
        "compressed-tensors load.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", help="a folder that save_pretrained or a Trainer wrote, or of a run of halfbyte train"
    )
    parser.add_argument("target", help="a folder that is not there yet")
    parser.add_argument("--format", choices=forms.FORMATS, default=forms.COMPRESSED_TENSORS)
    parser.add_argument(
        "--recipe", help="that it was trained under, a preset or a key; not where config.json says it (HalfbyteConfig)"
    )
    parser.add_argument("--compute-dtype", choices=DTYPES, help="that GEMMs computed in, needed for float32 weights")
    parser.add_argument("--activations", choices=forms.ACTIVATIONS, default=forms.NONE)
    parser.add_argument("--calibrate", metavar="TEXTFILE", help="text that --activations static finds factors in")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"sequences of it ({BATCHES})")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens of a sequence ({LENGTH})")
    options = parser.parse_args(arguments)
    for name in ("batches", "length"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}={getattr(options, name)}: give at least 1")
    return options


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; models of transformers need it: pip install 'halfbyte[transformers]'") from error
    return transformers


def _model(source: Path, recipe: str | None) -> tuple[Any, torch.dtype | None]:
    """Return the model of a folder, converted to the recipe that it was trained under, and what GEMMs computed in.

    None: the weights say it, or the user.
    """
    config = read_folder_json(source / "config.json")
    transformers = _transformers()
    if is_run(config):
        if recipe is not None:
            raise ValueError(
                f"--recipe={recipe}: {source} is a run of halfbyte train, which says its own; leave it out"
            )
        return load_run(source, config)
    from safetensors import SafetensorError

    from halfbyte.integrations.quantizer import METHOD, HalfbyteConfig

    described = config.get("quantization_config")
    method = described.get("quant_method") if isinstance(described, dict) else None
    if described is not None and method != METHOD:
        raise ValueError(f"{source}: its weights are quantized already ({method}); give the folder that was trained")
    if described is not None and recipe is not None:
        raise ValueError(f"--recipe={recipe}: config.json of {source} says the recipe of its training; leave it out")
    if described is None and recipe is None:
        raise ValueError(f"{source}: config.json says no recipe; give that of its training, such as --recipe nvfp4")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None or not hasattr(cls, "from_pretrained"):
        raise ValueError(
            f"{source}: architectures={names} in config.json is no model of transformers {transformers.__version__}"
        )
    if recipe is not None:
        read_recipe(recipe)  # before the weights are read
    options = {} if recipe is None else {"quantization_config": HalfbyteConfig(recipe)}
    try:
        return cls.from_pretrained(source, dtype="auto", local_files_only=True, **options), None
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{source}: transformers cannot load it: {str(error).strip().splitlines()[0]}") from error


def _tokenizer(source: Path, is_needed: bool) -> Any:
    """Return the tokenizer of a folder, None where there is none; that of a run if it is one's."""
    if is_run(config := read_folder_json(source / "config.json")):
        try:
            return tokenizer_of_run(source, config)
        except FileNotFoundError as error:
            if is_needed:
                raise ValueError(str(error)) from error
            print(f"written without its tokenizer: {error}", file=sys.stderr)
            return None
    if not any((source / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return _transformers().AutoTokenizer.from_pretrained(source, local_files_only=True)


def _batches(tokenizer: Any, source: Path, options: argparse.Namespace) -> list[torch.Tensor]:
    """Return sequences of a text as batches of one."""
    if tokenizer is None:
        raise ValueError(f"--calibrate: {source} has no tokenizer; write one beside its weights")
    path = Path(options.calibrate)
    if not path.is_file():
        raise ValueError(f"--calibrate={path}: is no file; give a text")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--calibrate={path}: is no UTF-8 text ({error.reason}); give a text") from error
    ids = tokenizer(text)["input_ids"]
    parts = [ids[at : at + options.length] for at in range(0, options.length * options.batches, options.length)]
    found = [torch.tensor([part]) for part in parts if part]
    if not found:
        raise ValueError(f"--calibrate={path}: holds no text")
    return found
