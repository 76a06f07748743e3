"""Questions made of held-out text: the end of a piece of it, and four lines of which one is the next.

    python experiments/choices.py corpora/packages/held_out --out experiments/choices.jsonl

The wrong lines are from other places of the same file. 300 items by default, the same from the same text.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from halfbyte.train.documents import TEXT_FIELD, find_documents

CONTEXT, CHOICES = 12, 4
"""Lines of a context, and choices of an item."""
SHORTEST, LONGEST = 20, 160
"""Characters of a line that is a choice."""


def items(texts: list[str], count: int, seed: int = 0) -> list[dict]:
    """Return up to `count` items, at most one a text at a time."""
    generator, made = random.Random(seed), []
    order = list(texts)
    for _ in range(20):
        generator.shuffle(order)
        for text in order:
            item = _item(text, generator)
            if item is not None and item not in made:
                made.append(item)
            if len(made) == count:
                return made
    return made


def _item(text: str, generator: random.Random) -> dict | None:
    lines = text.splitlines()
    fitting = [i for i, line in enumerate(lines) if SHORTEST <= len(line.strip()) <= LONGEST]
    places = [i for i in fitting if i >= CONTEXT]
    others = sorted({lines[i] for i in fitting})
    if not places or len(others) < 4 * CHOICES:
        return None
    place = generator.choice(places)
    context = lines[place - CONTEXT : place]
    wrong = [line for line in others if line != lines[place] and line not in context]
    if len(wrong) < CHOICES - 1:
        return None
    choices = [lines[place], *generator.sample(wrong, CHOICES - 1)]
    generator.shuffle(choices)
    return {"context": "\n".join(context) + "\n", "choices": choices, "answer": choices.index(lines[place])}


def main(arguments: list[str]) -> int:
    """Write the items of a folder of JSON Lines and say how many."""
    parser = argparse.ArgumentParser(description="Make questions of held-out text.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.glob("*.jsonl"))
    if not paths:
        parser.error(f"{options.folder}: holds no .jsonl; give the held_out/ of experiments/corpora.py")
    if options.count < 1:
        parser.error(f"--count {options.count}: give 1 or more")
    if not options.out.absolute().parent.is_dir():
        parser.error(f"--out {options.out}: its folder is not there; make it first")
    try:
        texts = [text.decode() for path in paths for text in find_documents(path, TEXT_FIELD, named=True).texts]
    except ValueError as error:
        parser.error(str(error))
    made = items(texts, options.count)
    if not made:
        parser.error(f"{options.folder}: no file in it has a line to ask for; give more text")
    options.out.write_text("".join(json.dumps(item) + "\n" for item in made))
    print(f"{len(made)} items in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
