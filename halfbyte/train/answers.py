"""The commands `halfbyte generate` and `halfbyte evaluate`: a model continues a text, and chooses among several."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from halfbyte import files
from halfbyte.train.asked import read_options
from halfbyte.train.documents import BOM, TEXT_FIELD
from halfbyte.train.fields import check_positive
from halfbyte.train.subject import Subject, load_subject


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continue a text with the model of a run, in high precision."""

    source: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, one of its checkpoints, or a folder of transformers."""
    prompt: str
    """The text to continue."""
    tokens: int = 100
    """At most so many; the end of a document ends it."""
    temperature: float = 0.8
    """Of sampling; 0 takes the likeliest token."""
    seed: int = 0
    """Of sampling."""

    def __post_init__(self) -> None:
        check_positive(self, "tokens")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: give a finite number, at least 0")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed}: give 0 <= seed < 2**64")
        if any("\ud800" <= letter <= "\udfff" for letter in self.prompt):  # what bytes of an argument become
            raise ValueError(f"prompt={self.prompt!r}: not UTF-8; give UTF-8 text")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Say how well a run's model predicts a text, and how often it finds the right continuation among several."""

    source: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, one of its checkpoints, or a folder of transformers."""
    text: Path | None = None
    """A text, of which the mean loss is taken: a file of text or records, or a folder, as `halfbyte train --corpus`."""
    text_field: str = TEXT_FIELD
    """Of the records of JSON and Parquet files, that holds their text."""
    choices: Path | None = None
    """JSON Lines of {"context": text, "choices": [texts], "answer": index of the right one}."""
    sequence: int = 256
    """Tokens of one sequence; of a context the last ones are read, and a choice has to fit."""

    def __post_init__(self) -> None:
        if self.text is None and self.choices is None:
            raise ValueError("text, choices: give one of them, or both")
        if self.sequence < 2:
            raise ValueError(f"sequence={self.sequence}: give at least 2")


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a batch [B, T] as [B, T, V]."""
    made: Any = model(tokens)
    return (made if isinstance(made, Tensor) else made.logits).float()


def prompt_ids(subject: Subject, text: str) -> list[int]:
    """Return the tokens of a text that goes on, without the end of a document; an empty one follows such an end."""
    return _ids(subject, text) or [subject.end or 0]


def _ids(subject: Subject, text: str) -> list[int]:
    ids = list(subject.encode(text))
    return ids[:-1] if ids and ids[-1] == subject.end else ids


