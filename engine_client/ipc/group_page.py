"""What ranks in lock-step share: a page of votes and wave numbers, and a bell that wakes all who sleep.

::

    launcher: create_group ─▶ GroupFds ─▶ GroupPage.set_members           may read everything at any time
    rank:     GroupMember ── own words ──▶ [members | words of rank 0 | words of rank 1 | …] ──▶ all other ranks
              ring ──▶ [pipe] ──▶ readable for every rank until one of them empties it

Each word is written by one process and is whole when read, since an aligned 8-byte store is one instruction.  A vote
stays readable until the round after the next, by which time everybody has counted it.  The order in which a rank
stores, rings and reads is that of ``protocol.waves``, which is where it is explained and checked.

The pipe never blocks anybody.  A full pipe is as good as a written byte: it is readable either way.

Invariants: I5 (memory and pipe are nameless and go with their last holder), I7 (no wait), I11 (a half-made group is
closed).

Threads: the members belong to the launcher; a rank's words to that rank's loop; reading from any thread.
"""

from __future__ import annotations

import mmap
import os
import select
from contextlib import suppress
from typing import Final

from engine_client.ipc.arena_memory import create_memory, reserve
from engine_client.ipc.descriptors import above_stdio, close_all
from engine_client.ipc.engine_fds import GroupFds

__all__ = ["MOST_RANKS", "GroupMember", "GroupPage", "create_group"]

MOST_RANKS: Final = 64
"""How many ranks a group can have: their set is one word."""

# Words of eight bytes, by index; first the launcher's.
_MEMBERS: Final = 0
_GENERATION: Final = 1

# Then those of each rank, a cache line apart.
_LINE: Final = 8
_VOTES: Final = 0  # two words, for even and odd rounds: round + 1 << 16 | flags; 0 is: never voted
_STARTED: Final = 2  # the last wave that this rank has started, plus 1
_WAVE: Final = 3  # wave << 1 | whether it runs: one store, so that nobody sees halves
_LEFT: Final = 4

_SIZE: Final = 8 * _LINE * (1 + MOST_RANKS)
_CHUNK: Final = 65536
"""Linux's default pipe capacity: one read empties it."""


def create_group() -> GroupFds:
    """Return memory and pipe of a new group without members; every number is 3 or above, close-on-exec.

    Raises:
        OSError: memory or descriptors have run out; nothing is left behind.
    """
    made: list[int] = []
    try:
        made.append(create_memory("group"))
        GroupPage.prepare(made[0])
        made += os.pipe()
        for index in (1, 2):
            made[index] = above_stdio(made[index])
            os.set_blocking(made[index], False)
    except BaseException:
        close_all(made)
        raise
    return GroupFds(*made)


