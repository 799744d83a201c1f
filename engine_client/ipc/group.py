"""A lock-step group as its launcher has it: what the ranks inherit, and the page on which it names the members.

Threads: made and closed by whoever owns it; ``page`` may be read by any.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from engine_client.ipc.descriptors import above_stdio, close_all
from engine_client.ipc.group_page import GroupPage, create_group

__all__ = ["Group"]


class Group:
    """Owns the descriptors of a group; ends with ``close``.

    Args:
        ranks: the first members.

    Raises:
        OSError: memory or descriptors have run out.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.fds = create_group()
        self._open = list(self.fds)  # those that are not closed yet
        try:
            self.page = GroupPage(above_stdio(os.dup(self.fds.page)))
            self.set_members(ranks)
        except BaseException:
            close_all(self._open)
            raise

    def __repr__(self) -> str:
        return f"<Group members={self.page.members():b} running={self.page.is_running()}>"

    def set_members(self, ranks: Iterable[int]) -> None:
        """Say which ranks there are; before they start, or while all are idle."""
        self.page.set_members(sum(1 << rank for rank in ranks))

    def close(self) -> None:
        """Release everything; idempotent.  The page goes on to tell the last that was seen."""
        self.page.close()
        close_all(self._open)
