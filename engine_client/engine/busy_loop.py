"""The engine process's loop: read what front-ends sent, step the engine, send what came of it.

::

    channels ─▶ receive ─▶ dispatch ─▶ EngineCore.add / abort / utility
        ▲                                   │
        │        ┌── Pace.look ── nothing to do: block in the selector
        │        ▼ a step
        │     step_fn ─▶ post_step ─▶ receive (aborts of this moment count) ─▶ outputs ─▶ channels

An error that belongs to one request ends that request with reason ERROR; one that belongs to a utility call answers
that call; only an exception of a step (and SystemExit and its like) ends the loop, and ``run`` raises it.

Invariants: I1 (the one reader of the engine's channels), I2 (every utility call is answered, deferred ones when the
loop ends at the latest), I7 (blocks in the selector only, which signals and answers interrupt; also while the other
ranks of a group have not voted).

Threads: everything runs on the thread that calls ``run``; only ``request_shutdown`` and the done-callbacks of deferred
utilities may come from elsewhere (a signal handler, an executor's thread), and ``fail``: they store and wake.
"""

from __future__ import annotations

import enum
import os
import selectors
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

from engine_client.deadline import NEVER, Deadline
from engine_client.engine.front_end import FrontEnd, drain_all
from engine_client.engine.gate import Gate
from engine_client.engine.lock_step import Alone, Pace
from engine_client.engine.utility_calls import UtilityCalls
from engine_client.errors import EngineDeadError
from engine_client.interfaces import EngineCore, PausableCore
from engine_client.ipc.status_page import StatusWriter
from engine_client.ipc.user_main import decoding
from engine_client.ipc.wakeup import Wakeup
from engine_client.messages import EngineCoreOutputs
from engine_client.protocol.frames import Flag, Frame, Kind
from engine_client.protocol.waves import Action
from engine_client.protocol.wire import decode_add, decode_utility

__all__ = ["TRANSITIONS", "BusyLoop", "LoopState"]

T = TypeVar("T")

_IDLE_YIELD: Final = 0.001
"""Seconds to wait when a step had work and ran nothing, so that a waiting executor does not spin."""
_PEER_POLL: Final = 0.002
"""Seconds after which a rank in lock-step looks again whether the others have voted."""

_FLUSH_TIMEOUT: Final = 2.0
"""Seconds for the last words to leave at the end."""


class LoopState(enum.Enum):
    """Where the loop stands; it only moves downwards."""

    RUNNING = "running"
    REQUESTED = "shutdown requested"
    DRAINING = "draining"
    ENDED = "ended"


# Looked up once, see ``frames.Kind``.
_NEEDS_MAIN: Final = int(Flag.NEEDS_MAIN)
_ADD, _ABORT, _UTILITY = int(Kind.ADD), int(Kind.ABORT), int(Kind.UTILITY)
_RUNNING, _SLEEP, _WAIT, _COMPLETE = LoopState.RUNNING, Action.SLEEP, Action.WAIT, Action.COMPLETE

TRANSITIONS: Final = {
    LoopState.RUNNING: (LoopState.REQUESTED, LoopState.ENDED),
    LoopState.REQUESTED: (LoopState.DRAINING, LoopState.ENDED),
    LoopState.DRAINING: (LoopState.ENDED,),
    LoopState.ENDED: (),
}
"""What each state may become.  Asking again for the end of a loop that is ending changes nothing."""


