"""One front-end as its engine sees it: a channel, and the keys of the requests that it has in flight.

The front-end names its requests by integers; the engine core knows them by id.  This table translates, and is the one
place where an output or a reply that cannot be pickled becomes an error of the request or call that it belongs to.

Invariants: I2 (a call is answered once: with its result, or with why the result cannot be sent).

Threads: the busy loop's thread only.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from engine_client.deadline import Deadline
from engine_client.errors import SerializationError
from engine_client.ipc.channel import Channel
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine_client.protocol.batch import encode_outputs
from engine_client.protocol.exception_fields import cut, text_of
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import decode_abort, encode_dead, encode_reply, encode_text

__all__ = ["FrontEnd", "drain_all"]

_LONGEST_LOGGED: Final = 2000
"""Characters of an error's text in the log; its request gets all of it."""


class FrontEnd:
    """Owns its channel; ``leave`` closes it.

    Args:
        index: client index.
        channel: to the front-end.
        rank: of this engine, stamped on every batch.
        main_importable: the names in ``__main__`` mean the same here and there, so that results can go by name.
        is_guest: it uses an engine that another has launched, and does not end it.
        prefix: in front of the request ids of this front-end, where there are others who may use the same.
        release: gives back what belongs to the connection; called once, when the front-end is gone.
        held: tells how many bytes of shared memory hold what was sent to it, taken or not.
    """

    def __init__(  # noqa: PLR0913  # most of them by name
        self,
        index: int,
        channel: Channel,
        rank: int = 0,
        *,
        main_importable: bool = True,
        is_guest: bool = False,
        prefix: str = "",
        release: Callable[[], None] = lambda: None,
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        self.index = index
        self.is_guest = is_guest
        self.prefix = prefix
        self.pidfd = -1  # of its process, if it has told
        self.wants_outputs = not is_guest  # one that was never used takes none, nor does a launcher with guests
        self._release = release
        self.held = held
        self.channel = channel
        self.rank = rank
        self.main_importable = main_importable
        self.gone = False
        self.took_at = 0.0  # when it was last seen to take something of what waits for it; or that began to wait
        self.log = logging.getLogger("engine_client.engine")
        self._has_backlog = False  # when that was looked at last
        self._has_died = False
        self._keys: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._aborted: set[str] = set()  # ids whose outputs of the current step are dropped in silence
        self._received: list[Frame] = []

    def __repr__(self) -> str:
        state = "gone" if self.gone else "connected"
        return f"<FrontEnd {self.index} {state} rank={self.rank} in_flight={len(self._keys)}>"

    # -- the table -----------------------------------------------------------------------------------------------------

    def receive(self) -> list[Frame]:
        """Read what has arrived; return those frames, which ``take_received`` returns again."""
        frames = self.channel.receive()
        self._received += frames
        self.wants_outputs |= self.is_guest and bool(frames)
        return frames

    def take_received(self) -> list[Frame]:
        """Return, once, all frames received since the last call; from then on aborted ids are strange again."""
        frames, self._received = self._received, []
        self._aborted.clear()
        return frames

    def register(self, key: int, request_id: str) -> None:
        """Note that ``key`` means ``request_id``.

        Raises:
            ValueError: a request of this id is in flight.
        """
        if request_id in self._keys:
            raise ValueError(f"request {request_id!r:.100} is already running")
        self._keys[request_id] = key
        self._ids[key] = request_id

    def forget(self, request_id: str) -> None:
        """Note that a request is over; unknown ids are ignored."""
        key = self._keys.pop(request_id, None)
        if key is not None:
            del self._ids[key]

    def abort(self, frame: Frame) -> list[str]:
        """Forget the requests that an ABORT names and return their ids; unknown keys are ignored."""
        try:
            keys = decode_abort(frame)
        except Exception as error:  # noqa: BLE001  # what arrives cannot end the loop that serves others
            self.log.warning("an ABORT cannot be understood and is ignored: %r", error)
            return []
        request_ids = [request_id for key in keys if (request_id := self._ids.get(key)) is not None]
        for request_id in request_ids:
            self.forget(request_id)
        self._aborted.update(request_ids)
        return request_ids

    def watch(self, pid: int) -> int:
        """Watch the front-end's process; return a descriptor that tells its end, -1 where there is no such thing.

        The end of the stream tells it too, but not while another process has a copy of its other end.
        """
        if self.pidfd < 0:
            try:
                self.pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._has_died = True  # before this was read
            except (AttributeError, OSError) as error:  # an old system, or no descriptor is left
                self.log.info("client %d cannot be watched, its stream must tell its end: %r", self.index, error)
        return self.pidfd

    def has_died(self) -> bool:
        """Tell whether the front-end's process is known to have ended."""
        return self._has_died or (self.pidfd >= 0 and _is_readable(self.pidfd))

    def leave(self) -> list[str]:
        """Close the channel; return the ids of the requests that nobody waits for any more."""
        self.gone = True
        request_ids = list(self._keys)
        self._keys.clear()
        self._ids.clear()
        self.channel.hang_up()  # what the engine has forked may have copies
        self.channel.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        self._release()
        return request_ids

    # -- sending -------------------------------------------------------------------------------------------------------

    @property
    def needs_a_look(self) -> bool:
        """Tell whether there is something to do: it has sent something, has not taken all it was sent, may be lost."""
        channel, may_have_died = self.channel, self.pidfd >= 0 or self._has_died
        return may_have_died or bool(self._received or self._aborted or channel.waiting or channel.ended)

    def flush(self) -> None:
        """Write what waits and fits."""
        waiting = self.channel.backlog
        with suppress(BrokenPipeError):  # the end of the stream, which the loop reads next, says the same
            self.channel.flush()
        left = self.channel.backlog
        if left < waiting or not self._has_backlog:
            self.took_at = time.monotonic()
        self._has_backlog = left > 0

    def send_outputs(self, outputs: EngineCoreOutputs) -> list[str]:
        """Send a step's outputs; return the ids of requests that had to be ended because theirs cannot be sent."""
        if not self.wants_outputs:
            return []  # it has no requests: these are statistics, or the end of a wave
        outputs.engine_index = self.rank
        if self.prefix and outputs.finished_requests:
            outputs.finished_requests = {name[len(self.prefix) :] for name in outputs.finished_requests}
        try:
            self._send_batch(outputs)
        except Exception as error:  # noqa: BLE001  # an output's value: find whose it is, and fail only that request
            return self._send_singly(outputs, error)
        return []

    def _send_batch(self, outputs: EngineCoreOutputs) -> None:
        frame, finished = encode_outputs(outputs, self._keys, self._aborted)
        if frame is not None:
            self._send(frame)
        for request_id in finished:
            self.forget(request_id)

    def _send_singly(self, outputs: EngineCoreOutputs, error: Exception) -> list[str]:
        """Send each output as a batch of its own; those that cannot be encoded end with reason ERROR."""
        failed: list[str] = []
        for output in outputs.outputs:
            try:
                self._send_batch(EngineCoreOutputs(self.rank, [output]))
            except Exception as fault:  # noqa: BLE001  # as above
                failed.append(output.request_id)
                self._send_last(output.request_id, FinishReason.ERROR, _unsendable("an output", fault))
        if not failed:
            self.log.warning("the statistics of a step cannot be sent: %s", cut(_describe(error), _LONGEST_LOGGED))
        return failed

    def _send_last(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        output = EngineCoreOutput(request_id, [], finish_reason=reason, stop_reason=stop_reason)
        frame, _ = encode_outputs(EngineCoreOutputs(self.rank, [output]), self._keys)
        if frame is not None:
            self._send(frame)
        self.forget(request_id)

    def _send_unregistered(self, key: int, reason: FinishReason, stop_reason: str | None) -> None:
        output = EngineCoreOutput("", [], finish_reason=reason, stop_reason=stop_reason)
        frame, _ = encode_outputs(EngineCoreOutputs(self.rank, [output]), {"": key})
        assert frame is not None  # one row, always
        self._send(frame)

    def send_rejected(self, key: int) -> None:
        """End a request that arrived during shutdown, with reason ABORT."""
        self._send_unregistered(key, FinishReason.ABORT, None)

    def send_error(self, key: int, error: BaseException) -> None:
        """End a request that never reached the scheduler, with reason ERROR and the error's text."""
        text = _describe(error).replace(f"'{self.prefix}", "'")  # ids as the front-end knows them
        self.log.warning("a request was refused: %s", cut(text, _LONGEST_LOGGED))
        self._send_unregistered(key, FinishReason.ERROR, text)

    def send_result(self, call_id: int, result: Any) -> None:
        """Answer a call; a result that cannot be pickled, or is too large to send, becomes that call's error."""
        try:
            self._send(encode_reply(call_id, result, main_importable=self.main_importable))
        except Exception as error:  # noqa: BLE001  # the result's own code ran; its caller gets what it raised
            fault = SerializationError(_unsendable("the result", error))
            fault.__cause__ = error
            self.send_failure(call_id, fault)

    def send_failure(self, call_id: int, error: BaseException) -> None:
        """Answer a call with the exception that ended it."""
        self._send(encode_reply(call_id, error=error))

    def send_dead(self, error: BaseException, phase: str) -> None:
        """Say ENGINE_CORE_DEAD with the cause; to be followed by ``drain``."""
        self._send(encode_dead(error, phase))

    def say_goodbye(self, reason: str) -> None:
        """Say that the engine ends in order; to be followed by ``drain``."""
        self._send(encode_text(Kind.GOODBYE, reason))

    def _send(self, frame: Frame) -> None:
        if self.gone:
            return
        if self._has_backlog:
            self.flush()  # else what this sends of it would not be seen to be taken
        try:  # a block of contextlib's would cost as much as the lines around it
            self.channel.send(frame)
        except BrokenPipeError:
            return  # the end of the stream, which the loop reads next, says the same

    def drain(self, deadline: Deadline) -> None:
        """Wait, within the deadline, until nothing is left to write."""
        drain_all([self], deadline)

    def is_drained(self) -> bool:
        """Write what fits; return whether nothing is left, or nobody who would read it."""
        try:
            return self.gone or self.channel.flush()
        except BrokenPipeError:
            return True


def drain_all(front_ends: Iterable[FrontEnd], deadline: Deadline) -> None:
    """Wait, within the deadline, until nothing is left to write; one that does not read is not waited for by others."""
    left = [front_end for front_end in front_ends if not front_end.is_drained()]
    while left and not deadline.expired():
        poller = select.poll()  # select knows no descriptor above 1023
        for front_end in left:
            poller.register(front_end.channel.fileno(), select.POLLOUT)
        poller.poll(1000 * deadline.capped(0.1))
        left = [front_end for front_end in left if not front_end.is_drained()]


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _unsendable(what: str, error: BaseException) -> str:
    return f"{what} cannot be sent to the client: {_describe(error)}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"
