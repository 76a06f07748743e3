"""Texts that need no network: Python sources of installed packages, and the dictionary of Debian's dict-gcide.

    python experiments/corpora.py packages --out corpora/packages
    python experiments/corpora.py gcide --dict /usr/share/dictd/gcide.dict.dz --out corpora/gcide

Each writes train/ and held_out/, folders of JSON Lines: a file for every package, or for a share of the headwords, with
a record for every document. A package is in one of the two, whole; of equal documents the first is kept, and none that
is held out is equal to one that is trained on. summary.json says what went where, with a SHA-256 of each.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

HELD_OUT = 24_000_000
"""Bytes of text that are held out: 4 M tokens and more, of a BPE trained here."""
MOST = 400_000_000
LARGEST = 1_000_000
"""Bytes of a file; larger ones are tables, not code."""
SHARDS = 200
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
Group = tuple[str, Iterable[tuple[str, bytes]]]


def packages(roots: Iterable[Path]) -> Iterator[Group]:
    """Yield (package, its sources as (name, text)) of what is installed in folders, in the order of hashed names."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if "__pycache__" not in parts and "site-packages" not in parts and "dist-packages" not in parts:
                found.setdefault(parts[0].removesuffix(".py"), []).append(("/".join(parts), path))
    for name in sorted(found, key=lambda name: (hashlib.sha256(name.encode()).digest(), name)):
        yield name, ((file, path.read_bytes()) for file, path in found[name] if path.stat().st_size <= LARGEST)


def entries(dictionary: Path, index: Path) -> Iterator[Group]:
    """Yield (shard, its entries as (headword, text)) of a dictionary of dictd, in the order of shards.

    Raises:
        ValueError: there is no such dictionary, or a line of its index is broken.
    """
    for path in (dictionary, index):
        if not path.is_file():
            raise ValueError(f"{path}: is not there; install Debian's dict-gcide, or give --dict FILE.dict.dz")
    text = gzip.decompress(dictionary.read_bytes())
    shards: dict[int, dict[tuple[int, int], str]] = {}
    for number, line in enumerate(index.read_text().splitlines(), 1):
        word, *places = line.split("\t")[:3]
        if len(places) < 2 or not all(place and set(place) <= set(BASE64) for place in places):
            raise ValueError(f"{index} line {number}: no word with where its entry begins and how long it is")
        if not word.startswith("00-"):  # about the dictionary itself
            place = _number(places[0]), _number(places[1])
            shard = int(hashlib.sha256(word.lower().encode()).hexdigest(), 16) % SHARDS
            shards.setdefault(shard, {}).setdefault(place, word)
    for shard, places in sorted(shards.items()):
        yield f"shard{shard:03d}", ((word, text[start : start + length]) for (start, length), word in places.items())


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + BASE64.index(digit)
    return value


def build(groups: Iterable[Group], out: Path, held_out: int = HELD_OUT, most: int = MOST) -> dict:
    """Write groups to out/train and out/held_out and return what went where.

    The first groups are held out, until they are `held_out` bytes; they are written last, without what was trained on.

    Raises:
        ValueError: something is in `out` already, whose groups might be on the other side now, or a side is empty.
    """
    there = [part for part in ("train", "held_out", "summary.json") if (out / part).exists()]
    if there:
        raise ValueError(f"--out {out}: {there[0]} is there already; delete the folder, or give another")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as made:  # moved when it is whole: half a text is none
        summary = _build_in(Path(made), groups, held_out, most)
        for part in Path(made).iterdir():
            part.rename(out / part.name)
    return summary


def _build_in(out: Path, groups: Iterable[Group], held_out: int, most: int) -> dict:
    seen: set[bytes] = set()
    first: list[tuple[str, list[tuple[str, bytes]]]] = []
    size, sizes = 0, {"train": 0, "held_out": 0}
    digests = {name: hashlib.sha256() for name in sizes}
    counts = dict.fromkeys(sizes, 0)
    for name, documents in groups:
        if size < held_out:
            first.append((name, list(documents)))
            size += sum(len(text) for _, text in first[-1][1])
        elif sizes["train"] < most:
            _write(out, "train", name, documents, seen, (sizes, counts, digests))
    for name, documents in first:
        _write(out, "held_out", name, documents, seen, (sizes, counts, digests))
    for part in sizes:
        if not counts[part]:
            raise ValueError(
                f"--held-out {held_out}: no document is left for {part}/; give less than the text has, or more text"
            )
    summary = {
        part: {"bytes": sizes[part], "documents": counts[part], "sha256": digests[part].hexdigest()} for part in sizes
    }
    (out / "summary.json").write_text(json.dumps(summary | {"held_out_groups": [name for name, _ in first]}, indent=2))
    return summary


def _write(out: Path, part: str, name: str, documents: Iterable[tuple[str, bytes]], seen: set, totals: tuple) -> None:
    sizes, counts, digests = totals
    lines = []
    for title, text in documents:
        digest = hashlib.sha256(text).digest()
        try:
            readable = text.decode()
        except UnicodeDecodeError:
            continue
        if digest in seen or not readable.strip() or "\0" in readable:
            continue
        seen.add(digest)
        digests[part].update(digest)
        sizes[part] += len(text)
        counts[part] += 1
        lines.append(json.dumps({"name": title, "text": readable}))
    if lines:
        (out / part).mkdir(parents=True, exist_ok=True)
        (out / part / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> int:
    """Build one of the texts and print what it is."""
    parser = argparse.ArgumentParser(description="Build a text from what is on this machine.")
    parser.add_argument("kind", choices=("packages", "gcide"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--roots", type=Path, nargs="*", help="packages: folders; those of this interpreter by default")
    parser.add_argument(
        "--dict", type=Path, default=Path("/usr/share/dictd/gcide.dict.dz"), help="gcide: the dictionary"
    )
    parser.add_argument("--held-out", type=int, default=None, help="bytes that are held out")
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(_build(options), indent=2))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _build(options: argparse.Namespace) -> dict:
    """Build what was asked for.

    Raises:
        ValueError: there is no such text, or no such size.
    """
    if options.held_out is not None and options.held_out <= 0:
        raise ValueError(f"--held-out {options.held_out}: give a number of bytes, 1 or more")
    for root in options.roots or ():
        if not root.is_dir():
            raise ValueError(f"--roots {root}: is no folder; give folders of packages")
    if options.kind == "packages":
        named = [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib", "platlib")]
        groups = packages(options.roots or list(dict.fromkeys(named)))
    else:
        name = options.dict.name.removesuffix(".dz").removesuffix(".dict")
        groups = entries(options.dict, options.dict.with_name(f"{name}.index"))
    default = HELD_OUT if options.kind == "packages" else HELD_OUT // 8
    return build(groups, options.out, default if options.held_out is None else options.held_out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