class GroupPage:
    """Anybody's view of a group's page; its launcher also sets the members.  After ``close`` it tells the last it saw.

    Args:
        fd: of the page's memory; owned by this object from here on.

    Raises:
        OSError, ValueError: the memory cannot be had; ``fd`` is then still the caller's.
    """

    def __init__(self, fd: int) -> None:
        self.prepare(fd)
        self._page = memoryview(mmap.mmap(fd, _SIZE))
        self._words = self._page.cast("Q")
        self._fd = fd

    @staticmethod
    def prepare(fd: int) -> None:
        """Give new memory the size of a page, before anybody uses it.

        Raises:
            OSError: there is not even that much.
        """
        for _ in reserve(fd, os.fstat(fd).st_size, _SIZE):
            pass

    def set_members(self, mask: int) -> None:
        """Say which ranks there are, bit by bit; the launcher's alone, before they start or while all are idle."""
        self._words[_MEMBERS] = mask
        self._words[_GENERATION] += 1

    def members(self) -> int:
        """Return the set of ranks: bit 0 is rank 0."""
        return self._words[_MEMBERS]

    def generation(self) -> int:
        """Return how often the members have been set."""
        return self._words[_GENERATION]

    def started(self, rank: int) -> int:
        """Return the last wave that a rank has started, plus 1; 0 if it never did."""
        return self._words[_of(rank) + _STARTED]

    def wave(self, rank: int) -> tuple[int, bool]:
        """Return the wave in which a rank is or which it would start next, and whether it runs."""
        word = self._words[_of(rank) + _WAVE]
        return word >> 1, bool(word & 1)

    def vote(self, rank: int, number: int) -> int | None:
        """Return the flags that a rank voted with in a round; None if it has not voted, or is beyond it."""
        word = self._words[_of(rank) + _VOTES + (number & 1)]
        return word & 0xFFFF if word >> 16 == number + 1 else None

    def next_round(self, rank: int) -> int:
        """Return the round in which a rank will vote next."""
        votes = _of(rank) + _VOTES
        return max(self._words[votes] >> 16, self._words[votes + 1] >> 16)

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank has ended in order, and will not vote any more."""
        return bool(self._words[_of(rank) + _LEFT])

    def is_running(self) -> bool:
        """Tell whether a wave runs, or was started and is about to."""
        mask = self.members()
        for rank in range(MOST_RANKS):
            if mask >> rank & 1:
                wave, runs = self.wave(rank)
                if runs or self.started(rank) > wave:
                    return True
        return False

    def close(self) -> None:
        """Keep a private copy, let go of the page and close its descriptor; idempotent."""
        self._page = memoryview(bytearray(self._page))
        self._words = self._page.cast("Q")
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        state = "closed" if self._fd < 0 else f"fd={self._fd}"
        return f"<GroupPage {state} members={self.members():#x} {'running' if self.is_running() else 'idle'}>"


class GroupMember(GroupPage):
    """One rank's hold on its group; satisfies ``protocol.waves.Shared``.  Calls after ``close`` change nothing.

    Args:
        fds: owned by this object from here on.
        rank: its own, below ``MOST_RANKS``.

    Raises:
        OSError, ValueError: the memory cannot be had; ``fds`` are then still the caller's.
    """

    def __init__(self, fds: GroupFds, rank: int) -> None:
        super().__init__(fds.page)
        self.rank = rank
        self._own = _of(rank)
        self._pipe = [fds.bell, fds.striker]

    def set_started(self, wave: int) -> None:
        """Say that this rank starts a wave."""
        self._words[self._own + _STARTED] = wave + 1

    def set_wave(self, wave: int, *, runs: bool) -> None:
        """Tell observers in which wave this rank is."""
        self._words[self._own + _WAVE] = wave << 1 | runs

    def set_vote(self, number: int, flags: int) -> None:
        """Cast this rank's vote of a round, with up to 16 flags; the round before stays readable."""
        self._words[self._own + _VOTES + (number & 1)] = number + 1 << 16 | flags

    def set_left(self, *, left: bool) -> None:
        """Say whether this rank has ended in order."""
        self._words[self._own + _LEFT] = left

    def ring(self) -> None:
        """Make the bell readable for every rank."""
        if self._pipe:
            with suppress(BlockingIOError):  # safe because a full pipe is readable already
                os.write(self._pipe[1], b"\0")

    def is_ringing(self) -> bool:
        """Tell whether the bell is readable."""
        return bool(self._pipe and select.select(self._pipe[:1], [], [], 0)[0])

    def hush(self) -> None:
        """Make the bell unreadable until somebody rings again."""
        if self._pipe:
            with suppress(BlockingIOError):  # safe because empty is what was asked for
                while len(os.read(self._pipe[0], _CHUNK)) == _CHUNK:
                    pass

    def fileno(self) -> int:
        """Return the bell's descriptor, to select on; -1 after ``close``."""
        return self._pipe[0] if self._pipe else -1

    def close(self) -> None:
        """As for the page, and let go of the bell."""
        super().close()
        close_all(self._pipe)

    def __repr__(self) -> str:
        return f"<GroupMember rank={self.rank} {super().__repr__()}>"


def _of(rank: int) -> int:
    """Return the index of a rank's first word."""
    return _LINE * (1 + rank)
