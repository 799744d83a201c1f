"""Without the libraries it needs, the executor says what to install; the rest is in ``tests/with_transformers``."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from engine_client import EngineConfig
from engine_client.executors import transformers
from engine_client.executors.transformers import TransformersExecutor


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"engine_client\[transformers\]"):
        TransformersExecutor(EngineConfig())


def test_kinds_of_layers_are_read_from_the_model() -> None:
    """One that has keys and values can run, with or without a window; one that keeps something else cannot."""
    plain = SimpleNamespace(num_attention_heads=2, model_type="x")
    assert transformers.layer_types(plain) == {"full_attention"}
    assert transformers.layer_types(SimpleNamespace(**vars(plain), sliding_window=4)) == {"sliding_attention"}
    mixed = SimpleNamespace(**vars(plain), layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="cannot run x: it has linear_attention"):
        transformers.layer_types(mixed)
