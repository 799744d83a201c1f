"""Tokens are chosen from logits with torch as ``sampling`` chooses them from probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine_client import SamplingParams
from engine_client.executors import sampling
from engine_client.executors.torch_sampling import choose, is_plain, logprob_rows

SIZE = 40
WISHES: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"top_k": 10, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 3.0},
    {"logit_bias": {3: 2.0, 99: 1.0}, "allowed_token_ids": [3, 4, 5, 99]},
]


def logits_of(seed: int) -> Any:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("wishes", WISHES, ids=str)
def test_the_same_number_picks_the_same_token(wishes: dict[str, Any]) -> None:
    """For any number drawn, torch and plain Python pick the same token out of what the wishes leave."""
    params = SamplingParams(**wishes)
    for seed in range(5):
        logits = logits_of(seed)
        probabilities = logits.double().softmax(-1).tolist()
        weights = sampling.adjust(probabilities, params, lambda: ((), ()))
        for step in range(10):
            uniform = (step + 0.37) / 10
            expected = sampling.draw(weights, params, uniform)
            assert choose(logits, params, [], 0, [], lambda: uniform) == expected  # noqa: B023  # called at once


def test_plain_requests_are_the_greedy_ones() -> None:
    """Whoever wants nothing but the most probable token is known at sight."""
    assert is_plain(SamplingParams(temperature=0))
    assert is_plain(SamplingParams(temperature=0, top_k=5, seed=1, logprobs=2))
    for wishes in ({"temperature": 0.1}, {"logit_bias": {1: 1.0}}, {"min_tokens": 1}, {"repetition_penalty": 1.2}):
        assert not is_plain(SamplingParams(**{"temperature": 0, **wishes}))


def test_penalties_and_bans_change_the_choice() -> None:
    """A token that was there already, or is banned, is not the best any more; contradictions are passed over."""
    logits = torch.zeros(SIZE)
    logits[7], logits[8], logits[9] = 3.0, 2.9, -1.0

    def best(tokens: list[int], prompt: int, banned: list[int], **wishes: Any) -> int:
        return choose(logits, SamplingParams(temperature=0, **wishes), tokens, prompt, banned, lambda: 0.0)

    assert best([], 0, []) == 7
    assert best([7], 1, [], repetition_penalty=1.5) == 8
    assert best([7], 1, [], presence_penalty=1.0) == 7  # it is of the prompt
    assert best([1, 7], 1, [], presence_penalty=1.0) == 8
    assert best([1, 7, 7], 1, [], frequency_penalty=0.2) == 8
    assert best([], 0, [7, 99]) == 8
    assert best([], 0, list(range(SIZE))) == 7


def test_rows_tell_the_model_s_own() -> None:
    """Each row has the token that came, then the best ones; the rank counts from 1."""
    logits = torch.stack([logits_of(1), logits_of(2)])
    ids, values, ranks = logprob_rows(logits, [5, int(logits[1].argmax())], 2)[:3]
    logprobs = logits.log_softmax(-1)
    assert ids[0][0] == 5
    assert ids[1][0] == ids[1][1]
    assert ranks[1] == 1
    assert ranks[0] == int((logits[0] >= logits[0][5]).sum())
    for row in range(2):
        assert values[row] == pytest.approx(logprobs[row][ids[row]].tolist())
        assert values[row][1] >= values[row][2]
    assert len(logprob_rows(logits, [0, 0], -1)[0][0]) == SIZE + 1
    assert all(math.isfinite(value) for value in values[0])
