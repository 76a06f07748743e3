"""Tokens on disk, and batches at any position: the order is a function of (seed, position), so resuming is a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfbyte.train import cache as caches
from halfbyte.train import corpus as corpora
from halfbyte.train import tokenizer
from halfbyte.train.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class Data:
    """A tokenized corpus, split.

    Args:
        train, held_out: tokens, memory-mapped [n].
        vocab_size: number of different tokens.
        summary: what a run records: corpus, hash, sizes, bytes per token.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    summary: dict


def load_data(config: DataConfig, cache: Path, out: Path | None = None) -> Data:
    """Tokenize the corpus, or map the tokens cached for its hash, and split off the held-out tail.

    Args:
        config: names the text.
        cache: folder of tokens and tokenizers.
        out: folder into which the run writes.

    Raises:
        ValueError: no text, or too little of it for one batch, or the run would write into it; the message names the
            corpus.
        ImportError: a tokenizer or Parquet without its package.
    """
    _refuse_own_files(config, {"cache": cache} | ({} if out is None else {"out": out}))
    names = [config.corpus, *filter(None, [config.held_out_corpus])]
    corpus, *others = corpora.load_corpora(names, config.text_field)
    coder = tokenizer.load_tokenizer(config.tokenizer, corpus, cache)
    tokens, sha256 = _cached_tokens(corpus, coder, cache)
    if others:
        train, (held_out, _) = tokens, _cached_tokens(others[0], coder, cache)
    else:
        split = len(tokens) - max(1, round(len(tokens) * config.held_out))
        train, held_out = tokens[:split], tokens[split:]
    for part, name in ((train, "training"), (held_out, "held-out")):
        if len(part) <= config.sequence:
            remedy = "" if others else f" or a {'smaller' if part is train else 'larger'} --held-out"
            option = "held_out_corpus" if others and part is held_out else "corpus"
            raise ValueError(
                f"{option}={getattr(config, option)!r}: {len(part)} {name} tokens do not fill one sequence of "
                f"{config.sequence}; give more text{', ' if remedy else ' or '}a shorter --sequence{remedy}"
            )
    summary = (
        corpus.summary()
        | {
            "tokenizer": coder.key,
            "tokens_sha256": sha256,
            "vocab_size": coder.vocab_size,
            "train_tokens": len(train),
            "held_out_tokens": len(held_out),
            "bytes_per_token": corpus.size / len(tokens),
        }
        | ({"held_out_corpus": others[0].name, "held_out_sha256": others[0].sha256} if others else {})
    )
    return Data(train=train, held_out=held_out, vocab_size=coder.vocab_size, summary=summary)


def _refuse_own_files(config: DataConfig, written: Mapping[str, Path]) -> None:
    """Raise if the text is a folder into which the run writes: its files would be text when it is gone on with."""
    for option, name in (("corpus", config.corpus), ("held_out_corpus", config.held_out_corpus)):
        root = Path(name or "").resolve()
        if not name or name == corpora.PYTHON or not Path(name).is_dir():
            continue
        for kind, folder in written.items():
            inside = folder.resolve()
            if inside.is_relative_to(root) and not any(p.startswith(".") for p in inside.relative_to(root).parts):
                raise ValueError(
                    f"{option}={name!r}: {kind}={str(folder)!r} lies in it, and what a run writes would be text when "
                    f"it goes on; give a --{kind} elsewhere, or the text in a folder of its own"
                )


def _cached_tokens(corpus: corpora.Corpus, coder: tokenizer.Tokenizer, cache: Path) -> tuple[np.ndarray, str]:
    """Return the tokens of the whole corpus and the hash of their bytes."""
    dtype = next(d for d in map(np.dtype, (np.uint8, np.uint16, np.uint32)) if coder.vocab_size <= 1 << 8 * d.itemsize)
    path = cache / f"{corpus.sha256[:16]}-{coder.key}.tokens"
    origin = {"corpus": corpus.sha256, "tokenizer": coder.sha256, "dtype": dtype.name}
    encoded = (document.astype(dtype).tobytes() for document in coder.encode(corpus.documents()))
    sha256 = caches.ensure(path, origin, lambda: encoded)
    return np.memmap(path, dtype=dtype, mode="r"), sha256


class Batches:
    """Sequences of a token stream in a shuffled order, one micro-batch per position.

    Args:
        tokens: [n], at least sequence + 1.
        sequence, batch: T and B.
        seed: of the order; every epoch is a new permutation. None keeps the order of the stream.
        device: where batches go.
        part: (rank, ranks): of every micro-batch only the part of one of so many ranks, in their order.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        sequence: int,
        batch: int,
        seed: int | None,
        device: torch.device,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._tokens, self._sequence, self._batch = tokens, sequence, batch
        self._seed, self._device = seed, device
        rank, ranks = part
        self._rows = range(rank * batch // ranks, (rank + 1) * batch // ranks)
        self._windows = (len(tokens) - 1) // sequence
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def windows(self) -> int:
        """Sequences in one epoch."""
        return self._windows

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of micro-batch `position`, int64 [B, T] each, or of this rank's part of it."""
        first = position * self._batch
        starts = [self._window(first + i) * self._sequence for i in self._rows]
        rows = np.stack([self._tokens[start : start + self._sequence + 1] for start in starts]).astype(np.int64)
        chunk = torch.from_numpy(rows)
        if self._device.type == "cuda":  # pinned memory lets the copy overlap the previous step
            chunk = chunk.pin_memory().to(self._device, non_blocking=True)
        return chunk[:, :-1], chunk[:, 1:]

    def _window(self, index: int) -> int:
        epoch, place = divmod(index, self._windows)
        if self._seed is None:
            return place
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 20 | epoch) % (1 << 63))
            self._epoch, self._order = epoch, torch.randperm(self._windows, generator=generator).numpy()
        return int(self._order[place])
