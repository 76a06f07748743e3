"""Tokens and batches: every window once an epoch, any position without the ones before, caches that heal."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from conftest import write_corpus

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


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_ranks_share_every_batch_in_their_order(ranks):
    layout = {"sequence": 8, "batch": 6, "seed": 0, "device": CPU}
    whole = data.Batches(np.arange(200), **layout)
    parts = [data.Batches(np.arange(200), part=(rank, ranks), **layout) for rank in range(ranks)]
    for position in (0, 5, 17):
        for side in (0, 1):
            assert torch.equal(torch.cat([part[position][side] for part in parts]), whole[position][side])


def test_a_position_needs_none_of_those_before():
    tokens = np.arange(200)
    walked = batches(tokens)
    for position in range(23):
        walked[position]
    assert torch.equal(walked[23][0], batches(tokens)[23][0])


def test_the_order_follows_the_seed():
    tokens = np.arange(200)
    assert not torch.equal(batches(tokens, seed=0)[0][0], batches(tokens, seed=1)[0][0])


def test_no_epoch_of_a_seed_is_one_of_the_next_seed():
    first, second = (batches(np.arange(97), seed=seed) for seed in (0, 1))
    orders = [[made[4 * e + i][0][:, 0].tolist() for i in range(4)] for made in (first, second) for e in range(3)]
    assert all(order not in orders[:number] for number, order in enumerate(orders))


def test_the_split_covers_the_stream(folder):
    config = DataConfig(corpus=str(folder / "corpus"), sequence=32, held_out=0.1)
    loaded = data.load_data(config, folder / "cache")
    found = corpus.load_corpus(config.corpus)
    stream = b"".join(text + b"\0" for text in found.documents())
    assert bytes(loaded.train) + bytes(loaded.held_out) == stream
    assert len(loaded.held_out) == round(0.1 * len(stream))
    assert loaded.summary["sha256"] == found.sha256 and loaded.summary["bytes"] == found.size
    assert loaded.summary["bytes_per_token"] == found.size / len(stream)


def test_tokens_are_cached_and_a_cut_cache_is_made_again(folder):
    config = DataConfig(corpus=str(folder / "corpus"), sequence=32)
    whole = bytes(data.load_data(config, folder / "cache").train)
    (path,) = (folder / "cache").glob("*.tokens")
    written = path.stat().st_mtime_ns
    assert bytes(data.load_data(config, folder / "cache").train) == whole
    assert path.stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes()[:100])
    assert bytes(data.load_data(config, folder / "cache").train) == whole


def test_too_little_text_says_what_to_do(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="do not fill one sequence of 32; give more text"):
        data.load_data(DataConfig(corpus=str(tmp_path / "short.txt"), sequence=32), tmp_path / "cache")


def test_one_of_two_texts_may_be_records(folder):
    """A field of records is said where there are some; the message names both where there are none."""
    plain, records = str(folder / "corpus"), folder / "stories.jsonl"
    records.write_text(json.dumps({"story": "one scale for sixteen values " * 100}) + "\n")
    for text, held_out in ((plain, str(records)), (str(records), plain)):
        config = DataConfig(corpus=text, held_out_corpus=held_out, text_field="story", sequence=32)
        found = data.load_data(config, folder / "cache")
        assert (len(found.train), len(found.held_out)).index(2901) == (text == plain), "29 bytes 100 times, and an end"
    with pytest.raises(ValueError, match=f"text_field='story': corpus='{plain}' and corpus='{plain}' has no JSON"):
        data.load_data(replace(config, corpus=plain, held_out_corpus=plain), folder / "cache")
    (folder / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"held_out_corpus='.*short.txt': 6 held-out tokens do not fill"):
        data.load_data(
            DataConfig(corpus=plain, held_out_corpus=str(folder / "short.txt"), sequence=32), folder / "cache"
        )
    with pytest.raises(ValueError, match=r"^corpus='.*short.txt': 6 training tokens do not fill"):
        data.load_data(
            DataConfig(corpus=str(folder / "short.txt"), held_out_corpus=plain, sequence=32), folder / "cache"
        )


def test_a_sequence_needs_one_token_more_for_its_last_target(folder):
    text = folder / "short.txt"
    config = DataConfig(corpus=str(folder / "corpus"), held_out_corpus=str(text), sequence=32)
    text.write_text("x" * 31)  # and the end of the document
    with pytest.raises(ValueError, match="32 held-out tokens do not fill one sequence of 32"):
        data.load_data(config, folder / "cache")
    text.write_text("x" * 32)
    assert batches(data.load_data(config, folder / "cache").held_out, sequence=32, batch=1).windows == 1


def test_a_text_in_a_hidden_folder_is_a_text_like_others(folder):
    hidden = write_corpus(folder / ".texts" / "corpus")
    with pytest.raises(ValueError, match=r"corpus='.*': out='.*' lies in it"):
        data.load_data(DataConfig(corpus=str(hidden), sequence=32), folder / "cache", hidden / "runs")


@pytest.mark.parametrize("option", ["corpus", "held_out_corpus"])
def test_a_run_does_not_write_into_its_text(folder, monkeypatch, option):
    """It could not go on: its log would be text."""
    inside, others = folder / "corpus", folder / "others"
    write_corpus(others)
    config = replace(DataConfig(corpus=str(others), sequence=32), **{option: str(inside)})
    for cache, out, words in (
        (folder / "cache", inside / "runs" / "x", r"out='.*' lies in it.*--out elsewhere"),
        (inside / "cache", folder / "out", r"cache='.*' lies in it.*--cache elsewhere"),
        (folder / "cache", inside, r"out='.*' lies in it"),
    ):
        with pytest.raises(ValueError, match=f"{option}='.*': {words}"):
            data.load_data(config, cache, out)
    monkeypatch.chdir(inside)
    data.load_data(
        replace(config, **{option: "."}), inside / ".cache", inside / ".runs" / "x"
    )  # hidden files are no text
    with pytest.raises(ValueError, match="lies in it"):
        data.load_data(replace(config, **{option: "."}), folder / "cache", Path("runs/train"))
    data.load_data(DataConfig(sequence=32), folder / "cache", Path("python") / "out")


def test_bpe_restores_the_text_and_trains_alike(folder):
    pytest.importorskip("tokenizers")
    found = corpus.load_corpus(str(folder / "corpus"))
    first = tokenizer.load_tokenizer("bpe:300", found, folder / "one")
    second = tokenizer.load_tokenizer("bpe:300", found, folder / "two")
    for text, a, b in zip(
        found.documents(), first.encode(found.documents()), second.encode(found.documents()), strict=True
    ):
        assert a.tolist() == b.tolist() and a[-1] == 0 and 0 not in a[:-1]
        assert first._tokenizer.decode(a[:-1].tolist()).encode() == text
    assert first.vocab_size == 300


@pytest.mark.parametrize("together", [1, 60, 1 << 23])
def test_bpe_of_documents_together_is_that_of_each(folder, monkeypatch, together):
    """In their order, each with its end: what the package itself makes of one document is what is expected."""
    found = corpus.load_corpus(str(folder / "corpus"), "text")
    coder = tokenizer.load_tokenizer("bpe:300", found, folder / "cache")
    (path,) = (folder / "cache").glob("*-bpe300.json")
    alone = tokenizers.Tokenizer.from_file(str(path))
    documents = [b"one two three", b"", *found.documents(), "größer".encode()]
    monkeypatch.setattr(tokenizer, "TOGETHER", together)
    encoded = [tokens.tolist() for tokens in coder.encode(iter(documents))]
    assert encoded == [[*alone.encode(text.decode(), add_special_tokens=False).ids, 0] for text in documents]
    assert list(coder.encode(iter(()))) == []


def test_bpe_of_a_whole_run(folder):
    pytest.importorskip("tokenizers")
    config = DataConfig(corpus=str(folder / "corpus"), tokenizer="bpe:300", sequence=32)
    loaded = data.load_data(config, folder / "cache")
    again = data.load_data(config, folder / "cache")
    assert loaded.vocab_size == 300 and loaded.train.dtype == np.uint16 and int(loaded.train.max()) < 300
    assert loaded.summary["bytes_per_token"] > 2
    assert bytes(loaded.train) == bytes(again.train)


@pytest.mark.parametrize("damage", ["other bytes", "other note", "no note", "list as note", "old note"])
def test_a_cache_is_believed_by_its_hash(folder, capsys, damage):
    """Of the right length and with other tokens in it: it would be trained on for ever."""
    config = DataConfig(corpus=str(folder / "corpus"), sequence=32)
    first = data.load_data(config, folder / "cache")
    whole = bytes(first.train)
    assert first.summary["tokens_sha256"] == hashlib.sha256(whole + bytes(first.held_out)).hexdigest()
    (path,) = (folder / "cache").glob("*.tokens")
    note = path.with_name(f"{path.name}.json")
    if damage == "other bytes":
        path.write_bytes(bytes([whole[0] ^ 1]) + path.read_bytes()[1:])
    elif damage == "other note":
        note.write_text(json.dumps(json.loads(note.read_text()) | {"tokenizer": "another"}))
    elif damage == "no note":
        note.unlink()
    elif damage == "list as note":
        note.write_text("[1]")
    else:  # what was written before there were hashes
        note.write_text(json.dumps({"corpus": "x", "dtype": "uint8", "bytes": path.stat().st_size}))
    assert not capsys.readouterr().err
    assert bytes(data.load_data(config, folder / "cache").train) == whole
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"{path}: the cached file ") and "made again" in error
    reason = {"other bytes": "is damaged", "other note": "was made from something else"}.get(damage, "has no hash")
    assert reason in error
    assert bytes(data.load_data(config, folder / "cache").train) == whole and not capsys.readouterr().err


@pytest.mark.parametrize("damage", ["unreadable", "other merges"])
def test_a_damaged_tokenizer_is_trained_again(folder, capsys, damage):
    pytest.importorskip("tokenizers")
    config = DataConfig(corpus=str(folder / "corpus"), tokenizer="bpe:300", sequence=32)
    whole = bytes(data.load_data(config, folder / "cache").train)
    (path,) = (folder / "cache").glob("*-bpe300.json")
    tokenizer_json = json.loads(path.read_text())
    tokenizer_json["model"]["merges"] = tokenizer_json["model"]["merges"][::-1]
    path.write_text("{" if damage == "unreadable" else json.dumps(tokenizer_json))
    assert bytes(data.load_data(config, folder / "cache").train) == whole
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bpe300.json: the cached file is damaged" in error


def test_tokens_of_another_tokenizer_are_not_taken(folder, capsys):
    """A vocabulary of the same size that was trained otherwise, as by another release of the package."""
    pytest.importorskip("tokenizers")
    config = DataConfig(corpus=str(folder / "corpus"), tokenizer="bpe:300", sequence=32)
    first = data.load_data(config, folder / "cache")
    (path,) = (folder / "cache").glob("*-bpe300.json")
    facts = json.loads(path.read_text())
    facts["model"]["merges"] = facts["model"]["merges"][:-1]
    facts["model"]["vocab"] = dict(list(facts["model"]["vocab"].items())[:-1])
    path.write_text(json.dumps(facts))
    note = path.with_name(f"{path.name}.json")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    note.write_text(json.dumps(json.loads(note.read_text()) | {"sha256": digest}))
    second = data.load_data(config, folder / "cache")
    assert second.summary["tokens_sha256"] != first.summary["tokens_sha256"]
    assert "tokens: the cached file was made from something else" in capsys.readouterr().err


@pytest.mark.parametrize(("share", "part", "change"), [(0.99999, "training", "smaller"), (1e-9, "held-out", "larger")])
def test_too_little_text_for_a_sequence_says_what_helps(folder, share, part, change):
    config = DataConfig(corpus=str(folder / "corpus"), sequence=32, held_out=share)
    with pytest.raises(ValueError, match=f"{part} tokens do not fill one sequence of 32; .* or a {change} --held-out"):
        data.load_data(config, folder / "cache")
