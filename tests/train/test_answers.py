"""halfbyte generate and evaluate: what a model continues, and which continuation it finds likeliest."""

from __future__ import annotations

import gzip
import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from halfbyte import cli
from halfbyte.train import answers, loop
from halfbyte.train.answers import Question, accuracy, generate, likelihood, read_items, text_loss
from halfbyte.train.subject import Subject, load_subject

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "choices.py"


class Counting(torch.nn.Module):
    """After byte n comes byte n + 1 with probability e / (e + 255 * e ** 0), whatever came before."""

    def __init__(self) -> None:
        super().__init__()
        self.size = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float() * self.size


def counting() -> Subject:
    def encode(text):
        return [*text.encode(), 0]

    return Subject(
        name="counting",
        model=Counting(),
        encode=encode,
        decode=lambda ids: bytes(ids).decode(),
        loss=lambda *_: torch.zeros(()),
        end=0,
    )


def test_the_likeliest_continuation():
    assert bytes(generate(counting(), "abc", tokens=5)) == b"defgh"
    one, two = (generate(counting(), "a", tokens=40, temperature=0.1, seed=seed) for seed in (0, 1))
    assert one == generate(counting(), "a", tokens=40, temperature=0.1, seed=0) and len(one) <= 40
    assert two != []
    assert bytes(generate(counting(), "abc", tokens=5, temperature=1e-320)) == b"defgh", "as good as 0"
    hot = [generate(counting(), "a", tokens=20, temperature=5.0, seed=seed) for seed in (0, 1)]
    assert hot[0] != hot[1]


def test_temperature_divides_logits():
    """At 0.1 the next byte has a chance of e^10 in e^10 + 255, 98.9 %; at 1 it has 1.1 %."""
    for temperature, expected in ((0.1, 0.989), (1.0, 0.011)):
        hits, drawn = 0, 0
        for seed in range(20):
            ids = [ord("a"), *generate(counting(), "a", tokens=20, temperature=temperature, seed=seed)]
            hits, drawn = hits + sum(b == a + 1 for a, b in pairwise(ids)), drawn + len(ids) - 1
        assert drawn > 300 and hits / drawn == pytest.approx(expected, abs=0.02)


def test_the_end_of_a_document_ends_it():
    assert generate(counting(), chr(127), tokens=200) == list(range(128, 256))
    subject = counting()
    subject.model.forward = lambda tokens: torch.nn.functional.one_hot(torch.zeros_like(tokens), 256).float()
    assert generate(subject, "abc", tokens=7) == []


def test_log_probabilities_are_those_of_the_continuation_alone():
    hit, miss = (
        torch.log_softmax(torch.nn.functional.one_hot(torch.tensor(0), 256).float(), 0)[i].item() for i in (0, 1)
    )
    assert likelihood(counting(), "ab", "cd", 100) == pytest.approx(hit)
    assert likelihood(counting(), "zz", "cd", 100) == pytest.approx((miss + hit) / 2)
    assert likelihood(counting(), "zzzzzzzzzzzzab", "cd", 3) == pytest.approx(hit)
    assert likelihood(counting(), "", "ab", 100) == pytest.approx((miss + hit) / 2), "a text follows a document's end"
    assert likelihood(counting(), "", "a", 100) == pytest.approx(miss)
    assert likelihood(counting(), "", chr(1), 100) == pytest.approx(hit)


def test_a_model_reads_the_last_tokens_of_a_context_one_sequence_of_them():
    subject, read = counting(), []
    forward = subject.model.forward
    subject.model.forward = lambda tokens: (read.append(bytes(tokens[0].tolist())), forward(tokens))[1]
    likelihood(subject, "zzzzzzab", "cd", 3)
    likelihood(subject, "zzzzzzab", "cd", 9)
    likelihood(subject, "ab", "cd", 9)
    assert read == [b"abc", b"zzzzzzabc", b"abc"], "of the last token nothing is predicted"


def test_a_choice_that_no_sequence_holds_is_refused():
    """The rest of two that end alike would be equally likely, and the first of them right."""
    question = Question(context="ab", choices=("cd" + "x" * 30, "dc" + "x" * 30), answer=1)
    with pytest.raises(ValueError, match="sequence=31: a choice has 32 tokens .'cdxx.*a longer sequence, or shorter"):
        accuracy(counting(), [question], 31)
    accuracy(counting(), [question], 32)


def test_a_model_that_prefers_nothing_is_right_as_often_as_the_first_choice():
    subject = counting()
    torch.nn.init.zeros_(subject.model.size)
    items = [Question(context="ab", choices=("xx", "cd", "dc"), answer=i) for i in (0, 1, 2, 1)]
    assert accuracy(subject, items, 64) == 1 / 4


def test_guessing_is_right_once_in_as_many_as_each_question_has(tmp_path, monkeypatch, capsys):
    items = [{"context": "ab", "choices": ["cd", *others], "answer": 0} for others in (["xx"], ["xx", "yy", "zz"])]
    (tmp_path / "items").write_text("\n".join(map(json.dumps, items)))
    monkeypatch.setattr(answers, "load_subject", lambda source: counting())
    assert cli.main(["evaluate", "some", "--choices", str(tmp_path / "items")]) == 0
    assert capsys.readouterr().out.endswith("100.0 % of 2 right (37.5 % by guessing)\n")


