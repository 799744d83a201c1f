"""Engines that are busy with one thing for too long: when to look at them, and what they say of it at their end.

Invariants: I7 (an engine that is to say where it hangs has a second and a half).

Threads: the reader's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from engine_client.clients.link import EngineLink
from engine_client.deadline import Deadline
from engine_client.errors import EngineStalledError
from engine_client.ipc.handle import ChildHandle
from engine_client.ipc.processes import is_stopped
from engine_client.protocol.lifecycle import State

__all__ = ["StallWatch", "judge", "record_stacks"]

_LEAST: Final = 0.02
"""Seconds between two looks at least."""
_LATE: Final = 1.0
"""Seconds of delay after which this process has stood still itself, and the engine may have, too."""
_STACKS_TIMEOUT: Final = 1.5
"""Seconds for the stacks to be written; usually it takes a few thousandths, and half a second where force is needed."""
_POLL: Final = 0.002
"""Seconds between looks whether they are."""


class StallWatch:
    """Watches the engines of one client, and ends those that hang.

    Args:
        limit: seconds that an engine may be busy with one thing; None: as long as it likes.
        look_at: has ``look`` called for a rank, at a deadline.
        die: declares a rank dead.
    """

    def __init__(
        self,
        limit: float | None,
        look_at: Callable[[int, Deadline], None],
        die: Callable[[int, BaseException], None],
    ) -> None:
        self._limit = math.inf if limit is None else limit
        self._look_at = look_at
        self._die = die

    def __repr__(self) -> str:
        return f"<StallWatch limit={self._limit:g}>"

    def watch(self, link: EngineLink) -> None:
        """Begin to look at an engine that is ready; from any thread."""
        if self._limit != math.inf and not link.is_foreign:
            self._look_at(link.rank, Deadline(self._limit))

    def look(self, link: EngineLink, late: float) -> None:
        """End an engine that has stood still for too long, or look again later; ``late`` as for ``judge``."""
        if link.life.state is State.READY:
            again, error = judge(link, self._limit, late)
            if error is None:
                self._look_at(link.rank, again)
            else:
                self.end(link, error)

    def end(self, link: EngineLink, error: BaseException) -> None:
        """Have an engine that hangs say where, and declare it dead."""
        if not link.over.done():
            record_stacks(link)
            self._die(link.rank, error)


def judge(link: EngineLink, limit: float, late: float) -> tuple[Deadline, EngineStalledError | None]:
    """Return when to look at an engine again, and an error if it has stood still for longer than ``limit`` seconds.

    An idle engine is looked at once in that time, which is often enough to end it in time whenever it begins.

    Args:
        link: to the engine.
        limit: seconds.
        late: seconds that this look comes later than planned.  An engine that was frozen together with this process,
            as a container can be, has the whole time once more.
    """
    page = link.status.snapshot()
    left = page.busy_since + limit - time.monotonic() if page.busy_since else limit
    if left <= 0 and late < _LATE:
        text = f"{link.title} made no progress for longer than {limit:g} s (ClientOptions.stall_limit)"
        return Deadline(limit), EngineStalledError(f"{text}: {page.describe()}")
    return Deadline(max(_LEAST, left if 0 < left < limit else limit)), None


def record_stacks(link: EngineLink) -> None:
    """Have an engine write the stacks of its threads where ``death_of`` finds them, if it can."""
    handle, memory, deadline = link.handle, link.faults, Deadline(_STACKS_TIMEOUT)
    if not isinstance(handle, ChildHandle) or is_stopped(link.pid) or not memory.turn.acquire(timeout=_STACKS_TIMEOUT):
        return
    try:
        with suppress(RuntimeError):  # it cannot be asked: the error goes without
            memory.ask(link.pid, handle.send_signal)
            while (text := memory.answer(link.pid)) is None and handle.is_alive() and not deadline.expired():
                time.sleep(_POLL)
            memory.kept = text or ""
    finally:
        memory.turn.release()
