"""One utility call to several engines: sent to each, and done when all have answered.

Invariants: I2 (whatever becomes of the call, no entry of it stays in the table).

Threads: a ``FanOut`` belongs to the caller; the replies in it are ended by the reader.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Final

from engine_client.clients.calls import PendingCalls, Reply
from engine_client.clients.link import EngineLink
from engine_client.deadline import Deadline
from engine_client.errors import EngineStalledError, RemoteCallError
from engine_client.protocol.exception_fields import text_of
from engine_client.protocol.frames import Frame
from engine_client.protocol.wire import decode_reply

__all__ = ["LARGE_REPLY", "FanOut", "value_of"]

LARGE_REPLY: Final = 1024 * 1024
"""Bytes from which on a reply is not decoded on an event loop's thread."""


class FanOut:
    """A call and its replies; ``discard`` gives up what is not answered.

    Args:
        calls: the table of the client.
        links: to the engines that are called.
        what: names the call in messages.
    """

    def __init__(self, calls: PendingCalls, links: list[EngineLink], what: str) -> None:
        self.links = links
        self.what = what
        self.ids = [calls.new_id() for _ in links]  # before there is anything to give up, so that all can be
        self.replies: list[Reply] = []
        self._calls = calls
        self.is_to_all = self.is_to_closed = False  # to all that take calls; to some, though they take no more requests
        self.owner: Hashable = None  # stands for the event loop that waits, if one does

    def __repr__(self) -> str:
        done = sum(reply.done() for reply in self.replies)
        return f"<FanOut {self.what} {done} of {len(self.links)} answered>"

    def register(self, index: int) -> int:
        """Enter the call to one engine into the table; return its id."""
        call_id, reply = self._calls.new(self.ids[index], self.links[index].rank, self.owner)
        self.replies.append(reply)
        return call_id

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Take engines out of a call that was registered and not sent."""
        kept = [index for index, link in enumerate(self.links) if link.rank not in ranks]
        for index in set(range(len(self.links))).difference(kept):
            self._calls.discard(self.ids[index])
        self.links = [self.links[index] for index in kept]
        self.replies = [self.replies[index] for index in kept]
        self.ids = [self.ids[index] for index in kept]

    def fail(self, index: int, error: BaseException) -> None:
        """End the call to one engine."""
        self._calls.settle(self.ids[index], error=error)

    def discard(self) -> None:
        """Give the call up: replies that still come are dropped."""
        for call_id in self.ids:
            self._calls.discard(call_id)

    def wait(self, deadline: Deadline) -> list[Any]:
        """Wait for all replies, decode them, and return the values in the order of the links.

        They are decoded by whoever waits and not by the reader: decoding may import modules, and the one who waits may
        be in the middle of importing them.

        Raises:
            TimeoutError: not all have answered before the deadline.
            EngineDeadError: an engine is dead.
            RemoteCallError: a reply cannot be decoded.
            Exception: what the utility raised, in the first engine in which it did.
        """
        for reply in self.replies:
            if not reply.wait(deadline.remaining()):
                raise self.timeout_error(deadline)
        return self.values()

    @property
    def late(self) -> list[EngineLink]:
        """Return the links to engines that have not answered, or were not even asked."""
        return [link for link, reply in zip_longest(self.links, self.replies) if reply is None or not reply.done()]

    def timeout_error(self, deadline: Deadline) -> TimeoutError:
        """Return the error of a call that was not answered in time."""
        late = [link.rank for link in self.late]
        by = "" if len(self.links) == 1 else f" by the ranks {late}"
        return TimeoutError(f"{self.what} was not answered within {deadline.timeout:g} s{by}")

    def stalled_error(self, deadline: Deadline) -> EngineStalledError:
        """Return the error of a question about health that was not answered in time."""
        doing = "; ".join(f"{link.title}: {link.status.snapshot().describe()}" for link in self.late)
        return EngineStalledError(f"the engine is not responding: no answer within {deadline.timeout:g} s; {doing}")

    @property
    def size(self) -> int:
        """Return the bytes of the replies that are there."""
        frames = [reply.result() for reply in self.replies if reply.done() and reply.exception() is None]
        return sum(frame.size for frame in frames)

    def values(self) -> list[Any]:
        """Decode the replies, which are all there; raise as ``wait``."""
        values: list[Any] = []
        errors: list[tuple[EngineLink, Exception]] = []
        for link, reply in zip(self.links, self.replies, strict=True):
            try:
                values.append(value_of(reply.result()))
            except Exception as error:  # noqa: BLE001  # it is raised below, when it is known who else failed
                errors.append((link, error))
        if errors:
            first, fault = errors[0]
            if len(self.links) > 1:
                failed = ", ".join(link.title for link, _ in errors)
                _annotate(fault, first.rank, f"Raised by {failed}, of {len(self.links)} engines.")
            try:
                raise fault
            finally:  # as in Reply.result: what the caller has sent hangs on the traceback
                for reply in self.replies:
                    reply.forget_error()
                errors.clear()
                del fault
        return values


def value_of(frame: Frame) -> Any:
    """Return the value of a reply, or raise the error that it brings."""
    try:
        failed, value = decode_reply(frame)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the value's own code ran; SystemExit, say, ends nothing here
        raise _stand_in("the reply cannot be decoded: ", error) from error
    if not failed:
        return value
    try:
        raise value if isinstance(value, Exception) else _stand_in("", value)
    finally:
        del value


def _stand_in(prefix: str, error: BaseException) -> RemoteCallError:
    kind = type(error).__name__
    stand_in = RemoteCallError(f"{prefix}{kind}: {text_of(error)}", kind, getattr(error, "remote_traceback", ""))
    stand_in.__cause__ = error
    return stand_in


def _annotate(error: Exception, rank: int, note: str) -> None:
    """Say in an exception where it comes from, as ``add_note`` does since Python 3.11."""
    with suppress(Exception):  # its class allows no attributes
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]  # see above
        if getattr(error, "rank", None) is None:
            error.rank = rank  # type: ignore[attr-defined]  # an attribute of its own, for programs
