"""What connects engines with front-ends in other processes, before an endpoint has it."""

from __future__ import annotations

import errno
import fcntl
import os
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client.clients import front_ends as module
from engine_client.clients.front_ends import FrontEnds, pipe_pair
from engine_client.ipc.arena import create_memory
from engine_client.messages import EngineCoreReadyResponse


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def ready() -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(4096, 8, 16, None, "auto", "1", 1, 2)


def links(page: int) -> Any:
    return {rank: SimpleNamespace(pid=70 + rank, status=SimpleNamespace(fd=page)) for rank in range(2)}


def test_endpoints_get_everything_once() -> None:
    """Requests of a front-end go to all ranks; channel and results are of each rank; then nothing is held here."""
    page = create_memory("page")
    before = count_open()
    front_ends = FrontEnds(3)
    for rank in range(2):
        theirs = front_ends.connect(rank)
        assert len({end.arena_in for end in theirs}) == 3
        front_ends.launched()
    assert repr(front_ends) == "<FrontEnds 3 ranks=[0, 1]>"
    group: Any = SimpleNamespace(fds=SimpleNamespace(page=page))
    endpoints = front_ends.endpoints(links(page), {0: ready(), 1: ready()}, group)
    assert front_ends.own_fds() == []
    front_ends.close()
    fds = [fd for endpoint in endpoints for fd in endpoint.pass_fds]
    assert len(set(fds)) == len(fds) == 3 * (2 + 2 * 3)
    assert min(fds) > 2
    assert not any(map(os.get_inheritable, fds))
    assert [end.pid for end in endpoints[2].ranks] == [70, 71]
    assert endpoints[1].ranks[0].ready_response() == ready()
    for endpoint in endpoints:
        endpoint.close()
    assert count_open() == before
    os.close(page)


def test_an_engine_is_not_to_have_what_is_the_front_ends() -> None:
    """Of the ranks that were launched before it, too."""
    front_ends = FrontEnds(2)
    front_ends.connect(0)
    front_ends.launched()
    theirs = front_ends.connect(1)
    assert len(front_ends.own_fds()) == 2 + 2 * 2 * 2
    assert not {end.channel for end in theirs}.intersection(front_ends.own_fds())
    front_ends.close()


@pytest.mark.parametrize("at", range(14))
def test_nothing_is_left_when_descriptors_run_out(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Whichever cannot be had, those before it are closed, once."""
    page = create_memory("page")
    before = count_open()
    made = 0

    def scarce(make: Any) -> Any:
        def counted(*args: Any) -> Any:
            nonlocal made
            made += 1
            if made > at:
                raise OSError(errno.EMFILE, "Too many open files")
            return make(*args)

        return counted

    monkeypatch.setattr(module, "create_memory", scarce(create_memory))
    monkeypatch.setattr(module.fcntl, "fcntl", scarce(fcntl.fcntl))
    with pytest.raises(OSError, match="Too many"):
        attempt(page)
    assert count_open() == before
    os.close(page)


def attempt(page: int) -> None:
    """Make the endpoints of two front-ends and two ranks: 2 + 2 * 2 * 3 + 2 * 2 descriptors."""
    front_ends = FrontEnds(2)
    try:
        for rank in range(2):
            front_ends.connect(rank)
            front_ends.launched()
        front_ends.endpoints(links(page), {0: ready(), 1: ready()})
    finally:
        front_ends.close()


def test_a_pipe_s_ends_are_clear_of_the_standard_streams() -> None:
    """They are duplex, and close at exec."""
    left, right = pipe_pair()
    assert min(left, right) > 2
    os.write(left, b"x")
    assert os.read(right, 5) == b"x"
    assert not os.get_inheritable(left)
    os.close(left)
    os.close(right)
