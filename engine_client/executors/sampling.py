"""Choosing a token from probabilities: greedy or drawn, after the request's own wishes.

The order is the reference's: penalties, bias and bans change the distribution; temperature 0 then takes the most
probable token (of equals the one with the smallest id), any other temperature sharpens or flattens, ``min_p``,
``top_k`` and ``top_p`` cut the tail, and one number from ``[0, 1)`` picks a token.  Log-probabilities that a request
asks for are those of the model, before any of this.

Threads: pure functions.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from random import Random
from typing import Any, Final

from engine_client.params import SamplingParams

__all__ = ["adjust", "best", "check_params", "draw", "option", "rank_tokens", "seeded_uniform"]


_HUGE: Final = 1e300
_RANGES: Final = {
    "temperature": (0, _HUGE),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-_HUGE, _HUGE),
    "frequency_penalty": (-_HUGE, _HUGE),
    "repetition_penalty": (0, _HUGE),
}


def option(params: Any, name: str) -> Any:
    """Return a field of a request's parameters, whatever object they are; what is missing has its default."""
    return getattr(params, name, getattr(SamplingParams, name))


def check_params(params: Any) -> None:
    """Make sure that a request's parameters, whatever object they are, have types and values that sampling can use.

    Raises:
        TypeError, ValueError: one has not; the message names it.
    """
    for name, (low, high) in _RANGES.items():
        value = option(params, name)
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, not {value!r}")
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, not {value!r}")
    for name in ("top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs"):
        value = option(params, name)
        if not hasattr(value, "__index__") and (value is not None or name in ("top_k", "min_tokens")):
            raise TypeError(f"{name} must be an integer, not {value!r}")
    _check_lists(params)


def _check_lists(params: Any) -> None:
    for token, change in (option(params, "logit_bias") or {}).items():
        if not hasattr(token, "__index__") or not isinstance(change, (int, float)):
            raise TypeError(f"logit_bias must map token ids to numbers, not {token!r} to {change!r}")
        if not (-_HUGE < change < _HUGE or change in (math.inf, -math.inf)):
            raise ValueError(f"logit_bias for token {token} must be a number, not {change!r}")
    for name in ("allowed_token_ids", "stop_token_ids"):
        tokens = option(params, name)
        if not all(hasattr(token, "__index__") for token in tokens or ()):
            raise TypeError(f"{name} must be a list of integers, not {tokens!r}")
    words = option(params, "bad_words")
    if not all(isinstance(word, str) and word for word in words or ()):
        raise TypeError(f"bad_words must be a list of strings that are not empty, not {words!r}")


def adjust(
    probabilities: Sequence[float],
    params: Any,
    history: Callable[[], tuple[Sequence[int], Sequence[int]]],
    banned: Collection[int] = (),
) -> Sequence[float]:
    """Return weights (not normalised) after penalties, ``logit_bias``, ``allowed_token_ids`` and ``banned``.

    When nothing is left, what was asked for contradicts itself, and the probabilities are returned as they were.

    Args:
        probabilities: the model's.
        params: checked by ``check_params``.
        history: called where penalties need them, for the tokens of the prompt and those generated so far.
        banned: tokens that may not come.
    """
    bias = option(params, "logit_bias") or {}
    allowed = option(params, "allowed_token_ids")
    repetition = option(params, "repetition_penalty")
    presence, frequency = option(params, "presence_penalty"), option(params, "frequency_penalty")
    penalised = repetition != 1 or presence or frequency
    if not (bias or allowed or banned or penalised):
        return probabilities
    logits = [math.log(probability) for probability in probabilities]
    tokens = range(len(logits))
    if penalised:
        prompt, outputs = history()
        for token in {*prompt, *outputs}.intersection(tokens):
            logits[token] *= repetition  # a logarithm of a probability is never above 0: this lowers it
        for token, count in Counter(outputs).items():
            if token in tokens:
                logits[token] -= presence + frequency * count
    for token, change in bias.items():
        if token in tokens:
            logits[token] += change
    excluded = set(banned)
    if allowed:
        excluded.update(set(tokens).difference(allowed))
    for token in excluded.intersection(tokens):
        logits[token] = -math.inf
    top = max(logits)
    return [math.exp(logit - top) for logit in logits] if math.isfinite(top) else probabilities


def best(weights: Sequence[float]) -> int:
    """Return the token of the largest weight, of equals the one with the smallest id."""
    return weights.index(max(weights))


def draw(weights: Sequence[float], params: Any, uniform: float) -> int:
    """Return the token that ``uniform``, a number from ``[0, 1)``, picks out of what the parameters leave.

    Tokens are laid out by falling weight, of equals the smallest id first, so that the same number always picks the
    same token.
    """
    temperature, top_k, top_p, min_p = (option(params, name) for name in ("temperature", "top_k", "top_p", "min_p"))
    if temperature == 0:
        return best(weights)
    tokens = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    top = weights[tokens[0]]
    power = 1 / temperature
    # Relative to the top one they are at most 1: no power overflows, and the smallest may well become 0.
    scaled = [(weights[token] / top) ** power for token in tokens]
    keep = top_k if top_k > 0 else len(tokens)
    if min_p > 0:
        keep = min(keep, sum(weight >= min_p for weight in scaled))
    sums = list(accumulate(scaled[:keep]))
    if top_p < 1:
        sums = sums[: bisect_left(sums, top_p * sums[-1]) + 1]
    return tokens[min(bisect(sums, uniform * sums[-1]), len(sums) - 1)]


def rank_tokens(probabilities: Sequence[float], token: int, count: int) -> tuple[list[int], list[float], int]:
    """Return ids and log-probabilities of ``token`` and of the ``count`` most probable ones (-1: all), and its rank.

    The rank counts from 1, the number of tokens that are at least as probable.
    """
    ids = sorted(range(len(probabilities)), key=probabilities.__getitem__, reverse=True)
    ids = [token, *(ids if count < 0 else ids[:count])]
    rank = sum(probability >= probabilities[token] for probability in probabilities)
    return ids, [math.log(probabilities[i]) for i in ids], rank


def seeded_uniform(seed: int, position: int) -> float:
    """Return the number that a request with this seed draws for its ``position``-th token.

    It depends on nothing else: not on the batch, not on whether the request was preempted and computed again.
    """
    return Random(f"{seed}:{position}").random()  # noqa: S311  # repeatable on purpose; nothing is secret
