"""Transformers' own bars are reports while a model is loaded, and bars again afterwards."""

from __future__ import annotations

from typing import Any

from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging

from engine_client.engine.executor import progress_to
from engine_client.executors.transformers_progress import progress_of_transformers


def test_bars_are_reports() -> None:
    """However a bar is used, what it would show is reported; how it is to look does not matter."""
    seen: list[Any] = []
    before = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(before)
    with progress_to(lambda *event: seen.append(event)), progress_of_transformers():
        assert list(logging.tqdm(["a", "b"], desc="Loading shards")) == ["a", "b"]
        with logging.tqdm(total=5, desc="Loading weights") as bar:
            bar.set_postfix(x=1)
            bar.update(2)
            bar.update()
        bar.close()
    shards = [("loading shards", 1, 2), ("loading shards", 2, 2)]
    assert seen == [*shards, ("loading weights", 2, 5), ("loading weights", 3, 5)]
    assert logging.set_tqdm_hook(before) is before


def test_the_bar_of_gguf_files_is_reports() -> None:
    """Though transformers makes it in another way."""
    seen: list[Any] = []
    before = gguf.tqdm
    with progress_to(lambda *event: seen.append(event)), progress_of_transformers():
        assert list(gguf.tqdm(["a", "b"], desc="Converting...")) == ["a", "b"]
    assert seen == [("converting", 1, 2), ("converting", 2, 2)]
    assert gguf.tqdm is before
