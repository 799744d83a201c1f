"""The utility calls of an engine: run at once, answered at once or later.

::

    UTILITY ─▶ run ─▶ the engine's registered method ─┬─ value ──────────────────────────────▶ REPLY
                                                      └─ Future ─▶ … done, on any thread ─▶ answer_ready ─▶ REPLY

Invariants: I2 (every call is answered once; ``fail_all`` answers what is left).

Threads: the busy loop's thread, but for the done-callbacks of futures, which only store and wake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine_client.engine.front_end import FrontEnd
from engine_client.protocol.frames import Frame
from engine_client.protocol.wire import PING

__all__ = ["UtilityCalls"]


class UtilityCalls:
    """What clients may call, and the calls that wait for their answer.

    Args:
        utilities: the engine's registered methods; ``ping`` is added.
        decode: turns a frame into method and arguments.
        before_reply: called when a utility has run, before its answer goes out.
        wakeup: wakes the loop, from any thread, when there is something for ``answer_ready``.
    """

    def __init__(
        self,
        utilities: Mapping[str, Callable[..., Any]],
        *,
        decode: Callable[[Frame], tuple[str, tuple[Any, ...]]],
        before_reply: Callable[[], None],
        wakeup: Callable[[], None],
    ) -> None:
        self.utilities: Mapping[str, Callable[..., Any]] = {PING: lambda: None, **utilities}
        self._decode = decode
        self._before_reply = before_reply
        self._wakeup = wakeup
        self._ready: deque[tuple[FrontEnd, int, Future[Any]]] = deque()  # append and popleft are atomic
        self._deferred: dict[tuple[int, int], FrontEnd] = {}

    def __repr__(self) -> str:
        return f"<UtilityCalls deferred={len(self._deferred)}>"

    def run(self, front_end: FrontEnd, frame: Frame) -> None:
        """Run a utility; SystemExit and its like pass through and end the loop."""
        call_id = frame.ref
        try:
            method, args = self._decode(frame)
        except BaseException as error:  # noqa: BLE001  # the arguments' own code ran; SystemExit in it ends nothing
            front_end.send_failure(call_id, error)
            return
        try:
            result = self._find(method)(*args)
        except Exception as error:  # noqa: BLE001  # the boundary of one call: its caller gets the error
            front_end.send_failure(call_id, error)
            # A variable of its own frames, it would keep these, and what else came in the same read, shared memory too,
            # until the next collection: an engine that has nothing to do makes none.
            error.__traceback__ = None
            return
        self._before_reply()
        if isinstance(result, Future):
            self._deferred[front_end.index, call_id] = front_end
            result.add_done_callback(partial(self._on_done, front_end, call_id))
        else:
            front_end.send_result(call_id, result)

    def _find(self, method: str) -> Callable[..., Any]:
        utility = self.utilities.get(method)
        if utility is None:
            raise AttributeError(f"the engine has no utility {method!r}; it has: {', '.join(sorted(self.utilities))}")
        return utility

    def _on_done(self, front_end: FrontEnd, call_id: int, future: Future[Any]) -> None:
        """Note that a deferred utility is done; on whichever thread finished it."""
        self._ready.append((front_end, call_id, future))
        self._wakeup()

    def answer_ready(self) -> None:
        """Answer the deferred calls that are done."""
        while self._ready:
            front_end, call_id, future = self._ready.popleft()
            if self._deferred.pop((front_end.index, call_id), None) is not None and not front_end.gone:
                self._before_reply()
                self._answer(front_end, call_id, future)

    def _answer(self, front_end: FrontEnd, call_id: int, future: Future[Any]) -> None:
        if future.cancelled():
            front_end.send_failure(call_id, RuntimeError("the engine cancelled this call"))
            return
        error = future.exception()
        if error is None:
            front_end.send_result(call_id, future.result())
        else:
            front_end.send_failure(call_id, error)

    def fail_all(self, make_error: Callable[[FrontEnd], BaseException]) -> None:
        """Answer what is done, and fail what is still deferred."""
        self.answer_ready()
        while self._deferred:
            (_, call_id), front_end = self._deferred.popitem()
            front_end.send_failure(call_id, make_error(front_end))
