"""What transformers tells of its own progress, passed on as progress of the engine's start.

Threads: the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine_client.engine.executor import report_progress

__all__ = ["progress_of_transformers"]


@contextmanager
def progress_of_transformers() -> Iterator[None]:
    """Pass on what transformers shows of its own progress, in place of its bars; it is as before afterwards."""
    from transformers.utils import logging  # noqa: PLC0415  # optional

    set_hook = getattr(logging, "set_tqdm_hook", None)
    if set_hook is None:  # a release before 5
        yield
        return

    def make(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> _Reporting:
        items: Any = args[0] if args else options.get("iterable")
        total = options.get("total") or (len(items) if hasattr(items, "__len__") else 0)
        return _Reporting(items, str(options.get("desc") or "loading weights").rstrip(".").lower(), int(total))

    before = set_hook(make)
    try:
        with _bar_of_gguf(lambda *args, **options: make(None, args, options)):
            yield
    finally:
        set_hook(before)


@contextmanager
def _bar_of_gguf(make: Callable[..., _Reporting]) -> Iterator[None]:
    """Replace the one bar that does not ask the hook: that of GGUF files."""
    from transformers import modeling_gguf_pytorch_utils as reader  # noqa: PLC0415  # optional

    before = getattr(reader, "tqdm", None)
    if before is None:  # a release that asks there, too
        yield
        return
    reader.tqdm = make
    try:
        yield
    finally:
        reader.tqdm = before


class _Reporting:
    """Stands for one of transformers' bars, and reports instead of showing."""

    def __init__(self, items: Any, phase: str, total: int) -> None:
        self._items, self._phase, self._total, self._done = items, phase, total, 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing  # how it is to look

    def __iter__(self) -> Iterator[Any]:
        for item in self._items or ():
            yield item
            self.update(1)

    def __enter__(self) -> _Reporting:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, number: int = 1) -> None:
        """Note what is done, and tell it."""
        self._done += number
        report_progress(self._phase, self._done, self._total)


def _nothing(*_: object, **__: object) -> None:
    pass
