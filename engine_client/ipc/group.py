"""A lock-step group as its launcher has it: what the ranks inherit, and the page on which it names the members.

Threads: made and closed by whoever owns it; ``page`` may be read by any.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack

from engine_client.ipc.descriptors import above_stdio, close_all
from engine_client.ipc.engine_fds import GroupFds
from engine_client.ipc.group_page import GroupPage, create_group

__all__ = ["Group"]


class Group:
    """Owns the descriptors of a group; ends with ``close``.

    Args:
        ranks: the first members.

    Raises:
        OSError: memory or descriptors have run out.
        ValueError: a rank is too high.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.fds = create_group()
        self._open = list(self.fds)  # those that are not closed yet
        with ExitStack() as undo:
            undo.callback(close_all, self._open)
            self._open.append(above_stdio(os.dup(self.fds.page)))
            self.page = GroupPage(self._open[-1])
            self._open.pop()  # it is the page's now
            undo.callback(self.page.close)
            self.set_members(ranks)
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<Group members={self.page.members():b} running={self.page.is_running()}>"

    @classmethod
    def of_others(cls, page: int) -> Group:
        """Return a group that another process has launched, by its page, which is owned by this object from here on.

        Raises:
            OSError, ValueError: the memory cannot be had; ``page`` is then still the caller's.
        """
        group = cls.__new__(cls)
        group.fds = GroupFds(page, -1, -1)
        group.page = GroupPage(page)
        group._open = []  # noqa: SLF001  # its own
        return group

    def set_members(self, ranks: Iterable[int]) -> None:
        """Say which ranks there are; before they start, or while all are idle."""
        self.page.set_members(sum(1 << rank for rank in ranks))

    def close(self) -> None:
        """Release everything; idempotent.  The page goes on to tell the last that was seen."""
        self.page.close()
        close_all(self._open)
