"""The waves of ranks in lock-step: all of them make the same number of steps, or all of them sleep.

::

              WORK: START · STARTED: JOIN              DUE: VOTE
        IDLE ───────────────────────────▶ RUNNING ─────────────────▶ VOTED ⟲ MISSING: WAIT
          ▲  ⟲ QUIET: SLEEP, STALE: WAIT     ▲ ⟲ STEPPED               │ │
          │                                  └──────── GO: STEP ───────┘ │
          └─────────────────────────── AGREED: COMPLETE ─────────────────┘      LEAVE, from anywhere ─▶ LEFT

A rank with work starts a wave; the others join it, with dummy steps where they have none.  Every ``VOTE_EVERY`` steps
each rank votes whether it has unfinished work, and waits until all have.  All count the same votes, so all decide the
same: somebody has work, and everybody goes on; or nobody has, the wave is complete, its number rises, and all sleep.

Rules:

1. ``TRANSITIONS`` is all there is: what is not in it is forbidden, raises, and changes nothing.
2. Whoever has work while IDLE starts a wave, however its request is stamped, so an old number loses nothing.
3. A pause needs no vote of its own.  A paused rank has no unfinished work, but stays in step until the group agrees:
   then the wave ends for all at the same step, and only then the pause is answered.
4. A starter first *stores* the wave that it starts, then *rings*.  A rank that wants to sleep looks whether a newer
   wave was started; the bell keeps ringing for whoever looked too early.
5. Only the lowest rank hushes the bell, when it wants to sleep itself: it *hushes*, then looks *again* whether a newer
   wave was started, and if so rings.  A ring that it swallowed was stored before, so it is seen by that look.
6. A bell that rings for a wave that is over keeps nobody busy: whoever sees no newer wave looks again some time later
   (WAIT), until the lowest rank has hushed it.
7. A rank that leaves says so last; whoever finds no vote of a rank that had left before it looked counts it as having
   no work.

Memory keeps two rounds of votes.  That is enough: nobody can vote in a round before all have voted in the one before,
and so have counted the one before that.

Invariants: I7 (nothing here waits: WAIT and SLEEP are for the caller to do).

Threads: a ``Waves`` belongs to one thread.  Pure: I/O is done by what is given as ``Shared``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Protocol

from engine_client.errors import LocalProtocolError

__all__ = ["TRANSITIONS", "UNFINISHED", "VOTE_EVERY", "Action", "Event", "Move", "Shared", "State", "Waves"]

VOTE_EVERY: Final = 32
"""Steps between two votes."""

UNFINISHED: Final = 1
"""The flag of a vote that says: there is work left here."""


class Shared(Protocol):
    """One rank's hold on what the group shares.  Each call is one load, store or system call, and never waits."""

    @property
    def rank(self) -> int:
        """Return this rank's number."""

    def members(self) -> int:
        """Return the set of ranks: bit 0 is rank 0."""

    def started(self, rank: int) -> int:
        """Return the last wave that a rank has started, plus 1."""

    def vote(self, rank: int, number: int) -> int | None:
        """Return the flags that a rank voted with in a round; None if it has not."""

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank has left."""

    def set_started(self, wave: int) -> None:
        """Say that this rank starts a wave."""

    def set_wave(self, wave: int, *, runs: bool) -> None:
        """Tell observers in which wave this rank is."""

    def set_vote(self, number: int, flags: int) -> None:
        """Cast this rank's vote of a round."""

    def set_left(self, *, left: bool) -> None:
        """Say whether this rank has left."""

    def ring(self) -> None:
        """Make the bell ring for everybody until it is hushed."""

    def is_ringing(self) -> bool:
        """Tell whether the bell rings."""

    def hush(self) -> None:
        """End the ringing."""


class State(enum.Enum):
    """Where a rank is."""

    IDLE = "between two waves"
    RUNNING = "in a wave, on its way to the next vote"
    VOTED = "in a wave, waiting for the others' votes"
    LEFT = "gone"


class Event(enum.Enum):
    """What a rank finds when it looks, or has done."""

    WORK = "it has unfinished work"
    STARTED = "another rank has started this wave"
    QUIET = "nobody has work, and the bell is silent"
    STALE = "nobody has work, and the bell still rings for a wave that is over"
    STEPPED = "a step, or a dummy step, is done"
    DUE = "so is the last one before a vote"
    MISSING = "somebody has not voted yet"
    GO = "all have voted, and somebody has work"
    AGREED = "all have voted, and nobody has work"
    LEAVE = "it ends"


class Action(enum.Enum):
    """What a rank does then."""

    START = "say which wave it starts, ring, make a step"
    JOIN = "make a step"
    STEP = "make a step, a dummy step without work"
    VOTE = "cast its vote"
    WAIT = "look again soon"
    SLEEP = "block until the bell rings"
    COMPLETE = "raise the number of the wave, answer pauses"
    LEAVE = "say that it has left"


class Move(NamedTuple):
    """Where an event leads, and what to do."""

    state: State
    action: Action


_LEAVING: Final = {Event.LEAVE: Move(State.LEFT, Action.LEAVE)}

