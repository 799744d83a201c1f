"""Played ranks of a lock-step group: each in a thread, one of which runs at a time, up to its next shared access.

Who runs next is a choice of the test, so every interleaving of loads, stores and pipe bytes can happen, and the same
seed makes it happen again.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from engine_client.protocol.waves import Action, Waves

PATIENCE = 6_000
"""Turns without a step after which a group that does not come to rest never will."""


class Incident(NamedTuple):
    """What happens to a rank, so many turns after the incident before: add (steps), pause, resume, leave."""

    after: int
    rank: int
    kind: str
    steps: int = 0


class Killed(BaseException):
    """Ends a rank's thread."""


class Memory:
    """What the ranks share."""

    def __init__(self, count: int) -> None:
        self.mask = (1 << count) - 1
        self.started = [0] * count
        self.votes: list[list[tuple[int, int]]] = [[(-1, 0), (-1, 0)] for _ in range(count)]
        self.left = [False] * count
        self.waves: list[tuple[int, bool]] = [(0, False)] * count
        self.bytes = 0
        self.rings = 0


class Rank:
    """One rank: its requests, and its hold on the group; satisfies ``protocol.waves.Shared``."""

    def __init__(self, rank: int, memory: Memory, make: Callable[..., Waves]) -> None:
        self.rank = rank
        self.memory = memory
        self.make = make
        self.inbox: deque[Incident] = deque()
        self.work = 0  # steps that its requests still need
        self.paused = self.pause_pending = self.sleeping = self.gone = self.killed = False
        self.steps: Counter[int] = Counter()  # by wave
        self.completed: list[int] = []
        self.slept_at = -1  # how often the bell had been rung when it last fell asleep, if it has done nothing since
        self.error: BaseException | None = None
        self.mine, self.others = threading.Lock(), threading.Lock()
        self.mine.acquire()
        self.others.acquire()
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    # -- the test's side: one turn at a time ---------------------------------------------------------------------------

    def can_run(self) -> bool:
        return not self.gone and (not self.sleeping or bool(self.inbox) or self.memory.bytes > 0)

    def run(self) -> None:
        """Let the rank run up to its next access."""
        self.mine.release()
        self.others.acquire()

    def kill(self) -> None:
        self.killed = True
        if not self.gone:
            self.run()
        self.thread.join()

    # -- the rank's side -----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Give the turn away, until it comes back."""
        self.others.release()
        self.mine.acquire()
        if self.killed:
            raise Killed

    def _live(self) -> None:
        self.mine.acquire()
        try:
            if not self.killed:
                self.waves = self.make(self)
                while self._take_inbox():
                    self._turn()
                self.waves.leave()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  # the test's to see
            self.error = error
        finally:
            self.gone = True
            self.others.release()

    def _take_inbox(self) -> bool:
        self.turn()
        while self.inbox:
            incident = self.inbox.popleft()
            if incident.kind == "add":
                self.work += incident.steps
            elif incident.kind == "pause":
                self.paused = True
                self.pause_pending = not self.waves.is_group_idle()
            elif incident.kind == "resume":
                self.paused = self.pause_pending = False
            else:
                return False
        return True

    def _turn(self) -> None:
        """Do as ``BusyLoop`` does."""
        has_work = self.work > 0 and not self.paused
        action = self.waves.look(has_work=has_work)
        if action is Action.SLEEP:
            assert self.slept_at != self.memory.rings, "one ring wakes a rank twice"
            self.slept_at = self.memory.rings
            self.sleeping = True
            self.turn()
            self.sleeping = False
        if action is not Action.SLEEP or self.inbox:
            self.slept_at = -1
        if action is Action.COMPLETE:
            self.completed.append(self.waves.wave - 1)
            if self.pause_pending and self.waves.is_group_idle():
                self.pause_pending = False
        elif action not in (Action.SLEEP, Action.WAIT):
            self.steps[self.waves.wave] += 1
            self.work -= has_work
            self.waves.stepped(unfinished=self.work > 0 and not self.paused)

    # -- Shared: each access is a turn ---------------------------------------------------------------------------------

    def members(self) -> int:
        return self.memory.mask

    def started(self, rank: int) -> int:
        self.turn()
        return self.memory.started[rank]

    def vote(self, rank: int, number: int) -> int | None:
        self.turn()
        found, flags = self.memory.votes[rank][number & 1]
        return flags if found == number else None

    def has_left(self, rank: int) -> bool:
        self.turn()
        return self.memory.left[rank]

    def set_started(self, wave: int) -> None:
        self.turn()
        self.memory.started[self.rank] = wave + 1

    def set_wave(self, wave: int, *, runs: bool) -> None:
        self.turn()
        self.memory.waves[self.rank] = wave, runs

    def set_vote(self, number: int, flags: int) -> None:
        self.turn()
        self.memory.votes[self.rank][number & 1] = number, flags

    def set_left(self, *, left: bool) -> None:
        self.turn()
        self.memory.left[self.rank] = left

    def ring(self) -> None:
        self.turn()
        self.memory.bytes += 1
        self.memory.rings += 1

    def is_ringing(self) -> bool:
        self.turn()
        return self.memory.bytes > 0

    def hush(self) -> None:
        self.turn()
        self.memory.bytes = 0


class Model:
    """A group of played ranks; use it in a ``with`` statement.

    Args:
        count: of ranks.
        seed: of the interleaving.
        make: makes the ``Waves`` of a rank.
    """

    def __init__(self, count: int, seed: int, make: Callable[..., Waves] = Waves) -> None:
        self.memory = Memory(count)
        self.ranks = [Rank(rank, self.memory, make) for rank in range(count)]
        self.random = Random(seed)
        self.weights = [self.random.choice((1, 1, 5, 30)) for _ in range(count)]  # some are slow

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()

    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.gone]

    def one_turn(self) -> bool:
        """Let some rank run; return whether there was one that could."""
        ready = [rank for rank in self.ranks if rank.can_run()]
        if ready:
            [rank] = self.random.choices(ready, [self.weights[rank.rank] for rank in ready])
            rank.run()
            if rank.error is not None:
                raise rank.error
        return bool(ready)

    def play(self, incidents: list[Incident]) -> None:
        """Have things happen, and run until everybody sleeps."""
        for incident in incidents:
            for _ in range(incident.after):
                self.one_turn()
            self.ranks[incident.rank % len(self.ranks)].inbox.append(incident)
        done = -1
        while done != (done := sum(rank.gone + sum(rank.steps.values()) for rank in self.ranks)):
            for _ in range(PATIENCE):
                if not self.one_turn():
                    return
        raise AssertionError(f"the group does not come to rest: {[rank.waves for rank in self.alive()]}")

    def check_rest(self) -> None:
        """Everybody sleeps: nothing may be left undone, and all must have done the same."""
        alive = self.alive()
        for rank in alive:
            assert rank.paused or not rank.work, f"rank {rank.rank} sleeps on work: a wake-up was lost"
            assert not rank.waves.is_in_wave, f"rank {rank.rank} is left running"
            assert not rank.pause_pending, f"rank {rank.rank} never learnt that its pause is complete"
        assert len({rank.waves.wave for rank in alive}) <= 1, "the ranks' wave numbers differ"
        assert len({tuple(sorted(rank.steps.items())) for rank in alive}) <= 1, "the ranks' numbers of steps differ"
        for rank in alive:
            assert rank.completed == list(range(rank.waves.wave)), "a wave was completed twice or never"
            assert self.memory.waves[rank.rank] == (rank.waves.wave, False), "observers see something else"
