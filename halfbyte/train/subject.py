"""What `halfbyte inspect` and `halfbyte sensitivity` look at: the model of a run, a checkpoint, or transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte import files
from halfbyte.integrations import run_folder
from halfbyte.train import checkpoint, corpus, folder, tokenizer
from halfbyte.train import model as models
from halfbyte.train.documents import TEXT_FIELD
from halfbyte.train.moe import MoEConfig

CONFIG = "config.json"
Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in high precision, and how it reads text.

    Args:
        name: of the folder or file.
        model: on the device that it is to run on.
        encode: text to token ids.
        decode: these back to text.
        loss: (model, inputs [B, T], targets [B, T]) to the loss.
        recipe: that it was trained under, "" if nobody says.
        end: the token that ends a document, if `encode` adds one.
    """

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    recipe: str = ""
    end: int | None = None

    def tokens(self, text: Path, text_field: str = TEXT_FIELD) -> Iterator[int]:
        """Yield the tokens of a text that is read as `halfbyte train --corpus` reads one.

        Args:
            text: a file of UTF-8 text, of records, or a folder of such files; what a folder leaves out is said.
            text_field: of the records, that holds their text.

        Raises:
            ValueError: there is no text, or a file or record is broken; the message names it.
        """
        path = text if text.is_absolute() else f"./{text}"  # a file called python is no name of a corpus
        found = corpus.load_corpus(str(path), text_field)
        if found.skipped:
            print(f"{text}: left out, no UTF-8 text: {', '.join(found.skipped)}")
        for document in found.documents():
            yield from self.encode(document.decode())

    def batch(self, text: Path, batch: int, sequence: int, text_field: str = TEXT_FIELD) -> Loss:
        """Return a function from a model like this one to its loss on the first sequences of a text.

        Args:
            text, text_field: see `tokens`.
            batch, sequence: sequences, and tokens of each.

        Raises:
            ValueError: as `tokens`, or there is too little text.
        """
        needed = batch * sequence + 1
        ids = list(islice(self.tokens(text, text_field), needed))
        if len(ids) < needed:
            raise ValueError(
                f"--text={text}: {len(ids)} tokens, {needed} are needed; give more, or less --batch --sequence"
            )
        device = next(self.model.parameters()).device
        tokens = torch.tensor(ids, device=device)
        inputs, targets = (part.view(batch, sequence) for part in (tokens[:-1], tokens[1:]))
        return lambda model: self.loss(model, inputs, targets)


def load_subject(source: Path) -> Subject:
    """Return the model of a run's folder, of one of its checkpoints, or of a folder of transformers.

    Raises:
        ValueError: it is none of these, or damaged.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if source.is_file():
        return _of_checkpoint(source, source.parent.parent, device)
    if not source.is_dir():
        raise ValueError(
            f"{source}: is not there; give the folder of a run, a checkpoint of it, or one of transformers"
        )
    if not (source / CONFIG).exists():
        raise ValueError(f"{source}: holds no {CONFIG}; give the folder of a run or one that save_pretrained wrote")
    if "identity" in files.read_json(source / CONFIG):
        latest = checkpoint.Checkpoints(source / folder.CHECKPOINTS, keep=1).latest()
        if latest is None:
            raise ValueError(f"{source}: the run has no checkpoint yet; train it until it wrote one")
        return _of_checkpoint(latest, source, device)
    return _of_transformers(source, device)


def _of_checkpoint(path: Path, run: Path, device: torch.device) -> Subject:
    if path.is_dir():
        raise ValueError(
            f"{path}: several ranks wrote it; resume it on one process, whose checkpoint holds whole tensors"
        )
    if not (run / CONFIG).exists():
        raise ValueError(
            f"{path}: there is no {run / CONFIG} of its run, which says the model's shape; keep them together"
        )
    recorded = folder.recorded_config(run)
    identity = recorded["identity"]
    saved = checkpoint.load_checkpoint(path, identity)
    shape = dict(identity["shape"]) | {"vocab_size": recorded["data"]["vocab_size"]}
    if shape.get("moe"):
        shape["moe"] = MoEConfig(**shape["moe"])
    model = models.Decoder(models.ModelConfig(**shape))
    model.load_state_dict(saved["model"])
    coder = _tokenizer(run, recorded)

    def encode(text: str) -> list[int]:
        return [int(token) for part in coder.encode(iter([text.encode()])) for token in part]

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        logits, balance = model(inputs, balance=True)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) + balance

    recipe = str(identity["recipe"])
    model = model.to(device)
    return Subject(name=str(path), model=model, encode=encode, decode=coder.decode, loss=loss, recipe=recipe, end=0)


def _tokenizer(run: Path, recorded: dict) -> tokenizer.Tokenizer:
    """Return the tokenizer of a run, from the cache that it used."""
    try:
        path = run_folder.tokenizer_file(run, recorded)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error
    return tokenizer.Bytes() if path is None else tokenizer.BPE(path, recorded["data"]["tokenizer"], "")


def _of_transformers(source: Path, device: torch.device) -> Subject:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; models of transformers need it: pip install 'halfbyte[transformers]'") from error
    config = files.read_json(source / CONFIG)
    if config.get("quantization_config") is not None:
        raise ValueError(f"{source}: its weights are quantized already; give the folder that was trained")
    options: dict[str, Any] = {"local_files_only": True, "dtype": "auto"}
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{source}: transformers cannot load it: {str(error).strip().splitlines()[0]}") from error

    def coder() -> Any:
        try:
            return transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            why = str(error).strip().splitlines()[0].rstrip(" :")
            raise ValueError(
                f"{source}: transformers cannot load its tokenizer ({why}); put its files there with "
                "tokenizer.save_pretrained, a text needs them"
            ) from error

    def encode(text: str) -> list[int]:
        return coder()(text)["input_ids"]

    def decode(tokens: Sequence[int]) -> str:
        return coder().decode(list(tokens))

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())

    return Subject(name=str(source), model=model.to(device), encode=encode, decode=decode, loss=loss)
