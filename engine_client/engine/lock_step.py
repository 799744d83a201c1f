"""How an engine keeps pace: on its own, or in step with the other ranks of its group.

::

    BusyLoop ── look ──▶ STEP, WAIT, SLEEP, COMPLETE ◀── protocol.waves ── words and bell ──▶ ipc.group_page
             ── fill ──▶ EngineCore.execute_dummy_batch, where a step had nothing to run
             ── stepped ─▶ vote

There is no coordinator: each rank decides for itself, from the same words.  ``protocol.waves`` explains the order of
things and why all decide the same.  A peer that is slow only delays; one that died is the launcher's to see, who ends
the group, so nothing here looks for it.

Invariants: I7 (nothing here waits: the loop does, where channels and signals interrupt it).

Threads: the busy loop's thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from selectors import EVENT_READ, BaseSelector
from typing import Final, Protocol, cast

from engine_client.interfaces import EngineCore, LockStepCore
from engine_client.ipc.group_page import GroupMember
from engine_client.protocol.waves import Action, Waves

__all__ = ["Alone", "LockStep", "Pace"]


# Looked up once, see ``frames.Kind``.
_STEP: Final = Action.STEP
_SLEEP: Final = Action.SLEEP


class Pace(Protocol):
    """What the busy loop asks between steps."""

    @property
    def is_needed(self) -> bool:
        """Tell whether other ranks count on this one's steps."""

    @property
    def completed_wave(self) -> int | None:
        """Return the number of the wave that was completed last, if this rank is the one to tell front-ends."""

    def look(self, *, has_work: bool) -> Action:
        """Return what to do now; after START, JOIN and STEP a step is made, then ``stepped`` called."""

    def fill(self) -> None:
        """Make a step of one that had nothing to run, if others count on it."""

    def stepped(self, *, unfinished: bool) -> None:
        """Note that a step is done."""

    def leave(self) -> None:
        """Say that others must not wait for this rank any more; called once, last."""

    def listening(self, selector: BaseSelector) -> AbstractContextManager[None]:
        """Return a block in which the selector also wakes up when others want this rank."""


class Alone:
    """The pace of an engine that nobody waits for."""

    is_needed = False
    completed_wave: int | None = None

    def __repr__(self) -> str:
        return "<Alone>"

    def look(self, *, has_work: bool) -> Action:
        """Return STEP or SLEEP."""
        return _STEP if has_work else _SLEEP

    def fill(self) -> None:
        """Do nothing."""

    def stepped(self, *, unfinished: bool) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def listening(self, selector: BaseSelector) -> AbstractContextManager[None]:
        """Return a block that changes nothing."""
        return nullcontext()


class LockStep:
    """The pace of one rank of a group.

    A rank that is not a member yet, or no more, sleeps.  One that comes to a group which has been at work takes over
    its numbers the next time that it looks; the group must be idle meanwhile.

    Args:
        engine: of this rank; it is told how to find out whether the group is idle.
        member: its hold on the group; owned by the caller.

    Raises:
        TypeError: the engine cannot make dummy steps.
    """

    def __init__(self, engine: EngineCore, member: GroupMember) -> None:
        if not callable(getattr(engine, "execute_dummy_batch", None)):
            raise TypeError(f"{type(engine).__name__} has no execute_dummy_batch, so it cannot run in lock-step")
        self._engine = cast("LockStepCore", engine)
        self._member = member
        self._waves: Waves | None = None
        self._engine.group_is_idle = lambda: not self.is_needed
        self._take_part()

    def __repr__(self) -> str:
        return f"<LockStep {self._waves!r}>"

    def _take_part(self) -> Waves | None:
        """Return this rank's part in the waves; None while it is not a member."""
        if not self._member.members() >> self._member.rank & 1:
            self._waves = None
        elif self._waves is None:
            self._waves = Waves(self._member, *_numbers(self._member))
        return self._waves

    @property
    def is_needed(self) -> bool:
        """Tell whether a wave runs, or was started and this rank is yet to join."""
        return self._waves is not None and not self._waves.is_group_idle()

    @property
    def completed_wave(self) -> int | None:
        """Return the number of the wave that was completed last, on the lowest rank alone."""
        return self._waves.wave - 1 if self._waves is not None and self._waves.is_lowest() else None

    def look(self, *, has_work: bool) -> Action:
        """Return what to do now."""
        waves = self._take_part()
        return _SLEEP if waves is None else waves.look(has_work=has_work)

    def fill(self) -> None:
        """Run a dummy batch: the other ranks' steps may need it."""
        self._engine.execute_dummy_batch()

    def stepped(self, *, unfinished: bool) -> None:
        """Note that a step is done; vote if it is time."""
        if self._waves is not None:
            self._waves.stepped(unfinished=unfinished)

    def leave(self) -> None:
        """Say that the group must not wait for this rank any more."""
        if self._waves is not None:
            self._waves.leave()

    @contextmanager
    def listening(self, selector: BaseSelector) -> Iterator[None]:
        """Have the selector hear the bell; only here, since it goes on ringing while the wave runs."""
        if self._waves is None:
            yield
            return
        bell = self._member.fileno()
        selector.register(bell, EVENT_READ)
        try:
            yield
        finally:
            selector.unregister(bell)


def _numbers(member: GroupMember) -> tuple[int, int]:
    """Return wave and round to begin with: 0 for the first members, the group's for whoever comes later."""
    if member.generation() <= 1:
        return 0, 0
    others = [rank for rank in range(member.members().bit_length()) if member.members() >> rank & 1]
    others.remove(member.rank)
    wave = max((member.wave(rank)[0] for rank in others), default=0)
    return wave, max((member.next_round(rank) for rank in others), default=0)
