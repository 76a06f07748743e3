"""Tokens and batches: every window once an epoch, any position without the ones before, caches that heal."""

import numpy as np
import pytest
import torch

from halfbyte.train import corpus, data, tokenizer
from halfbyte.train.config import DataConfig

CPU = torch.device("cpu")


def batches(tokens, seed=0, sequence=8, batch=3):
    return data.Batches(tokens, sequence=sequence, batch=batch, seed=seed, device=CPU)


def test_an_epoch_holds_every_window_once():
    tokens = np.arange(8 * 12 + 1)
    made = batches(tokens)
    starts = torch.cat([made[i][0][:, 0] for i in range(4)])
    assert sorted(starts.tolist()) == list(range(0, 96, 8))
    later = torch.cat([made[i][0][:, 0] for i in range(4, 8)])
    assert sorted(later.tolist()) == sorted(starts.tolist())
    assert later.tolist() != starts.tolist()


def test_targets_are_the_next_tokens():
    inputs, targets = batches(np.arange(97))[1]
    assert inputs.shape == targets.shape == (3, 8) and inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_a_position_needs_none_of_those_before():
    tokens = np.arange(200)
    walked = batches(tokens)
    for position in range(23):
        walked[position]
    assert torch.equal(walked[23][0], batches(tokens)[23][0])


def test_the_order_follows_the_seed():
    tokens = np.arange(200)
    assert not torch.equal(batches(tokens, seed=0)[0][0], batches(tokens, seed=1)[0][0])


def test_the_split_covers_the_stream(folder):
    config = DataConfig(corpus=str(folder / "corpus"), sequence=32, held_out=0.1)
    loaded = data.load(config, folder / "cache")
    found = corpus.load(config.corpus)
    stream = b"".join(text + b"\0" for text in found.documents())
    assert bytes(loaded.train) + bytes(loaded.held_out) == stream
    assert len(loaded.held_out) == round(0.1 * len(stream))
    assert loaded.summary["sha256"] == found.sha256 and loaded.summary["bytes"] == found.size


def test_tokens_are_cached_and_a_cut_cache_is_made_again(folder):
    config = DataConfig(corpus=str(folder / "corpus"), sequence=32)
    whole = bytes(data.load(config, folder / "cache").train)
    (path,) = (folder / "cache").glob("*.tokens")
    written = path.stat().st_mtime_ns
    assert bytes(data.load(config, folder / "cache").train) == whole
    assert path.stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes()[:100])
    assert bytes(data.load(config, folder / "cache").train) == whole


def test_too_little_text_says_what_to_do(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="do not fill one sequence of 32; give more text"):
        data.load(DataConfig(corpus=str(tmp_path / "short.txt"), sequence=32), tmp_path / "cache")


def test_bpe_restores_the_text_and_trains_alike(folder):
    pytest.importorskip("tokenizers")
    found = corpus.load(str(folder / "corpus"))
    first = tokenizer.load("bpe:300", found, folder / "one")
    second = tokenizer.load("bpe:300", found, folder / "two")
    for text, a, b in zip(
        found.documents(), first.encode(found.documents()), second.encode(found.documents()), strict=True
    ):
        assert a.tolist() == b.tolist() and a[-1] == 0 and 0 not in a[:-1]
        assert first._tokenizer.decode(a[:-1].tolist()).encode() == text
    assert first.vocab_size == 300


def test_bpe_of_a_whole_run(folder):
    pytest.importorskip("tokenizers")
    config = DataConfig(corpus=str(folder / "corpus"), tokenizer="bpe:300", sequence=32)
    loaded = data.load(config, folder / "cache")
    again = data.load(config, folder / "cache")
    assert loaded.vocab_size == 300 and loaded.train.dtype == np.uint16 and int(loaded.train.max()) < 300
    assert loaded.summary["bytes_per_token"] > 2
    assert bytes(loaded.train) == bytes(again.train)


def test_broken_tokenizer_file_is_named(folder):
    pytest.importorskip("tokenizers")
    found = corpus.load(str(folder / "corpus"))
    tokenizer.load("bpe:300", found, folder / "cache")
    (path,) = (folder / "cache").glob("*-bpe300.json")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"bpe300\.json: cannot be read"):
        tokenizer.load("bpe:300", found, folder / "cache")
