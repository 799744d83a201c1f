"""What must hold whatever is done to a client: each request ends exactly once, with its outputs complete and in order.

A request is *open* from the moment before it is sent.  It ends in one of these ways, and nothing of it may come later:

===========  ===========================================================================================
finished     its last output came, all before it had come, in order
aborted      its abort returned, or its stream was closed (what another thread had in hand may still show)
cut          the engine ended it with reason ABORT, which a pause or a shutdown had asked for
failed       it ended with reason ERROR, and a rank had been killed
refused      the call that was to send it raised, as it may while a rank is dead
lost         the client ended while it was open
===========  ===========================================================================================

Threads: any; everything is under one lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from chaos.engine import token_of
from engine_client import FinishReason

__all__ = ["Model", "Violation", "payload_of"]


class Violation(AssertionError):
    """Something happened that must not."""


def payload_of(number: int, size: int) -> Any:
    """Return an array that belongs to one request alone."""
    return np.full(size, number % 251, np.uint8)


@dataclass
class Sent:
    """A request, and what has come of it."""

    number: int
    name: str
    tokens: int
    size: int  # of its tensor; 0: it has none, and gets tokens
    got: int = 0
    ended: str = ""
    ended_at: int = 0
    is_stream: bool = False
    may_stop: bool = False
    may_be_cut: bool = False
    may_fail: bool = False


class Model:
    """Knows every request of one client."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clock = count(1)
        self._requests: dict[str, Sent] = {}  # the last one of each id
        self._all: list[Sent] = []
        self._is_dead = False
        self._is_disturbed = False
        self._is_pausing = False

    def __repr__(self) -> str:
        with self._lock:
            return f"<Model {dict(Counter(sent.ended or 'open' for sent in self._all))}>"

    def now(self) -> int:
        """Return a moment, later than all before; to be asked for before outputs are."""
        with self._lock:
            return next(self._clock)

    # -- what is done --------------------------------------------------------------------------------------------------

    def sends(self, number: int, name: str, tokens: int, size: int = 0, *, is_stream: bool = False) -> None:
        """Note that a request is about to be sent."""
        with self._lock:
            sent = Sent(number, name, tokens, size, is_stream=is_stream)
            sent.may_fail, sent.may_be_cut = self._is_disturbed, self._is_pausing
            self._requests[name] = sent
            self._all.append(sent)

    def refused(self, name: str, error: BaseException) -> None:
        """Note that the call that was to send it raised."""
        with self._lock:
            if not (self._is_dead or self._is_disturbed):
                raise Violation(f"{name} was refused, and no engine was dead: {error!r}")
            self._end(self._requests[name], "refused")

    def aborts(self, names: Iterable[str]) -> None:
        """Note that requests are about to be aborted: a stream may end by itself from now on."""
        with self._lock:
            for name in names:
                if name in self._requests:
                    self._requests[name].may_stop = True

    def aborted(self, names: Iterable[str]) -> None:
        """Note that an abort has returned; what has ended before is not changed.

        Of a stream nothing is known yet: its request was perhaps not sent when the abort came.
        """
        with self._lock:
            for name in names:
                sent = self._requests.get(name)
                if sent is not None and not sent.is_stream and not sent.ended:
                    self._end(sent, "aborted")

    def pausing(self, is_pausing: bool) -> None:
        """Note that a pause which aborts begins or ends: what is open at any time in between may be cut."""
        with self._lock:
            self._is_pausing = is_pausing
            for sent in self.open():
                sent.may_be_cut = True

    def disturbed(self) -> None:
        """Note that a rank is about to be killed which the client survives: until ``calm``, what is open may fail."""
        with self._lock:
            self._is_disturbed = True
            for sent in self.open():
                sent.may_fail = True

    def calm(self) -> None:
        """Note that all ranks live."""
        with self._lock:
            self._is_disturbed = False

    def dies(self) -> None:
        """Note that the client is about to end: from now on calls may raise, and open requests may be cut."""
        with self._lock:
            self._is_dead = True
            self.pausing(True)
            self.disturbed()  # where a rank dies alone, the others go on for a moment

    def allows_death(self) -> bool:
        """Tell whether a call may raise that an engine is dead."""
        with self._lock:
            return self._is_dead or self._is_disturbed

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def took(self, asked_at: int, output: Any) -> None:
        """Check an output that a call returned which began at ``asked_at``."""
        with self._lock:
            sent = self._requests.get(output.request_id)
            if sent is None:
                raise Violation(f"an output of a request that was never sent: {output!r:.300}")
            if sent.ended == "aborted" and asked_at < sent.ended_at:
                return  # it was in hand when the abort came
            if sent.ended:
                raise Violation(f"an output after its request was {sent.ended}: {sent}, {output!r:.300}")
            expected = [token_of(sent.number, sent.got + step) for step in range(len(output.new_token_ids))]
            if not sent.size and list(output.new_token_ids) != expected:
                raise Violation(f"outputs are not in order, or not its own: {sent}, {output!r:.300}")
            sent.got += len(expected)
            if output.finish_reason is not None:
                self._finish(sent, output)

    def _finish(self, sent: Sent, output: Any) -> None:
        reason = output.finish_reason
        if reason is FinishReason.LENGTH:
            if sent.got != sent.tokens:
                raise Violation(f"outputs are missing: {sent}, {output!r:.300}")
            if sent.size and not np.array_equal(output.pooling_output, payload_of(sent.number, sent.size)):
                raise Violation(f"a tensor came back changed: {sent}")
            self._end(sent, "finished")
        elif reason is FinishReason.ABORT and sent.may_be_cut:
            self._end(sent, "cut")
        elif reason is FinishReason.ERROR and sent.may_fail:
            self._end(sent, "failed")
        else:
            raise Violation(f"no reason to end like this: {sent}, {output!r:.300}")

    def failed(self, name: str, error: BaseException) -> None:
        """Note that a stream has raised."""
        with self._lock:
            sent = self._requests[name]
            if not (sent.may_fail or self._is_dead):
                raise Violation(f"a stream has failed, and no rank was dead: {sent}, {error!r}")
            if sent.ended:
                raise Violation(f"a stream has failed after its request was {sent.ended}: {error!r}")
            self._end(sent, "failed")

    def stopped(self, name: str, *, is_closed: bool) -> None:
        """Note that a stream has ended, or was closed."""
        with self._lock:
            sent = self._requests[name]
            if not sent.ended:
                if not (is_closed or sent.may_stop):
                    raise Violation(f"a stream ended before its request: {sent}")
                self._end(sent, "aborted")

    def died(self) -> None:
        """Note that whoever takes outputs was told that no more will come."""
        with self._lock:
            if not self._is_dead:
                raise Violation("the client is dead, and nothing was done to it")
            for sent in self.open():
                if not sent.is_stream:  # else whoever reads it is told
                    self._end(sent, "lost")

    def _end(self, sent: Sent, how: str) -> None:
        sent.ended = how
        sent.ended_at = next(self._clock)

    # -- looking -------------------------------------------------------------------------------------------------------

    def open(self) -> list[Sent]:
        """Return the requests that have not ended."""
        with self._lock:
            return [sent for sent in self._all if not sent.ended]

    def check_all_ended(self) -> None:
        """Raise if a request has not ended."""
        left = self.open()
        if left:
            raise Violation(f"{len(left)} requests never ended: {left[:5]}")

    def counts(self) -> Counter[str]:
        """Return how many requests ended in which way."""
        with self._lock:
            return Counter(sent.ended or "open" for sent in self._all)
