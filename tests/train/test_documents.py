"""Records become documents: their text, their boundaries, and the line of a record that cannot be read."""

import gzip
import json

import numpy as np
import pytest

from halfbyte import cli
from halfbyte.train import corpus, data
from halfbyte.train.config import DataConfig, TrainConfig

TEXTS = ["first record", 'quotes " and \\ and\nnewlines', "ü — 木 \u2028 one document still", "last"]
ENCODED = [text.encode() for text in TEXTS]


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def records(field="text"):
    return [{"id": number, field: text, "meta": {"text": "not this"}} for number, text in enumerate(TEXTS)]


def write(path, content):
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)
    return str(path)


FORMS = {
    "a.jsonl": lines(*records()),
    "a.jsonl.gz": lines(*records()),
    "A.JSONL": lines(*records()),
    "A.JSONL.GZ": lines(*records()),
    "a.ndjson": "\ufeff" + "\r\n".join(map(json.dumps, records())),
    "a.json": json.dumps(records(), indent=2),
    "b.json": lines(*records()),
    "a.json.gz": lines(*records()),
    "blank.jsonl": "\n" + lines(*records()[:2]) + "  \n\n" + lines({"text": ""}, *records()[2:]),
    "raw.jsonl": "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records()),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_records(tmp_path, name):
    found = corpus.load_corpus(write(tmp_path / name, FORMS[name]))
    assert list(found.documents()) == ENCODED
    assert (found.count, found.size) == (len(TEXTS), sum(map(len, ENCODED)))
    assert found.summary()["documents"] == len(TEXTS)


def test_the_token_stream_is_text_and_boundaries_and_nothing_of_the_syntax(tmp_path):
    texts = [f"record {number}" for number in range(200)]
    path = write(tmp_path / "a.jsonl", lines(*({"text": text, "source": "web"} for text in texts)))
    loaded = data.load_data(DataConfig(corpus=path, sequence=16), tmp_path / "cache")
    stream = bytes(np.concatenate((loaded.train, loaded.held_out)))
    assert stream == b"".join(text.encode() + b"\0" for text in texts)
    assert loaded.summary["documents"] == 200


def test_the_hash_follows_the_text_and_its_boundaries_alone(tmp_path):
    def sha(*rows, field="text"):
        return corpus.load_corpus(write(tmp_path / "a.jsonl", lines(*rows)), field).sha256

    base = sha({"text": "ab"}, {"text": "c"})
    assert sha({"text": "ab", "id": 7}, {"text": ""}, {"score": 0.5, "text": "c"}) == base
    assert sha({"body": "ab"}, {"body": "c"}, field="body") == base
    assert (
        len({base, sha({"text": "a"}, {"text": "bc"}), sha({"text": "abc"}), sha({"text": "c"}, {"text": "ab"})}) == 4
    )


def test_another_field_is_another_text_and_no_new_key_in_the_identity(tmp_path):
    path = write(tmp_path / "a.jsonl", lines(*({"text": "x" * 50, "body": "y" * 60} for _ in range(20))))
    kinds = [DataConfig(corpus=path, sequence=16, text_field=field) for field in ("text", "body")]
    loaded = [data.load_data(kind, tmp_path / "cache") for kind in kinds]
    assert {bytes(one.train[:4]) for one in loaded} == {b"xxxx", b"yyyy"}
    assert loaded[0].summary["sha256"] != loaded[1].summary["sha256"]
    identities = [TrainConfig(data=kind).identity("bf16") for kind in kinds]
    assert identities[0] == identities[1] and "text_field" not in identities[0]["data"]


def test_a_folder_of_records_text_and_what_only_ends_in_json(tmp_path):
    package = json.dumps({"name": "x", "scripts": {"text": "no"}}, indent=2)
    for name, content in {
        "a.jsonl.gz": lines(*records()[:2]),
        "b.json": json.dumps(records()[2], indent=1),
        "c.txt": "plain {",
        "package.json": package,
        "numbers.json": "[1, 2]",
        "tsconfig.json": "// comment\n{\n}",
        "none.jsonl": "",
        "image.bin": b"\x00",
    }.items():
        write(tmp_path / name, content)
    found = corpus.load_corpus(str(tmp_path))
    plain = [b"plain {", package.encode(), b"[1, 2]", b"// comment\n{\n}"]
    assert sorted(found.documents()) == sorted([*ENCODED[:3], *plain])
    assert found.skipped == ("image.bin",) and len(found.names) == 6


BROKEN = [
    ("a.jsonl", lines(records()[0], {"body": 1, "id": 2}), r"a\.jsonl line 2: no field 'text', it has 'body', 'id'"),
    ("a.jsonl", lines({}), "line 1: no field 'text', it has nothing"),
    ("a.jsonl", "\n" + lines({"text": None}), "line 2: field 'text' is null, no string"),
    ("a.jsonl", lines({"text": ["a"]}), "field 'text' is an array, no string"),
    ("a.jsonl", lines({"text": 1.5}), "field 'text' is a number, no string"),
    ("a.jsonl", lines({"text": True}), "field 'text' is a boolean, no string"),
    ("a.jsonl", lines(["text"]), "line 1: an array, no object"),
    ("a.jsonl", lines("text"), "line 1: a string, no object"),
    ("a.jsonl", lines(records()[0]) + '{"text": "cut', r"line 2: not JSON \(Unterminated string"),
    ("a.jsonl", '{"text": "a"} {"text": "b"}\n', r"line 1: not JSON \(Extra data"),
    ("a.jsonl", "[" * 100_000 + "\n", "line 1: not JSON"),
    ("a.jsonl", '{"text": ' + "1" * 5000 + "}\n", "line 1: not JSON"),
    ("a.jsonl", lines({"text": "a\0b"}), "line 1: field 'text' holds a NUL"),
    ("a.jsonl", '{"text": "\\ud800"}\n', "line 1: field 'text' holds half a surrogate pair"),
    ("a.jsonl", lines(records()[0]).encode() + b'{"text": "\xff"}\n', r"line 2: not UTF-8 \(byte 10\)"),
    ("a.jsonl", lines({"text": ""}), "no text in it"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", r"packed as \.zst; unpack it \(zstd -d\)"),
    ("a.json", json.dumps([{"text": "a"}, {"body": "b"}]), r"a\.json record 2: no field 'text', it has 'body'"),
    ("a.json", '[{"text": "a"}, {"te', r"a\.json: not JSON"),
    ("a.json", lines({"text": "a"}, {"id": 1}), "line 2: no field 'text'"),
    ("a.json", '"cut in half"}\n' + lines(*records()), r"line 1: not JSON \(Extra data"),
    ("a.json", lines({"body": "a"}, {"body": "b"}), "line 1: no field 'text', it has 'body'"),
]


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize(("name", "content", "reason"), BROKEN)
def test_a_record_that_cannot_be_read_is_named(tmp_path, name, content, reason, in_folder):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=reason):
        corpus.load_corpus(str(tmp_path) if in_folder else path)


@pytest.mark.parametrize("content", ['{"name": "x"}', "[]", '["a"]', "{", "words"])
def test_a_json_file_that_was_named_has_to_hold_records(tmp_path, content):
    with pytest.raises(ValueError, match=r"a\.json: (neither lines nor an array|not JSON).*"):
        corpus.load_corpus(write(tmp_path / "a.json", content))


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_broken_gzip_of_records_is_named(tmp_path, keep):
    whole = gzip.compress(lines(*({"text": f"{number**5}"} for number in range(2000))).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: broken gzip"):
        corpus.load_corpus(str(tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.jsonl.gz").write_text("no gzip")
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: broken gzip"):
        corpus.load_corpus(str(tmp_path))


def test_a_field_for_text_without_fields_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "words")
    with pytest.raises(ValueError, match="text_field='body': corpus=.* has no JSON Lines"):
        corpus.load_corpus(path, "body")
    with pytest.raises(ValueError, match="text_field=''"):
        DataConfig(text_field="")


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kinds = {"s": arrow.string(), "large": arrow.large_string(), "d": arrow.dictionary(arrow.int32(), arrow.string())}
    for name, kind in kinds.items():
        table = arrow.table({"id": [1, 2, 3, 4, 5], "body": arrow.array([*TEXTS, ""], kind)})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
        assert list(corpus.load_corpus(str(tmp_path / f"{name}.parquet"), "body").documents()) == ENCODED
    with pytest.raises(ValueError, match=r"s\.parquet: no field 'text', it has 'id', 'body'"):
        corpus.load_corpus(str(tmp_path / "s.parquet"))
    with pytest.raises(ValueError, match=r"s\.parquet row 1: field 'id' is a number"):
        corpus.load_corpus(str(tmp_path / "s.parquet"), "id")
    parquet.write_table(arrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"null\.parquet row 2: field 'text' is null"):
        corpus.load_corpus(str(tmp_path / "null.parquet"))
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "s.parquet").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cut\.parquet: broken Parquet"):
        corpus.load_corpus(str(tmp_path / "cut.parquet"))


def test_parquet_without_its_package_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts" / "a.parquet", b"PAR1")
    for path in (tmp_path / "texts", tmp_path / "texts" / "a.parquet"):
        assert cli.main(["train", "--corpus", str(path), "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert error.endswith("a.parquet: Parquet needs the package `pyarrow`: pip install pyarrow\n")
        assert error.count("\n") == 1 and not (tmp_path / "run").exists()
