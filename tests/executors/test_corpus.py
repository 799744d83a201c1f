"""Where the text of the built-in model comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from engine_client.executors.corpus import DOCUMENT_END, default_corpus, load_corpus


def test_default_corpus_is_english_in_documents():
    """The default corpus is over 0.4 MB of UTF-8 text in several documents, the same each time."""
    corpus = default_corpus()
    assert len(corpus) > 400_000
    documents = corpus.split(DOCUMENT_END)
    assert documents.pop() == b""
    assert len(documents) > 50
    assert all(document.decode("utf-8") for document in documents)
    assert b'The "with" statement is used to wrap the execution' in corpus
    assert default_corpus() == corpus


def test_missing_topics_say_what_to_do(monkeypatch):
    """On a Python without pydoc_data the error names the way out."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="--corpus FILE"):
        default_corpus()


def test_topics_are_sorted_by_name(monkeypatch):
    """The corpus does not depend on the order in which this Python lists its topics."""
    module = ModuleType("pydoc_data.topics")
    module.topics = {"b": "second", "a": "first"}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
    assert default_corpus() == b"first\xffsecond\xff"


def test_file_is_one_document(tmp_path: Path):
    """A text file becomes one document."""
    file = tmp_path / "häuser.txt"
    file.write_text("Häuser\nund Bäume\n", encoding="utf-8")
    assert load_corpus(file) == "Häuser\nund Bäume\n".encode() + DOCUMENT_END
    assert load_corpus(str(file)) == load_corpus(file)


def test_file_that_is_not_utf8_cannot_hold_a_document_end(tmp_path: Path):
    """Bytes that are not UTF-8 become U+FFFD, so that 0xFF stays the end of documents."""
    file = tmp_path / "latin.txt"
    file.write_bytes(b"one \xff two \xe4 three")
    text = load_corpus(file)
    assert text.count(DOCUMENT_END) == 1
    assert text[:-1].decode("utf-8") == "one \ufffd two \ufffd three"


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_file_without_text_is_refused(tmp_path: Path, content: bytes):
    """A file without text is an error that names it."""
    file = tmp_path / "empty.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"empty\.txt.* has no text"):
        load_corpus(file)


def test_missing_file_is_an_oserror(tmp_path: Path):
    """A file that is not there is the operating system's error."""
    with pytest.raises(FileNotFoundError):
        load_corpus(tmp_path / "absent.txt")
