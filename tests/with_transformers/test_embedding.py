"""The second task: vectors of prompts, as the model has them, through shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine_client import EngineCoreRequest, PoolingParams, running_engines
from helpers.timing import DEADLOCK, eventually

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


def embed(client: Any, name: str, tokens: list[int], **params: Any) -> np.ndarray:
    pooling = PoolingParams(**params)
    client.add_request(EngineCoreRequest(name, tokens, None, None, pooling, 0.0, None, None, None))
    while True:
        for output in client.get_output().outputs:
            if output.finished:
                return output.pooling_output


def test_vectors_are_the_model_s(make: Callable[..., Any]) -> None:
    """The last token's hidden state, of length 1 or as it is, whole or cut; or that of every token."""
    client = make()
    executor = client.engine_core.model_executor
    tokens = executor.encode(TEXT)[:40]
    with torch.inference_mode():
        hidden = executor.model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0].numpy()
    plain = embed(client, "plain", tokens, task="embed", use_activation=False)
    np.testing.assert_allclose(plain, hidden[-1], rtol=1e-3, atol=1e-3)
    unit = embed(client, "unit", tokens, task="embed")
    np.testing.assert_allclose(unit, hidden[-1] / np.linalg.norm(hidden[-1]), rtol=1e-3, atol=1e-3)
    assert embed(client, "short", tokens, task="embed", dimensions=64).shape == (64,)
    each = embed(client, "each", tokens, task="token_embed", use_activation=False)
    np.testing.assert_allclose(each, hidden, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="pooling task"):
        embed(client, "bad", tokens, task="classify")


def test_they_come_through_shared_memory(make: Callable[..., Any]) -> None:
    """From a process of its own the vectors of a long prompt arrive in the arena, and none by the pipe."""
    client = make(True)
    assert set(client.get_supported_tasks()) == {"generate", "embed", "token_embed"}
    [tokens] = client.collective_rpc("encode", args=(TEXT,))
    each = embed(client, "a", tokens, task="token_embed")
    assert each.shape == (len(tokens), 576)
    assert each.nbytes > 1 << 17
    np.testing.assert_allclose(np.linalg.norm(each, axis=1), 1, rtol=1e-4)

    def counted() -> Any:
        [engine] = running_engines(os.getpid())
        return engine.counted

    nbytes = each.nbytes
    eventually(lambda: counted().arena_capacity >= nbytes, DEADLOCK)  # told when the step is over
    assert counted().arena_fallbacks == 0