@torch.no_grad()
def generate(subject: Subject, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """Return the tokens with which the model continues a text; the end of a document ends them and is not among them.

    Args:
        subject: the model.
        prompt: the text.
        tokens: at most so many.
        temperature: of sampling, 0: the likeliest each time.
        seed: of sampling.
    """
    device = next(subject.model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids, begun = prompt_ids(subject, prompt), len(prompt_ids(subject, prompt))
    for _ in range(tokens):
        logits = _logits(subject.model, torch.tensor([ids], device=device))[0, -1].cpu()
        if temperature > torch.finfo(logits.dtype).tiny:  # below it the likeliest alone has a chance
            chances = ((logits - logits.max()) / temperature).softmax(-1)
            chosen = int(torch.multinomial(chances, 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen == subject.end:
            break
        ids.append(chosen)
    return ids[begun:]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question: a text, continuations of it, and which of these is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_items(path: Path) -> Iterator[Question]:
    """Yield the items of JSON Lines.

    Raises:
        ValueError: a line is no item; the message names file, line and what is wrong.
    """
    text = files.read_given_text(path).removeprefix(BOM)
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold Unicode's other ends of lines
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg}); repair or delete it") from error
        if not isinstance(value, dict) or not {"context", "choices", "answer"} <= set(value):
            raise ValueError(f"{where}: no object with context, choices and answer; repair or delete it")
        choices, answer = value["choices"], value["answer"]
        texts = [value["context"], *choices] if isinstance(choices, list) else [None]
        if len(texts) < 3 or not all(isinstance(text, str) for text in texts) or not all(texts[1:]):
            raise ValueError(f"{where}: context and at least two choices have to be texts, choices not empty")
        if len(set(choices)) < len(choices):
            raise ValueError(f"{where}: two choices are the same text, of which none can be the right one; change one")
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
            raise ValueError(f"{where}: half a surrogate pair, which no text holds; repair or delete it")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise ValueError(f"{where}: answer={answer!r}: give the index of a choice, 0 to {len(choices) - 1}")
        yield Question(context=value["context"], choices=tuple(choices), answer=answer)


@torch.no_grad()
def likelihood(subject: Subject, context: str, continuation: str, sequence: int) -> float:
    """Return the mean log probability of the tokens of a continuation, given the end of a context.

    Both are tokenized together, so that the border is the text's own; the tokens that differ from the context's are the
    continuation's. Behind an empty context all of them are.

    Raises:
        ValueError: the continuation is longer than a sequence: what was left out could be what decides.
    """
    before, whole = prompt_ids(subject, context), _ids(subject, context + continuation)
    whole = whole if _ids(subject, context) else before + whole
    shared = next(
        (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole))
    )
    shared = max(1, min(shared, len(whole) - 1))
    if len(whole) - shared > sequence:
        raise ValueError(
            f"sequence={sequence}: a choice has {len(whole) - shared} tokens ({continuation[:40]!r}…); give a longer "
            "sequence, or shorter choices"
        )
    first = max(0, len(whole) - sequence - 1)
    device = next(subject.model.parameters()).device
    tokens = torch.tensor(whole[first:], device=device)
    chances = _logits(subject.model, tokens[None, :-1])[0].log_softmax(-1)
    own = chances.gather(1, tokens[1:, None])[:, 0][max(0, shared - 1 - first) :]
    return float(own.mean())


def accuracy(subject: Subject, items: Sequence[Question], sequence: int) -> float:
    """Return how often the right continuation is the likeliest, token by token.

    Raises:
        ValueError: the model's log probabilities are not finite.
    """
    right = 0
    for item in items:
        scores = [likelihood(subject, item.context, choice, sequence) for choice in item.choices]
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"{subject.name}: its log probabilities are {scores}, of which none is the highest")
        right += scores.index(max(scores)) == item.answer
    return right / len(items)


@torch.no_grad()
def text_loss(subject: Subject, tokens: Iterable[int], sequence: int) -> tuple[float, int]:
    """Return the mean loss of a text in nats per token, and how many tokens were predicted."""
    ids = torch.tensor(list(tokens))
    windows = (len(ids) - 1) // sequence
    if windows < 1:
        raise ValueError(f"text: {len(ids)} tokens do not fill a sequence of {sequence}; give more text, or --sequence")
    device, total = next(subject.model.parameters()).device, 0.0
    for i in range(windows):
        part = ids[i * sequence : (i + 1) * sequence + 1].to(device)
        total += float(F.cross_entropy(_logits(subject.model, part[None, :-1])[0], part[1:]))
    return total / windows, windows * sequence


def _parse(kind: Any, name: str, arguments: list[str]) -> Any:
    prog = f"halfbyte {name}"
    return read_options(lambda: tyro.cli(kind, prog=prog, args=arguments, config=(tyro.conf.OmitArgPrefixes,)), prog)


def generate_command(arguments: list[str]) -> int:
    """Run `halfbyte generate`; returns 0."""
    options = _parse(GenerateOptions, "generate", arguments)
    subject = load_subject(options.source)
    made = generate(subject, options.prompt, tokens=options.tokens, temperature=options.temperature, seed=options.seed)
    print(options.prompt + subject.decode(made))
    return 0


def evaluate_command(arguments: list[str]) -> int:
    """Run `halfbyte evaluate`; returns 0."""
    options = _parse(EvaluateOptions, "evaluate", arguments)
    items = None if options.choices is None else list(read_items(options.choices))
    if items == []:
        raise ValueError(f"{options.choices}: holds no item; give lines of context, choices and answer")
    subject = load_subject(options.source)
    if options.text is not None:
        loss, tokens = text_loss(subject, subject.tokens(options.text, options.text_field), options.sequence)
        print(f"{options.text}: loss {loss:.4f} nats per token over {tokens:,} tokens")
    if items:
        share = accuracy(subject, items, options.sequence)
        guessed = sum(1 / len(item.choices) for item in items) / len(items)
        print(f"{options.choices}: {100 * share:.1f} % of {len(items)} right ({100 * guessed:.1f} % by guessing)")
    return 0