class BusyLoop:
    """Drives one engine for a list of front-ends.

    Args:
        engine: what is driven.
        front_ends: by client index; owned by the caller until ``run``, by the loop afterwards.
        status: the engine's status page.
        shutdown_timeout: seconds that requests in flight may take to finish at shutdown; 0 aborts them.
        backlog_limit: bytes that may wait for a front-end.  Beyond, no step is made until it has read some; where
            others wait too, one that does not read at all is cut off.
        ensure_main: runs the client's main module in this process, for payloads that name its objects.
        look_around: called when the engine's code may have started processes, before anybody can know of them.
        pace: that of a rank in lock-step.
        spin_us: microseconds for which an idle engine polls before it sleeps; None: as long as that pays.
    """

    def __init__(  # noqa: PLR0913  # the engine's surroundings, most of them by name
        self,
        engine: EngineCore,
        front_ends: list[FrontEnd],
        status: StatusWriter,
        *,
        shutdown_timeout: float = 0,
        backlog_limit: int = 64 * 1024 * 1024,
        ensure_main: Callable[[], None] = lambda: None,
        look_around: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
        spin_us: float | None = 0.0,
    ) -> None:
        self.state = LoopState.RUNNING
        self.reason = ""
        self._engine = engine
        self._status = status
        self._shutdown_timeout = shutdown_timeout
        self._ensure_main = ensure_main
        self._look_around = look_around
        self._pace: Pace = pace or Alone()
        self._pausable = engine if isinstance(engine, PausableCore) else None  # looked up once: it is slow
        self._wakeup = Wakeup()
        self._calls = UtilityCalls(
            engine.utilities(),
            decode=partial(self._decode, decode_utility),
            before_reply=self._before_reply,
            wakeup=self._wakeup.wakeup,
        )
        self._drain = NEVER
        self._has_run = True  # code of the engine's, since ``look_around``
        self._failure: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.fileno(), selectors.EVENT_READ)
        self._gate = Gate(front_ends, self._selector, backlog_limit, spin_us)

    def __repr__(self) -> str:
        return f"<BusyLoop {self.state.value} {self._gate!r}>"

    def request_shutdown(self, reason: str) -> None:
        """Ask the loop to end, from any thread or signal handler: abort or drain, then leave."""
        if self.state is _RUNNING:
            self.reason = reason
            self._move(LoopState.REQUESTED)
        self._wakeup.wakeup()

    def _move(self, state: LoopState) -> None:
        assert state in TRANSITIONS[self.state]
        self.state = state

    def fail(self, error: BaseException) -> None:
        """Have ``run`` raise this; from any thread."""
        self._failure = error
        self._wakeup.wakeup()

    def run(self) -> str:
        """Run until shutdown is requested and carried out.

        Returns:
            Why it ended.

        Raises:
            BaseException: whatever a step raised; the engine is not usable afterwards.
        """
        try:
            while (self.state is _RUNNING and self._failure is None) or self._handle_shutdown():
                self._turn()
                self._read()
            self._finish()
        finally:
            self._move(LoopState.ENDED)
            self._selector.close()
            self._wakeup.close()
        return self.reason

    def _turn(self) -> None:
        """Do what it is time for: a step, the end of a wave, or wait; and receive what has arrived."""
        can_step = self._engine.has_work() and not self._gate.is_blocked()
        action = self._pace.look(has_work=can_step)
        if action is _SLEEP:
            self._sleep()
        elif action is _WAIT:
            self._wait(_PEER_POLL)
        elif action is _COMPLETE:
            self._end_wave()
        else:
            self._step(can_step=can_step)
            return
        self._gate.receive()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _sleep(self) -> None:
        """Block until a front-end, a signal, an answer or another rank has something to say."""
        self._status.idle(*self._engine.counts())
        if self._has_run:
            self._has_run = False
            self._look_around()
        with self._pace.listening(self._selector):
            self._wait(None, is_idle=not self._engine.has_work())

    def _wait(self, timeout: float | None, *, is_idle: bool = False) -> None:
        """Block until there is news, at most ``timeout`` seconds and as long as a shutdown may take."""
        limits = [limit for limit in (timeout, self._drain.remaining()) if limit is not None]
        self._status.waits()
        if self._wakeup.fileno() in self._gate.wait(limits, is_idle=is_idle):
            self._wakeup.clear()
        self._status.busy()

    def _read(self) -> None:
        """Deal with what was received of every front-end, and send the answers that became ready."""
        for front_end in self._gate:
            if not front_end.needs_a_look:
                continue
            for frame in front_end.take_received():
                self._dispatch(front_end, frame)
            if front_end.channel.waiting:
                front_end.flush()
            if self._gate.is_lost(front_end):
                self._drop(front_end)
        if outputs := self._engine.take_outputs():
            self._send_outputs(outputs)
        self._calls.answer_ready()

    def _read_aborts(self) -> None:
        """Apply aborts that came during a step, before its outputs go out.

        Everything stays in order for ``_read``: a request that reuses an aborted id must not be registered before the
        outputs of the aborted one are matched with the keys.
        """
        for front_end in self._gate.with_news():
            for frame in front_end.receive():
                if frame.kind == _ABORT:
                    self._engine.abort_requests(front_end.abort(frame))

    def _drop(self, front_end: FrontEnd) -> None:
        """Let go of a front-end that left or does not read; the engine ends with the last but guests."""
        request_ids, fault = self._gate.drop(front_end)
        self._engine.abort_requests(request_ids)
        if self._gate.has_nobody():
            if fault is not None:
                self.fail(fault)
            self.request_shutdown("its client has gone")

    def _dispatch(self, front_end: FrontEnd, frame: Frame) -> None:
        self._status.busy()
        self._has_run = True
        if frame.kind == _ADD:
            self._add(front_end, frame)
        elif frame.kind == _ABORT:
            self._engine.abort_requests(front_end.abort(frame))
        elif frame.kind == _UTILITY:
            if self.state is _RUNNING:
                self._calls.run(front_end, frame)
            else:
                front_end.send_failure(frame.ref, _shutting_down(front_end))
        elif frame.kind == Kind.ATTACH:
            self._gate.attach(front_end, frame)
        elif frame.kind == Kind.SHUTDOWN and not front_end.is_guest:
            self.request_shutdown("its client asked")
        else:
            front_end.log.warning("a %s message is not for an engine; ignored", Kind(frame.kind).name)

    def _decode(self, decode: Callable[[Frame], T], frame: Frame) -> T:
        """Decode a payload, with the client's main module at hand if it names objects of that."""
        if frame.flags & _NEEDS_MAIN:
            self._ensure_main()
        with decoding:
            return decode(frame)

    def _before_reply(self) -> None:
        """Do what a utility's answer must not overtake: its outputs go out, and what it started is known."""
        self._look_around()
        self._has_run = False
        self._tell_pause()
        self._send_outputs(self._engine.take_outputs())

    def _tell_pause(self) -> None:
        """Say on the status page whether the engine sleeps or is paused; only a utility changes that."""
        if self._pausable is not None:
            is_sleeping, is_paused = self._pausable.pause_state()
            self._status.set_flags(is_sleeping=is_sleeping, is_paused=is_paused)

    def _add(self, front_end: FrontEnd, frame: Frame) -> None:
        key = frame.ref
        if self.state is not _RUNNING:
            front_end.send_rejected(key)
            return
        try:
            message = self._decode(decode_add, frame)
            message.client_index = front_end.index
            message.request_id = front_end.prefix + message.request_id
            front_end.register(key, message.request_id)
        except BaseException as error:  # noqa: BLE001  # the boundary of one request, whose own code ran: SystemExit, too
            front_end.send_error(key, error)
            return
        try:
            request, wave = self._engine.preprocess_add_request(message)
            self._engine.add_request(request, wave)
        except Exception as error:  # noqa: BLE001  # as above
            front_end.forget(message.request_id)
            front_end.send_error(key, error)

    # -- stepping ------------------------------------------------------------------------------------------------------

    def _step(self, *, can_step: bool) -> None:
        """Make a step; where a group needs one that this rank has nothing for, a dummy step."""
        self._status.step_begin()
        self._has_run = True
        outputs, executed = self._engine.step_fn() if can_step else (None, False)
        if not executed:
            self._pace.fill()
        self._status.step_end(*self._engine.counts())
        self._engine.post_step(executed)
        self._read_aborts()
        if outputs:
            self._send_outputs(outputs)
        has_work = self._engine.has_work()
        self._pace.stepped(unfinished=has_work)
        if not executed and not outputs and has_work:
            time.sleep(_IDLE_YIELD)

    def _end_wave(self) -> None:
        """Have pauses answered that waited for the group, and tell the front-ends, if this rank is the one to do so."""
        self._engine.post_step(False)
        if (wave := self._pace.completed_wave) is not None:
            self._send_outputs({f.index: EngineCoreOutputs(wave_complete=wave) for f in self._gate})

    def _send_outputs(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        for index, batch in outputs.items():
            if failed := self._gate.front_ends[index].send_outputs(batch):
                self._engine.abort_requests(failed)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _handle_shutdown(self) -> bool:
        """Move towards the end if it was asked for; return whether to go on."""
        if self._failure is not None:
            raise self._failure
        if self.state is _RUNNING:
            return True
        if self.state is LoopState.REQUESTED:
            self._move(LoopState.DRAINING)
            self._status.draining()
            self._drain = Deadline(self._shutdown_timeout)
        if self._drain.expired():
            self._engine.abort_all()
            return self._engine.has_work()
        return self._engine.has_work() or self._pace.is_needed

    def _finish(self) -> None:
        """Abort what could not run on, fail what is deferred, and let the last words leave."""
        self._pace.leave()
        self._engine.abort_all()
        self._send_outputs(self._engine.take_outputs())
        self._calls.fail_all(_shutting_down)
        deadline = Deadline(_FLUSH_TIMEOUT)
        for front_end in self._gate:
            front_end.say_goodbye(self.reason)
        drain_all(self._gate, deadline)


def _shutting_down(front_end: FrontEnd) -> EngineDeadError:
    """Return what a call gets that this engine will not answer any more, though nothing is wrong with it."""
    return EngineDeadError("Server shutting down", rank=front_end.rank, pid=os.getpid())
