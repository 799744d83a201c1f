"""What ``engine-client generate`` shows: texts, JSON lines, a live text on a terminal, how fast it goes.

::

    tokens so far ─▶ decode ─▶ LiveText ─▶ stdout      only what no later token can change
    finished texts ─▶ InOrder ─▶ stdout                in the order of the prompts
    on_progress, finished requests ─▶ ProgressBar ─▶ stderr

Threads: the main thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Continuation", "InOrder", "LiveText", "as_json", "as_text", "cut_at", "logprob_rows", "pace_text", "write"]


def write(text: str) -> None:
    """Write to stdout at once.

    Raises:
        BrokenPipeError: nobody reads it any more.
    """
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclass
class Continuation:
    """One prompt and what became of it.

    Args:
        index: place of the prompt, from 0.
        logprobs: for each token: its id, its log-probability, its rank, and ids with log-probabilities of the best.
        error: why there is no text, if so.
    """

    index: int
    prompt: str
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[tuple[int, float, int, list[tuple[int, float]]]] = field(default_factory=list)
    error: str | None = None


def cut_at(text: str, stop_string: object) -> str:
    """Return the text before the string that ended it."""
    at = text.rfind(stop_string) if isinstance(stop_string, str) else -1
    return text if at < 0 else text[:at]


def as_text(continuation: Continuation, name: Callable[[int], str]) -> str:
    """Return prompt and continuation, and a line for each token whose log-probabilities were asked for.

    Args:
        name: returns the text of one token.
    """
    lines = [continuation.prompt + continuation.text, "\n"]
    for token, logprob, rank, best in continuation.logprobs:
        others = "".join(f"  {name(other)!r} {value:.3f}" for other, value in best)
        lines.append(f"  {name(token)!r:8} {logprob:8.3f}  rank {rank:<3} {others}".rstrip() + "\n")
    return "".join(lines)


def as_json(continuation: Continuation) -> str:
    """Return one line of JSON."""
    fields: dict[str, Any] = {
        "index": continuation.index,
        "prompt": continuation.prompt,
        "text": continuation.text,
        "finish_reason": continuation.finish_reason,
        "stop_reason": continuation.stop_reason,
        "num_prompt_tokens": continuation.num_prompt_tokens,
        "token_ids": continuation.token_ids,
    }
    if continuation.logprobs:
        fields["logprobs"] = [
            {"token_id": token, "logprob": logprob, "rank": rank, "best": best}
            for token, logprob, rank, best in continuation.logprobs
        ]
    if continuation.error is not None:
        fields["error"] = continuation.error
    return json.dumps(fields) + "\n"


def logprob_rows(logprobs: Any) -> list[tuple[int, float, int, list[tuple[int, float]]]]:
    """Return a tuple for each new token: id, log-probability, rank, and the best tokens with theirs."""
    columns = zip(logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks, strict=True)
    return [
        (int(ids[0]), float(values[0]), int(rank), list(zip(map(int, ids[1:]), map(float, values[1:]), strict=True)))
        for ids, values, rank in columns
    ]


class InOrder:
    """Takes finished continuations as they come and shows them in the order of the prompts.

    Args:
        show: called for each one, in order.
    """

    def __init__(self, show: Callable[[Continuation], None]) -> None:
        self._show = show
        self._early: dict[int, Continuation] = {}
        self._next = 0

    def add(self, continuation: Continuation) -> None:
        """Take one; show it and those that waited for it, if it is their turn."""
        self._early[continuation.index] = continuation
        while self._next in self._early:
            self._show(self._early.pop(self._next))
            self._next += 1


class LiveText:
    """Shows a text while it grows; what was shown is never taken back.

    Held back are characters whose bytes are not all there (they decode to U+FFFD) and whatever may turn out to be the
    beginning of a stop string.

    Args:
        stop: the stop strings.
        show: takes the new pieces.
    """

    def __init__(self, stop: Sequence[str], show: Callable[[str], None]) -> None:
        self._stop = stop
        self._show = show
        self._shown = 0

    def update(self, text: str) -> None:
        """Take the text so far."""
        sure = text.rstrip("\ufffd")
        held = max((self._beginning(sure, string) for string in self._stop), default=0)
        self._advance(sure[: len(sure) - held])

    def finish(self, text: str) -> None:
        """Take the whole text."""
        self._advance(text)

    def _advance(self, text: str) -> None:
        if len(text) > self._shown:
            self._show(text[self._shown :])
            self._shown = len(text)

    @staticmethod
    def _beginning(text: str, string: str) -> int:
        """Return the length of the longest end of ``text`` that ``string`` begins with."""
        lengths = range(min(len(text), len(string)), 0, -1)
        return next((length for length in lengths if text.endswith(string[:length])), 0)


def pace_text(tokens: int, most_left: int, seconds: float) -> str:
    """Return how fast it goes, and how long it takes at most if it goes on like that; empty while nothing is known.

    Args:
        tokens: generated in ``seconds``.
        most_left: tokens that may still come.
    """
    if not tokens or seconds <= 0:
        return ""
    rate = tokens / seconds
    minutes, rest = divmod(round(most_left / rate), 60)
    return f"{rate:.0f} tokens/s, at most {minutes}:{rest:02} left"
