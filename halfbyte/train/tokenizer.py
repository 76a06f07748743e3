"""Bytes, or a byte-level BPE trained on the corpus itself and cached by its hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from halfbyte.train import cache as caches
from halfbyte.train.corpus import Corpus

END = "<|endoftext|>"
TOGETHER = 1 << 23
"""Bytes of documents that are encoded in one call."""


class Tokenizer(Protocol):
    """What turns documents into tokens; token 0 ends a document."""

    key: str
    vocab_size: int
    sha256: str
    """Of what it was trained to, "" for bytes."""

    def encode(self, documents: Iterator[bytes]) -> Iterator[np.ndarray]:
        """Yield the tokens of each document, ending with 0."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with a mark for bytes that are no text."""
        ...


class Bytes:
    """Every byte is a token; text holds no NUL, so byte 0 ends a document."""

    key = "bytes"
    vocab_size = 256
    sha256 = ""

    def encode(self, documents: Iterator[bytes]) -> Iterator[np.ndarray]:
        for document in documents:
            yield np.frombuffer(document + b"\0", dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BPE:
    """A byte-level BPE of the `tokenizers` package."""

    def __init__(self, path: Path, key: str, sha256: str) -> None:
        self.key, self.sha256 = key, sha256
        try:
            self._tokenizer = _package().Tokenizer.from_file(str(path))
        except ImportError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"tokenizer file {path}: cannot be read ({error}); delete it to train it again") from error
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, documents: Iterator[bytes]) -> Iterator[np.ndarray]:
        for some in _together(documents):
            for encoded in self._tokenizer.encode_batch_fast(some, add_special_tokens=False):
                yield np.array([*encoded.ids, 0], dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))


def _together(documents: Iterator[bytes]) -> Iterator[list[str]]:
    """Yield documents in lists of about TOGETHER bytes, which the package encodes on all cores."""
    some, size = [], 0
    for document in documents:
        some.append(document.decode())
        size += len(document)
        if size >= TOGETHER:
            yield some
            some, size = [], 0
    if some:
        yield some


def load_tokenizer(name: str, corpus: Corpus, cache: Path) -> Tokenizer:
    """Return the tokenizer called `name`, training and caching it if need be.

    Args:
        name: "bytes" or "bpe:N", checked by DataConfig.
        corpus: what a BPE is trained on.
        cache: folder of trained tokenizers.

    Raises:
        ImportError: a BPE without the `tokenizers` package.
        ValueError: the cached file is broken.
    """
    if name == Bytes.key:
        return Bytes()
    vocab_size = int(name.partition(":")[2])
    key = f"bpe{vocab_size}"
    path = cache / f"{corpus.sha256[:16]}-{key}.json"
    origin = {"corpus": corpus.sha256, "vocab_size": str(vocab_size)}
    sha256 = caches.ensure(path, origin, lambda: [_trained(corpus, vocab_size).encode()])
    return BPE(path, key, sha256)


def _trained(corpus: Corpus, vocab_size: int) -> str:
    package = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.decode() for document in corpus.documents()), trainer)
    return tokenizer.to_str()


def _package():
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401 (loads the submodules)
    except ImportError as error:
        raise ImportError("tokenizer='bpe:N' needs the package `tokenizers`: pip install 'halfbyte[train]'") from error
    return tokenizers
