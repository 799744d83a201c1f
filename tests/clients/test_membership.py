"""Ranks of a session that come and go: who is open, who is dead, and whom a close waits for."""

from __future__ import annotations

import threading
import time

import pytest

from engine_client import EngineDeadError
from engine_client.clients.endings import Ending
from engine_client.deadline import Deadline
from helpers.calls import played_session
from helpers.peers import played_engine
from helpers.timing import DEADLOCK, took_at_most

DEAD = Ending("it died")


def test_a_close_waits_for_what_is_being_started() -> None:
    """It returns once that has ended, and whoever comes later is refused."""
    with played_session() as (s, _):
        entered, ended = threading.Event(), threading.Event()

        def start() -> None:
            with s.starting():
                entered.set()
                time.sleep(0.3)
                ended.set()

        starting = threading.Thread(target=start)
        starting.start()
        assert entered.wait(DEADLOCK)
        s.close(0.0)
        assert ended.is_set()
        starting.join(DEADLOCK)
        with pytest.raises(EngineDeadError, match="closed"), s.starting():
            raise AssertionError


def test_a_finalizer_on_the_thread_that_starts_does_not_wait_for_itself() -> None:
    """The garbage collector may run there; a close elsewhere gives up at its bound."""
    with played_session() as (s, _), s.starting():
        with took_at_most(1.0):
            s.await_starts(Deadline(30.0))
        other = threading.Thread(target=s.await_starts, args=(Deadline(0.05),))
        with took_at_most(2.0):
            other.start()
            other.join()


def test_a_rank_is_opened_unless_it_has_died_meanwhile() -> None:
    """An earlier death is forgotten then; one that came after the start is not."""
    with played_session(3) as (s, _):
        s.router.closed.update([0, 1, 2])
        s.deaths[1] = before = DEAD
        s.deaths[2] = Ending("it died again")
        s.admit([0, 1, 2], {1: before, 2: DEAD})
        assert s.router.closed == {2}
        assert list(s.deaths) == [2]


def test_a_start_that_fails_leaves_what_was_before() -> None:
    """A number that was free is free again; the dead engine that had it is listed as before."""
    with played_session(2) as (s, _), played_engine(2) as new, played_engine(1) as successor:
        s.router.closed.add(2)
        s.adopt(new.link)
        s.undo_start(2, None)
        assert sorted(s.links) == [0, 1]
        assert not s.router.closed
        assert new.link.over.done()
        s.undo_start(2, None)  # it was not even made
        before, s.deaths[1] = s.links[1], DEAD
        s.router.closed.add(1)
        s.adopt(successor.link)
        s.undo_start(1, before)
        assert s.links[1] is before
        assert not before.over.done()
        assert s.router.closed == {1}
        s.undo_start(1, before)
        assert s.links[1] is before


def test_a_rank_that_has_left_is_forgotten() -> None:
    """Nothing of it is left in any table; unknown ranks are ignored."""
    with played_session(2) as (s, _):
        s.deaths[1] = DEAD
        for table in (s.departing, s.leaving, s.router.closed):
            table.add(1)
        s.forget(1)
        s.forget(7)
        assert (list(s.links), s.deaths, s.departing, s.leaving, s.router.closed) == ([0], {}, set(), set(), set())
        assert repr(s.group).count(":") == 1
