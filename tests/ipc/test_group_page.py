"""Ranks of a group tell each other by words in memory and wake each other by one pipe, and never wait for that."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from engine_client.ipc import group_page
from engine_client.ipc.engine_fds import GroupFds
from engine_client.ipc.group_page import MOST_RANKS, GroupMember, GroupPage, create_group


class Group:
    """A launcher's page, and members, each with descriptors of its own."""

    def __init__(self, *ranks: int):
        fds = create_group()
        self.members = {rank: GroupMember(GroupFds(*map(os.dup, fds)), rank) for rank in ranks}
        self.page = GroupPage(fds.page)
        os.close(fds.bell)
        os.close(fds.striker)
        self.page.set_members(sum(1 << rank for rank in ranks))

    def close(self):
        for member in self.members.values():
            member.close()
        self.page.close()


@pytest.fixture
def group():
    group = Group(0, 1, MOST_RANKS - 1)
    yield group
    group.close()


def test_a_new_group_is_idle(group):
    """Before anybody wrote anything no rank has started, voted or left, and all are in wave 0."""
    for rank in group.members:
        assert group.page.wave(rank) == (0, False)
        assert group.page.started(rank) == group.page.next_round(rank) == 0
        assert group.page.vote(rank, 0) is None
        assert not group.page.has_left(rank)
    assert not group.page.is_running()


def test_members_are_the_launchers(group):
    """Every rank sees the set of members that the launcher made, and that it was made anew."""
    member = group.members[1]
    assert (member.members(), member.generation()) == (1 << 63 | 3, 1)
    group.page.set_members(0b11)
    assert (member.members(), member.generation()) == (0b11, 2)


def test_words_of_ranks_do_not_touch(group):
    """What one rank writes changes nothing of its neighbours, at both ends of the page."""
    last = group.members[MOST_RANKS - 1]
    last.set_started(6)
    last.set_wave(7, runs=True)
    last.set_vote(3, 0xFFFF)
    last.set_left(left=True)
    assert group.page.started(last.rank) == 7
    assert group.page.wave(last.rank) == (7, True)
    assert group.page.vote(last.rank, 3) == 0xFFFF
    assert group.page.has_left(last.rank)
    for rank in (0, 1, 62):
        assert group.page.wave(rank) == (0, False)
        assert (group.page.started(rank), group.page.vote(rank, 3), group.page.has_left(rank)) == (0, None, False)
    assert group.page.members() == 1 << 63 | 3


def test_votes_of_two_rounds_are_kept(group):
    """A vote is found by its round; the one before stays readable, older and future ones are None."""
    member = group.members[1]
    for number in range(5):
        member.set_vote(number, number & 3)
        assert group.page.next_round(1) == number + 1
    assert [group.page.vote(1, n) for n in range(7)] == [None, None, None, 3, 0, None, None]


def test_running_is_what_members_do_or_are_about_to(group):
    """The group runs while a member runs or has started a wave; what others wrote does not count."""
    member = group.members[1]
    member.set_started(0)
    assert group.page.is_running()
    member.set_wave(0, runs=True)
    assert group.page.is_running()
    member.set_wave(1, runs=False)
    assert not group.page.is_running()
    member.set_wave(1, runs=True)
    group.page.set_members(0b1)
    assert not group.page.is_running()


def test_the_bell_rings_for_all_until_one_hushes_it(group):
    """One ring is seen by every rank; after one of them has taken it, by none."""
    first, second = group.members[0], group.members[1]
    assert not first.is_ringing()
    first.ring()
    first.ring()
    assert first.is_ringing()
    assert second.is_ringing()
    second.hush()
    assert not first.is_ringing()
    second.hush()


def test_a_full_pipe_blocks_nobody(group):
    """However often a rank rings it never waits, and one hush is enough."""
    member = group.members[0]
    for _ in range(fcntl.fcntl(member.fileno(), fcntl.F_GETPIPE_SZ) + 10):
        member.ring()
    assert member.is_ringing()
    member.hush()
    assert not member.is_ringing()


def test_closed_is_harmless(group):
    """After close every call does nothing, and the page still tells what it last saw; closing again is allowed."""
    member = group.members[1]
    member.set_started(4)
    for _ in range(2):
        member.close()
    member.ring()
    member.hush()
    member.set_started(9)
    assert not member.is_ringing()
    assert member.fileno() == -1
    assert group.page.started(1) == 5
    group.page.close()
    group.page.close()
    assert group.page.started(1) == 5


def test_repr_tells_members_and_whether_they_run(group):
    """The text shows rank, members and state."""
    assert "rank=1" in repr(group.members[1])
    assert "idle" in repr(group.page)
    group.members[1].set_wave(0, runs=True)
    assert "running" in repr(group.page)
    group.page.close()
    assert "closed" in repr(group.page)


def test_a_group_that_cannot_be_made_leaves_nothing(monkeypatch):
    """If descriptors run out halfway, those that were made are closed (the leak guard looks)."""

    def refuse(fd, blocking):
        raise OSError(errno.EMFILE, "no more")

    monkeypatch.setattr(group_page.os, "set_blocking", refuse)
    with pytest.raises(OSError, match="no more"):
        create_group()


def test_its_descriptors_are_not_inherited_unasked():
    """Memory and both ends of the pipe are 3 or above, close-on-exec, and the pipe does not block."""
    fds = create_group()
    try:
        assert all(fd > 2 and not os.get_inheritable(fd) for fd in fds)
        assert not os.get_blocking(fds.bell)
        assert not os.get_blocking(fds.striker)
    finally:
        for fd in fds:
            os.close(fd)