TRANSITIONS: Final[Mapping[State, Mapping[Event, Move]]] = {
    State.IDLE: {
        Event.WORK: Move(State.RUNNING, Action.START),
        Event.STARTED: Move(State.RUNNING, Action.JOIN),
        Event.QUIET: Move(State.IDLE, Action.SLEEP),
        Event.STALE: Move(State.IDLE, Action.WAIT),
        **_LEAVING,
    },
    State.RUNNING: {
        Event.STEPPED: Move(State.RUNNING, Action.STEP),
        Event.DUE: Move(State.VOTED, Action.VOTE),
        **_LEAVING,
    },
    State.VOTED: {
        Event.MISSING: Move(State.VOTED, Action.WAIT),
        Event.GO: Move(State.RUNNING, Action.STEP),
        Event.AGREED: Move(State.IDLE, Action.COMPLETE),
        **_LEAVING,
    },
    State.LEFT: {},
}


class Waves:
    """One rank's place in the table.

    Args:
        shared: its hold on what the group shares.
        wave: in which the group is.
        number: of the round in which the group votes next.
    """

    def __init__(self, shared: Shared, wave: int = 0, number: int = 0) -> None:
        self.state = State.IDLE
        self.wave = wave
        self._number = number
        self._steps = 0  # since the last vote
        self._shared = shared
        shared.set_left(left=False)
        shared.set_wave(wave, runs=False)

    def __repr__(self) -> str:
        return f"<Waves rank={self._shared.rank} {self.state.name} wave={self.wave} round={self._number}>"

    @property
    def is_in_wave(self) -> bool:
        """Tell whether the others count on this rank's steps."""
        return self.state in (State.RUNNING, State.VOTED)

    def is_group_idle(self) -> bool:
        """Tell whether no wave runs that this rank would have to join or is in."""
        return not self.is_in_wave and not self._is_started()

    def is_lowest(self) -> bool:
        """Tell whether this rank speaks for the group: the first of those that have not left."""
        return self._shared.rank == next(self._present(), self._shared.rank)

    # -- what the caller does, in turn ---------------------------------------------------------------------------------

    def look(self, *, has_work: bool) -> Action:
        """Find out what to do now: START, JOIN or STEP (then ``stepped``), WAIT, SLEEP or COMPLETE.

        Args:
            has_work: there is unfinished work here that is not paused.
        """
        if self.state is State.RUNNING:
            return Action.STEP
        action = self._happened(self._count() if self.state is State.VOTED else self._find(has_work=has_work))
        if action is Action.START:
            self._shared.set_started(self.wave)  # before the ring: see rule 4
            self._shared.ring()
        elif action is Action.COMPLETE:
            self.wave += 1
            self._shared.set_wave(self.wave, runs=False)
        if action in (Action.START, Action.JOIN):
            self._shared.set_wave(self.wave, runs=True)
        return action

    def stepped(self, *, unfinished: bool) -> None:
        """Note that the step is done; vote if it is time.

        Args:
            unfinished: there is work left here that is not paused.
        """
        is_due = self._steps + 1 == VOTE_EVERY
        if self._happened(Event.DUE if is_due else Event.STEPPED) is Action.VOTE:
            self._steps = 0
            self._shared.set_vote(self._number, UNFINISHED if unfinished else 0)
        else:
            self._steps += 1

    def leave(self) -> None:
        """Say that the group must not wait for this rank any more."""
        self._happened(Event.LEAVE)
        self._shared.set_wave(self.wave, runs=False)
        self._shared.set_left(left=True)

    def _happened(self, event: Event) -> Action:
        """Move.

        Raises:
            LocalProtocolError: the table does not allow it; nothing has changed.
        """
        move = TRANSITIONS[self.state].get(event)
        if move is None:
            raise LocalProtocolError(
                f"{event.name} cannot happen to rank {self._shared.rank}, which is {self.state.name}"
            )
        self.state = move.state
        return move.action

    # -- what it looks at ----------------------------------------------------------------------------------------------

    def _find(self, *, has_work: bool) -> Event:
        """Return what there is to do for a rank that is IDLE."""
        if has_work:
            return Event.WORK
        if self._is_started():
            return Event.STARTED
        if not self.is_lowest():
            return Event.STALE if self._shared.is_ringing() else Event.QUIET
        self._shared.hush()
        if self._is_started():  # after the hush: see rule 5
            self._shared.ring()
            return Event.STARTED
        return Event.QUIET

    def _is_started(self) -> bool:
        return any(self._shared.started(rank) > self.wave for rank in self._members())

    def _count(self) -> Event:
        """Return what the votes of this round say."""
        number, unfinished = self._number, 0
        for rank in self._members():
            has_left = self._shared.has_left(rank)  # before its vote: see rule 7
            flags = self._shared.vote(rank, number)
            if flags is None and not has_left:
                return Event.MISSING
            unfinished |= flags or 0
        self._number += 1
        return Event.GO if unfinished & UNFINISHED else Event.AGREED

    def _members(self) -> Iterator[int]:
        mask = self._shared.members()
        return (rank for rank in range(mask.bit_length()) if mask >> rank & 1)

    def _present(self) -> Iterator[int]:
        return (rank for rank in self._members() if not self._shared.has_left(rank))
