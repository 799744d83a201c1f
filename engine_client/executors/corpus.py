"""The texts that the built-in model can be made of.

A corpus is UTF-8 text as bytes in which the byte 0xFF, which UTF-8 never uses, ends each document.  The default one is
the standard library's ``pydoc_data.topics`` (about half a megabyte of English on Python), so it needs no download.

Threads: pure functions, beside reading the file or module.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final

__all__ = ["DOCUMENT_END", "default_corpus", "load_corpus"]

DOCUMENT_END: Final = b"\xff"


def default_corpus() -> bytes:
    """Return the language reference's topics, a document each, in the order of their names.

    Raises:
        ValueError: this Python was installed without them; the message says what to do.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError(
            "this Python comes without pydoc_data.topics, the text of the built-in model; "
            "name a text file instead (--corpus FILE, or additional_config={'corpus': path})"
        ) from error
    return b"".join(topics[name].encode("utf-8", "replace") + DOCUMENT_END for name in sorted(topics))


def load_corpus(path: str | Path) -> bytes:
    """Return the text file at ``path`` as one document; what is not UTF-8 in it becomes U+FFFD.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no text in it.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"the corpus {str(path)!r} has no text in it")
    return text.encode("utf-8") + DOCUMENT_END
