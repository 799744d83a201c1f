"""A lock-step group of which the launcher names the members, and gives everything back."""

from __future__ import annotations

import os

import pytest

from engine_client.ipc import group as module
from engine_client.ipc.engine_fds import GroupFds
from engine_client.ipc.group import Group
from engine_client.ipc.group_page import MOST_RANKS, GroupMember


def descriptors() -> list[str]:
    """Return what this process has open."""
    return sorted(os.listdir("/proc/self/fd"))


def test_ranks_inherit_the_group_and_see_its_members() -> None:
    """What a rank is given tells it who the members are, and its launcher whether a wave runs."""
    group = Group([0, 2])
    member = GroupMember(GroupFds(*map(os.dup, group.fds)), 2)
    try:
        assert member.members() == 0b101
        assert not group.page.is_running()
        member.set_wave(1, runs=True)
        assert group.page.is_running()
        assert repr(group) == "<Group members=101 running=True>"
        group.set_members([0, 1, 2])
        assert member.members() == 0b111
    finally:
        member.close()
        group.close()


def test_closing_gives_everything_back_and_keeps_the_last_sight() -> None:
    """After ``close``, twice, no descriptor is left, and the page tells what was seen last."""
    before = descriptors()
    group = Group([1])
    group.close()
    group.close()
    assert descriptors() == before
    assert group.page.members() == 0b10
    assert "members=10" in repr(group)


@pytest.mark.parametrize("failing", ["dup", "GroupPage", "set_members"])
def test_a_group_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Where descriptors or memory run out half-way, or a rank is too high, what there was is given back."""

    def fail(fd: int) -> int:
        raise OSError("no more")

    before = descriptors()
    if failing != "set_members":
        monkeypatch.setattr(module.os if failing == "dup" else module, failing, fail)
    with pytest.raises((OSError, ValueError)) as caught:
        Group([MOST_RANKS])
    assert (failing == "set_members") is isinstance(caught.value, ValueError)
    monkeypatch.undo()
    assert descriptors() == before
