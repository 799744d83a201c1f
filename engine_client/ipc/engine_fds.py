"""The descriptors that an engine process inherits, as numbers that travel on a command line.

Threads: immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["EngineFds", "FrontEndFds", "GroupFds"]


class GroupFds(NamedTuple):
    """What all ranks of a lock-step group share: memory for votes, and a pipe whose bytes wake all of them.

    Args:
        page: memory of the group's page.
        bell: read end of the pipe.
        striker: its write end.
    """

    page: int
    bell: int
    striker: int


class FrontEndFds(NamedTuple):
    """The engine's ends of what connects it with one front-end beside its launcher.

    Args:
        channel: socket of the pipe to the front-end.
        arena_in: memory that the front-end writes big buffers to.
        arena_out: memory that the engine writes big buffers for it to.
    """

    channel: int
    arena_in: int
    arena_out: int


@dataclass(frozen=True)
class EngineFds:
    """The engine's ends of what connects it with the world; all of them are 3 or above.  Iterates over all numbers.

    Args:
        channel: socket of the pipe to the launcher, which is also the one front-end unless there are others.
        lifeline: read end of the pipe that ends with the launcher.
        page: memory of the status page.
        faults: memory that ``faulthandler`` writes Python stacks to.
        arena_in: memory that the launcher writes big buffers to.
        arena_out: memory that the engine writes big buffers to.
        group: what ranks in lock-step share; None for an independent engine.
        front_ends: by client index, those beside the launcher.
    """

    channel: int
    lifeline: int
    page: int
    faults: int
    arena_in: int
    arena_out: int
    group: GroupFds | None = None
    front_ends: tuple[FrontEndFds, ...] = ()

    def __iter__(self) -> Iterator[int]:
        yield from (self.channel, self.lifeline, self.page, self.faults, self.arena_in, self.arena_out)
        yield from self.group or ()
        for front_end in self.front_ends:
            yield from front_end

    def replaced(self, numbers: Iterable[int]) -> EngineFds:
        """Return the same ends under other numbers, in the order of iteration."""
        take = iter(numbers)
        channel, lifeline, page, faults, arena_in, arena_out = (next(take) for _ in range(_OWN))
        group = None if self.group is None else GroupFds(*(next(take) for _ in self.group))
        front_ends = tuple(FrontEndFds(*(next(take) for _ in end)) for end in self.front_ends)
        return EngineFds(channel, lifeline, page, faults, arena_in, arena_out, group, front_ends)

    def to_args(self) -> list[str]:
        """Return the numbers as command-line arguments, behind two that tell what they are."""
        return [str(int(self.group is not None)), str(len(self.front_ends)), *map(str, self)]

    @classmethod
    def from_args(cls, args: Sequence[str]) -> tuple[EngineFds, list[str]]:
        """Return what ``to_args`` was called on, and the arguments that follow."""
        group = GroupFds(-1, -1, -1) if int(args[0]) else None
        shape = cls(-1, -1, -1, -1, -1, -1, group, (FrontEndFds(-1, -1, -1),) * int(args[1]))
        end = 2 + len(list(shape))
        return shape.replaced(map(int, args[2:end])), list(args[end:])


_OWN: Final = 6
"""How many descriptors every engine has."""
