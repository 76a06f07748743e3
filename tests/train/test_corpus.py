"""Text that is there: order, hashes, and a clear word about everything that is not text."""

import errno
import gzip
import os
from pathlib import Path

import pytest

from halfbyte import files
from halfbyte.train import corpus


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "sub" / "b.txt").write_text("beta ü")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"gamma"))
    return tmp_path


def test_a_folder_is_read_with_what_is_packed_in_it(texts):
    found = corpus.load_corpus(str(texts))
    assert sorted(found.documents()) == [b"alpha", "beta ü".encode(), b"gamma"]
    assert found.size == 5 + 7 + 5


def test_order_and_hash_depend_on_names_and_text_alone(texts, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    for name in ("sub/b.txt", "c.txt.gz", "a.txt"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes((texts / name).read_bytes())
    first, second = corpus.load_corpus(str(texts)), corpus.load_corpus(str(copy))
    assert (first.names, first.sha256) == (second.names, second.sha256)
    (copy / "a.txt").write_text("alphb")
    assert corpus.load_corpus(str(copy)).sha256 != first.sha256


def test_one_file(texts):
    assert list(corpus.load_corpus(str(texts / "c.txt.gz")).documents()) == [b"gamma"]


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opened, it would wait for a writer for ever
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(ValueError, match=f"^corpus='{path}': a pipe or a device, .*; write it to a file first$"):
            corpus.load_corpus(path)
    with pytest.raises(ValueError, match="^/dev/null: a device, which may have no end; give a file of UTF-8 text$"):
        files.read_given_text(Path("/dev/null"))


def test_a_file_whose_name_is_no_utf8_is_named(texts):
    name = os.fsencode(texts) + b"/caf\xe9.txt"
    with open(name, "wb") as file:
        file.write(b"text")
    for given in (str(texts), os.fsdecode(name)):
        with pytest.raises(ValueError, match=r"^corpus file '.*/caf\\udce9\.txt': its name is not UTF-8; rename it$"):
            corpus.load_corpus(given)


def test_hidden_and_binary_files_of_a_folder_are_left_out(texts):
    (texts / ".git").mkdir()
    (texts / ".git" / "config").write_text("hidden")
    (texts / "image.bin").write_bytes(b"\x89PNG\0\0")
    (texts / "latin.txt").write_bytes("ü".encode("latin-1"))
    found = corpus.load_corpus(str(texts))
    assert sorted(found.summary()["skipped"]) == ["image.bin", "latin.txt"]
    assert len(found.names) == 3


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        corpus.load_corpus(str(tmp_path / "absent"))


@pytest.mark.parametrize("content", [{}, {"empty.txt": b""}, {"image.bin": b"\0"}])
def test_no_text_in_it(tmp_path, content):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match="no text in it"):
        corpus.load_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "reason"), [(b"abc\0", r"binary \(a NUL byte at 3\)"), (b"ab\xff", r"not UTF-8 \(byte 2\)")]
)
def test_a_named_file_must_be_text(tmp_path, data, reason):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        corpus.load_corpus(str(tmp_path / "file"))


def test_broken_gzip_is_named(texts):
    whole = (texts / "c.txt.gz").read_bytes()
    (texts / "c.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"c\.txt\.gz: broken gzip"):
        corpus.load_corpus(str(texts))


def test_unreadable_file_is_named(texts, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(corpus.Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"\.txt.*cannot be read \(Permission denied\)"):
        corpus.load_corpus(str(texts))


def test_the_interpreters_sources(monkeypatch, tmp_path):
    for name in ("os.py", "site-packages/extra.py", "json/__init__.py", "json/__pycache__/x.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert sorted(corpus.load_corpus("python").names) == ["json/__init__.py", "os.py"]


def test_what_is_hidden_is_left_out(tmp_path):
    for name in ("seen.txt", ".hidden.txt", ".git/config", "inner/.secret", "inner/seen.txt", "a.b/seen.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("words")
    found = corpus.load_corpus(str(tmp_path))
    assert sorted(found.names) == ["a.b/seen.txt", "inner/seen.txt", "seen.txt"] and not found.skipped


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    """Whatever is in it would be missing from the text in silence."""
    (tmp_path / "seen.txt").write_text("words")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def scan(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(ValueError, match=r"closed cannot be listed \(Permission denied\); check its rights"):
        corpus.load_corpus(str(tmp_path))
