"""The life of one engine as its client sees it: states, what moves it, and what each move asks the client to do.

::

    LAUNCHED ─▶ HELLO ─▶ INIT ─▶ READY ─▶ DRAINING ─▶ ENDED
        │         │      ↻ STATUS   │         ▲          ▲
        ├─────────┴────────┴────────┼─────────┘          │
        └─────────┴────────┴────────┴────── EXIT ────────┘

Rules:

1. ``TRANSITIONS`` is all there is: what is not in it is forbidden, raises, and changes nothing.  A frame that this side
   would send is this side's fault (``LocalProtocolError``), one that came is the engine's (``RemoteProtocolError``).
2. Nothing leads back.  ENDED is final (I4).
3. Every event is possible in every state: processes end and users close when they like.
4. DRAINING means that nothing new is sent and what the engine still has to say is read and delivered.  Why it drains
   (closed by the user, last words, the end of its stream) is what the client has kept on the way there.
5. EXIT happens when the process has ended *and* its stream has been read to the end (I3), so no frame comes after it.
6. A frame that crossed the client's own decision to stop is ignored; it was legal when it was sent.

Invariants: I3, I4.

Threads: a ``Lifecycle`` belongs to one thread at a time.  Pure: performs no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from engine_client.errors import LocalProtocolError, RemoteProtocolError
from engine_client.protocol.frames import Kind

__all__ = ["FROM_CLIENT", "FROM_ENGINE", "TRANSITIONS", "Action", "Event", "Lifecycle", "Move", "State"]


class State(enum.IntEnum):
    """Where an engine is in its life; a later state never goes back to an earlier one."""

    LAUNCHED = 0
    """The process was started and has not said a word."""
    HELLO = 1
    """It has said HELLO and waits for its configuration."""
    INIT = 2
    """It has its configuration and is starting."""
    READY = 3
    """It serves."""
    DRAINING = 4
    """It is going; nothing new is sent."""
    ENDED = 5
    """It is gone, and everything it said was delivered."""


class Event(enum.IntEnum):
    """What happens beside frames; the numbers are no ``Kind``'s."""

    EXIT = 100
    """The process has ended and its stream has been read to the end."""
    EOF = 101
    """The stream has ended, or cannot be written to, and the process lives."""
    VIOLATION = 102
    """The engine broke the protocol; its stream cannot be read on."""
    DEADLINE = 103
    """The time for the step that is under way is over."""
    CLOSE = 104
    """The user closes the client."""


class Action(enum.Enum):
    """What the client does after a move."""

    IGNORE = "nothing"
    CONFIGURE = "answer with INIT"
    REPORT = "tell the user of progress"
    SERVE = "take over the engine's capacities and begin to serve"
    SEND = "write the frame"
    DELIVER = "give it to the caller who waits for it"
    KEEP = "keep it as the reason of the end, and give the process a moment to exit"
    ASK = "send SHUTDOWN and give the engine its grace"
    AWAIT_EXIT = "give the process a moment to exit"
    STOP = "terminate the process, then kill it"
    END = "fail everything that waits, with the reason that was kept"


class Move(NamedTuple):
    """Where an event leads, and what to do."""

    state: State
    action: Action


FROM_CLIENT: Final = frozenset({Kind.INIT, Kind.ATTACH, Kind.ADD, Kind.ABORT, Kind.UTILITY, Kind.SHUTDOWN})
FROM_ENGINE: Final = frozenset(Kind) - FROM_CLIENT

_STARTING: Final[Mapping[int, Move]] = {
    Kind.FAILED: Move(State.DRAINING, Action.KEEP),
    Kind.GOODBYE: Move(State.DRAINING, Action.KEEP),
    Event.EXIT: Move(State.ENDED, Action.END),
    Event.EOF: Move(State.DRAINING, Action.AWAIT_EXIT),
    Event.VIOLATION: Move(State.DRAINING, Action.STOP),
    Event.DEADLINE: Move(State.DRAINING, Action.STOP),
    Event.CLOSE: Move(State.DRAINING, Action.STOP),  # it reads nothing before it is READY, so asking is no use
}