def test_the_right_one_is_found():
    items = [
        Question(context="ab", choices=("xx", "cd", "dc"), answer=1),
        Question(context="kl", choices=("mn", "ml"), answer=0),
        Question(context="kl", choices=("mn", "ml"), answer=1),
    ]
    assert accuracy(counting(), items, 64) == pytest.approx(2 / 3)


def test_loss_of_a_text():
    text = "".join(chr(33 + i % 90) for i in range(181))
    loss, count = text_loss(counting(), counting().encode(text), 90)
    hit, miss = (
        torch.log_softmax(torch.nn.functional.one_hot(torch.tensor(0), 256).float(), 0)[i].item() for i in (0, 1)
    )
    assert count == 180 and loss == pytest.approx(-(178 * hit + 2 * miss) / 180, rel=1e-5)


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 1: not JSON"),
        ('{"context": "a", "choices": ["b", "c"]}', "no object with context, choices and answer"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "at least two choices"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "not empty"),
        ('{"context": "a", "choices": "bc", "answer": 0}', "at least two choices"),
        ('{"context": "a", "choices": ["b", "c", "b"], "answer": 1}', "two choices are the same text"),
        ('{"context": "a", "choices": ["b", "c\\ud800"], "answer": 1}', "half a surrogate pair"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer=2: give the index of a choice, 0 to 1"),
        ('{"context": "a", "choices": ["b", "c"], "answer": true}', "answer=True"),
    ],
)
def test_broken_items(tmp_path, line, words):
    path = tmp_path / "items.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        list(read_items(path))


def test_items_hold_unicode_ends_of_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "items.jsonl"
    value = {"context": "a\u2028b\x85", "choices": ["c\u2029", "d"], "answer": 1}
    path.write_bytes(("\ufeff" + 2 * (json.dumps(value, ensure_ascii=False) + "\r\n")).encode())
    assert list(read_items(path)) == 2 * [Question(context="a\u2028b\x85", choices=("c\u2029", "d"), answer=1)]
    path.write_bytes(b"\n\n{")
    with pytest.raises(ValueError, match="items.jsonl line 3: not JSON"):
        list(read_items(path))


def test_texts_that_are_no_utf8_are_refused_not_read_as_others(run, tmp_path, capsys):
    config, data = run(steps=2, checkpoint_every=2)
    loop.train(config, "nvfp4@all", data)
    text = tmp_path / "latin.txt"
    text.write_bytes(b"caf\xe9 " * 300)
    capsys.readouterr()
    more = ["--out", str(tmp_path / "out"), "--batch", "1", "--sequence", "32"]
    for command in (
        ["evaluate", "--choices"],
        ["evaluate", "--text"],
        ["inspect", "--text"],
        ["sensitivity", "--text"],
    ):
        name, option = command
        rest = [] if name == "evaluate" else more
        assert cli.main([name, str(config.run.out), option, str(text), *rest]) == 2
        file = str(text) if option == "--choices" else f"corpus file {text}"
        assert capsys.readouterr().err == f"halfbyte {name}: {file}: not UTF-8 (byte 3); give UTF-8 text\n"


def test_a_text_is_read_as_it_was_trained_on(run, tmp_path, capsys):
    config, data = run(steps=2, checkpoint_every=2)
    loop.train(config, "nvfp4@all", data)
    said = []
    for end in (b"\n", b"\r\n"):
        text = tmp_path / "text.txt"
        text.write_bytes((b"of values" + end) * 60)
        capsys.readouterr()
        assert cli.main(["evaluate", str(config.run.out), "--text", str(text), "--sequence", "10"]) == 0
        said.append(capsys.readouterr().out.split(" over ")[1])
    assert said == ["600 tokens\n", "660 tokens\n"], "of 601 and 661 bytes, an end of the document among them"


