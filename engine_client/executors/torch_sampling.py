"""Choosing tokens from a model's logits with torch: the same wishes as in ``sampling``, on vectors.

Greedy requests without further wishes are served together, by one ``argmax``; every other one by itself.  As there, a
request with a seed draws the same tokens whatever else is in its batch, and log-probabilities are the model's own.

Threads: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from engine_client.executors.sampling import option
from engine_client.messages import LogprobsLists

__all__ = ["choose", "is_plain", "logprob_rows"]

_WISHES: Final = {
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "temperature": 0,
}


def is_plain(params: Any) -> bool:
    """Tell whether the most probable token is all that is wanted."""
    return all((option(params, name) or default) == default for name, default in _WISHES.items())


def choose(
    logits: Any,
    params: Any,
    tokens: Sequence[int],
    num_prompt_tokens: int,
    banned: Sequence[int],
    draw: Callable[[], float],
) -> int:
    """Return the token for one request.

    Args:
        logits: of the whole vocabulary; not changed.
        params: checked by ``sampling.check_params``.
        tokens: the prompt and what was generated so far.
        num_prompt_tokens: how many of them are the prompt.
        banned: tokens that may not come.
        draw: returns a number from ``[0, 1)``; called at most once.
    """
    logits = _penalised(logits.float(), params, tokens, num_prompt_tokens)
    logits = _restricted(logits, params, banned)
    temperature = option(params, "temperature")
    if temperature == 0:
        return int(logits.argmax())
    ordered, order = logits.sort(descending=True, stable=True)
    weights = ((ordered - ordered[0]) / temperature).softmax(-1)
    kept = _kept(weights, params)
    sums = weights[:kept].cumsum(-1)
    index = int((sums <= draw() * sums[-1]).sum())
    return int(order[min(index, kept - 1)])


def _penalised(logits: Any, params: Any, tokens: Sequence[int], num_prompt_tokens: int) -> Any:
    import torch  # noqa: PLC0415  # optional

    repetition = option(params, "repetition_penalty")
    presence, frequency = option(params, "presence_penalty"), option(params, "frequency_penalty")
    if repetition == 1 and not presence and not frequency:
        return logits
    size, device = logits.shape[-1], logits.device
    outputs = torch.bincount(torch.tensor(tokens[num_prompt_tokens:], dtype=torch.long, device=device), minlength=size)
    seen = outputs > 0
    if num_prompt_tokens:
        seen[torch.tensor(tokens[:num_prompt_tokens], device=device)] = True
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - presence * (outputs > 0) - frequency * outputs


def _restricted(logits: Any, params: Any, banned: Sequence[int]) -> Any:
    """Apply bias and bans; where nothing is left, what was asked for contradicts itself, and is passed over."""
    import torch  # noqa: PLC0415  # optional

    bias, allowed = option(params, "logit_bias") or {}, option(params, "allowed_token_ids")
    if not (bias or allowed or banned):
        return logits
    size = logits.shape[-1]
    changed = logits.clone()
    for token, change in bias.items():
        if 0 <= token < size:
            changed[token] += change
    if allowed:
        keep = torch.full_like(changed, -torch.inf)
        keep[[token for token in allowed if 0 <= token < size]] = 0
        changed += keep
    changed[[token for token in banned if 0 <= token < size]] = -torch.inf
    return changed if bool(changed.isfinite().any()) else logits


def _kept(weights: Any, params: Any) -> int:
    """Return how many of the ordered weights ``top_k``, ``top_p`` and ``min_p`` leave; at least one."""
    top_k, top_p, min_p = option(params, "top_k"), option(params, "top_p"), option(params, "min_p")
    kept = min(top_k, len(weights)) if top_k > 0 else len(weights)
    if min_p > 0:
        kept = min(kept, int((weights >= min_p * weights[0]).sum()))
    if top_p < 1:
        sums = weights[:kept].cumsum(-1)
        kept = min(kept, int((sums < top_p * sums[-1]).sum()) + 1)
    return max(kept, 1)


def logprob_rows(logits: Any, tokens: Sequence[int], count: int) -> LogprobsLists:
    """Return a row per token: its log-probability, those of the ``count`` most probable ones (-1: all), its rank.

    Args:
        logits: ``[tokens, vocabulary]``.
        tokens: that came.
        count: of others.
    """
    import torch  # noqa: PLC0415  # optional

    logprobs = logits.float().log_softmax(-1)
    chosen = torch.tensor(tokens, device=logprobs.device)[:, None]
    own = logprobs.gather(-1, chosen)
    best, ids = logprobs.topk(logprobs.shape[-1] if count < 0 else count, dim=-1)
    ranks = (logprobs >= own).sum(-1)
    return LogprobsLists(torch.cat([chosen, ids], -1).tolist(), torch.cat([own, best], -1).tolist(), ranks.tolist())