TRANSITIONS: Final[Mapping[State, Mapping[int, Move]]] = {
    State.LAUNCHED: {
        **_STARTING,
        Kind.HELLO: Move(State.HELLO, Action.CONFIGURE),
    },
    State.HELLO: {
        **_STARTING,
        Kind.INIT: Move(State.INIT, Action.SEND),
    },
    State.INIT: {
        **_STARTING,
        Kind.STATUS: Move(State.INIT, Action.REPORT),
        Kind.LOG: Move(State.INIT, Action.REPORT),
        Kind.READY: Move(State.READY, Action.SERVE),
    },
    State.READY: {
        Kind.ATTACH: Move(State.READY, Action.SEND),
        Kind.ADD: Move(State.READY, Action.SEND),
        Kind.ABORT: Move(State.READY, Action.SEND),
        Kind.UTILITY: Move(State.READY, Action.SEND),
        Kind.SHUTDOWN: Move(State.DRAINING, Action.SEND),
        Kind.OUTPUTS: Move(State.READY, Action.DELIVER),
        Kind.REPLY: Move(State.READY, Action.DELIVER),
        Kind.LOG: Move(State.READY, Action.DELIVER),
        Kind.DEAD: Move(State.DRAINING, Action.KEEP),
        Kind.GOODBYE: Move(State.DRAINING, Action.KEEP),
        Event.EXIT: Move(State.ENDED, Action.END),
        Event.EOF: Move(State.DRAINING, Action.AWAIT_EXIT),
        Event.VIOLATION: Move(State.DRAINING, Action.STOP),
        Event.DEADLINE: Move(State.READY, Action.IGNORE),  # that of the start, which READY overtook
        Event.CLOSE: Move(State.DRAINING, Action.ASK),
    },
    State.DRAINING: {
        Kind.SHUTDOWN: Move(State.DRAINING, Action.SEND),
        Kind.OUTPUTS: Move(State.DRAINING, Action.DELIVER),
        Kind.REPLY: Move(State.DRAINING, Action.DELIVER),
        Kind.LOG: Move(State.DRAINING, Action.DELIVER),
        Kind.FAILED: Move(State.DRAINING, Action.KEEP),
        Kind.DEAD: Move(State.DRAINING, Action.KEEP),
        Kind.GOODBYE: Move(State.DRAINING, Action.KEEP),
        Kind.HELLO: Move(State.DRAINING, Action.IGNORE),
        Kind.STATUS: Move(State.DRAINING, Action.IGNORE),
        Kind.READY: Move(State.DRAINING, Action.IGNORE),
        Event.EXIT: Move(State.ENDED, Action.END),
        Event.EOF: Move(State.DRAINING, Action.AWAIT_EXIT),
        Event.VIOLATION: Move(State.DRAINING, Action.STOP),
        Event.DEADLINE: Move(State.DRAINING, Action.STOP),
        Event.CLOSE: Move(State.DRAINING, Action.IGNORE),
    },
    State.ENDED: {event: Move(State.ENDED, Action.IGNORE) for event in Event},
}


class Lifecycle:
    """One engine's place in the table.

    Args:
        name: of the engine, for messages, such as ``"engine core 0"``.
        state: where it is; an engine that somebody else has started is READY.
    """

    __slots__ = ("_moves", "name", "state", "was_ready")

    def __init__(self, name: str, state: State = State.LAUNCHED) -> None:
        self.name = name
        self.state = state
        self.was_ready = state is State.READY  # whether its end is a death, or a start that failed
        self._moves = TRANSITIONS[state]

    def __repr__(self) -> str:
        return f"<Lifecycle {self.name} {self.state.name}>"

    def may_send(self, kind: int) -> bool:
        """Tell whether ``sending(kind)`` would be allowed."""
        return kind in FROM_CLIENT and kind in self._moves

    def sending(self, kind: int) -> Action:
        """Take note that this side is about to send a frame.

        Raises:
            LocalProtocolError: it must not, now; nothing has changed, and nothing may be written.
        """
        if not self.may_send(kind):
            raise LocalProtocolError(f"{_name_of(kind)} must not be sent to {self.name}, which is {self.state.name}")
        return self._move(self._moves[kind])

    def received(self, kind: int) -> Action:
        """Take note of a frame that came.

        Raises:
            RemoteProtocolError: the engine must not have sent it; nothing has changed.
        """
        move = self._moves.get(kind)
        if move is None or kind not in FROM_ENGINE:
            raise RemoteProtocolError(f"{self.name} sent {_name_of(kind)} although it is {self.state.name}")
        return self._move(move)

    def happened(self, event: Event) -> Action:
        """Take note of an event; every event is possible at any time."""
        return self._move(self._moves[event])

    def _move(self, move: Move) -> Action:
        if move.state is not self.state:
            self.state = move.state
            self.was_ready |= move.state is State.READY
            self._moves = TRANSITIONS[move.state]
        return move.action


def _name_of(kind: int) -> str:
    return Kind(kind).name if kind in set(Kind) else f"a frame of kind {kind}"