def test_records_and_folders_are_read_as_a_corpus_is(run, tmp_path, capsys):
    """Not as the characters that JSON writes them with."""
    config, data = run(steps=2, checkpoint_every=2)
    loop.train(config, "nvfp4@all", data)
    words = ["of\tvalues\n" * 30, "", "and \u2028 tiles\n" * 20]
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "some.jsonl").write_text("".join(json.dumps({"story": word}) + "\n" for word in words))
    (tmp_path / "one.txt.gz").write_bytes(gzip.compress(words[0].encode()))
    source, said = str(config.run.out), []
    for more in (["texts/some.jsonl", "--text-field", "story"], ["texts", "--text-field", "story"], ["one.txt.gz"]):
        capsys.readouterr()
        path = str(tmp_path / more[0])
        assert cli.main(["evaluate", source, "--text", path, "--sequence", "10", *more[1:]]) == 0
        said.append(capsys.readouterr().out.partition(": ")[2])
    subject = load_subject(config.run.out)
    ids = [i for word in words if word for i in subject.encode(word)]
    loss, count = text_loss(subject, ids, 10)
    assert said[0] == said[1] == f"loss {loss:.4f} nats per token over {count:,} tokens\n"
    assert said[2].endswith(f"over {len(words[0]):,} tokens\n")
    batch = subject.batch(texts, 2, 10, "story")
    plain = subject.loss(subject.model, torch.tensor(ids[:20]).view(2, 10), torch.tensor(ids[1:21]).view(2, 10))
    assert batch(subject.model).item() == plain.item()
    (texts / "bytes").write_bytes(b"\xff")
    assert list(subject.tokens(texts, "story")) == ids and "left out, no UTF-8 text: bytes" in capsys.readouterr().out
    assert cli.main(["evaluate", source, "--text", str(texts / "some.jsonl")]) == 2
    assert "some.jsonl line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["--prompt", "a", "--seed", str(2**64)], f"seed={2**64}: give 0 <= seed < 2**64"),
        (["--prompt", "a", "--seed", "-1"], "seed=-1: give 0 <= seed < 2**64"),
        (["--prompt", "a\udcff"], "prompt='a\\udcff': not UTF-8; give UTF-8 text"),
    ],
)
def test_what_generate_refuses(capsys, options, words):
    assert cli.main(["generate", "runs/none", *options]) == 2
    assert capsys.readouterr().err == f"halfbyte generate: {words}\n"


def test_a_model_without_finite_chances_finds_nothing():
    subject = counting()
    torch.nn.init.constant_(subject.model.size, float("nan"))
    with pytest.raises(ValueError, match="its log probabilities are .nan, nan., of which none is the highest"):
        accuracy(subject, [Question(context="ab", choices=("cd", "xx"), answer=0)], 64)


def choices_script():
    """Return experiments/choices.py as a module."""
    spec = importlib.util.spec_from_file_location("choices", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_items_of_held_out_text(tmp_path):
    script = choices_script()
    texts = ["\n".join(f"    line {i} of the text number {t}" for i in range(60)) for t in range(10)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "short"]))
    assert script.main([str(tmp_path), "--out", str(tmp_path / "items"), "--count", "25"]) == 0
    items = list(read_items(tmp_path / "items"))
    assert len(items) == 25
    for item in items:
        (text,) = [text for text in texts if item.context in text]
        assert item.context + item.choices[item.answer] in text and len(set(item.choices)) == 4
    assert {item.answer for item in items} == {0, 1, 2, 3}
    before = (tmp_path / "items").read_text()
    script.main([str(tmp_path), "--out", str(tmp_path / "items"), "--count", "25"])
    assert (tmp_path / "items").read_text() == before


@pytest.mark.parametrize(
    "words, said",
    [
        (["nowhere", "--out", "items"], "nowhere: holds no .jsonl"),
        (["texts", "--out", "items", "--count", "0"], "--count 0: give 1 or more"),
        (["texts", "--out", "no/items"], "--out no/items: its folder is not there"),
        (["texts", "--out", "items"], "no file in it has a line to ask for"),
    ],
)
def test_what_questions_refuse(words, said, tmp_path, monkeypatch, capsys):
    script = choices_script()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "p.jsonl").write_text(json.dumps({"text": "short"}) + "\n")
    with pytest.raises(SystemExit) as ended:
        script.main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "items").exists()


@pytest.mark.parametrize(
    "line, said", [("{", "not JSON"), ('{"story": "a"}', "'story'"), ('{"text": 3}', "field 'text' is a number")]
)
def test_questions_name_a_record_that_is_none(line, said, tmp_path, capsys):
    script = choices_script()
    (tmp_path / "p.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(SystemExit) as ended:
        script.main([str(tmp_path), "--out", str(tmp_path / "items")])
    words = capsys.readouterr().err
    assert ended.value.code == 2 and f"{tmp_path / 'p.jsonl'} line 2" in words and said in words


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_commands_on_a_run(run, tmp_path, capsys, tokenizer):
    config, data = run(steps=2, checkpoint_every=2, tokenizer=tokenizer)
    loop.train(config, "nvfp4@all", data)
    capsys.readouterr()
    source = str(config.run.out)
    assert cli.main(["generate", source, "--prompt", "the model reads", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the model reads")
    subject = load_subject(config.run.out)
    assert subject.decode(answers.prompt_ids(subject, "keeps one scale")) == "keeps one scale"
    items = tmp_path / "items.jsonl"
    items.write_text('{"context": "the model ", "choices": ["reads a", "of values"], "answer": 0}\n')
    text = tmp_path / "text.txt"
    text.write_text("the model reads a block of sixteen values " * 30)
    command = ["evaluate", source, "--text", str(text), "--choices", str(items), "--sequence", "32"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "nats per token" in said and "of 1 right (50.0 % by guessing)" in said
    assert cli.main(["evaluate", source]) == 2
    assert capsys.readouterr().err == "halfbyte evaluate: text, choices: give one of them, or both\n"
    items.write_text("")
    assert cli.main(["evaluate", source, "--choices", str(items)]) == 2
