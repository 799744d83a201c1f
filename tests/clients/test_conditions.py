"""In which state an engine is, from its page and from what the session knows."""

from __future__ import annotations

import time
from typing import Any

from engine_client.clients.conditions import card_rows, conditions
from engine_client.clients.session import Session
from engine_client.ipc.status_page import EngineState
from helpers.calls import played_session
from helpers.timing import DEADLOCK, eventually


def told(session: Session) -> list[tuple[int, str]]:
    """Return rank and condition of each engine."""
    return [(status.rank, status.condition) for status, _ in conditions(session)]


def test_what_the_page_says() -> None:
    """Ready, paused, sleeping (which is paused, too), and stalled once a step takes longer than allowed."""
    with played_session(2, stall_timeout=0.02) as (s, peers):
        for peer in peers:
            peer.status.set_state(EngineState.READY)
        assert told(s) == [(0, "ready"), (1, "ready")]
        peers[0].status.set_flags(is_sleeping=False, is_paused=True)
        peers[1].status.set_flags(is_sleeping=True, is_paused=True)
        assert told(s) == [(0, "paused"), (1, "sleeping")]
        for peer in peers:
            peer.status.set_flags(is_sleeping=False, is_paused=False)
        peers[1].status.step_begin()
        time.sleep(0.03)
        (_, nothing), (status, detail) = conditions(s)
        assert (status.condition, detail, nothing) == ("stalled", status.describe(), "")
        peers[1].status.step_end(0, 0)
        assert told(s) == [(0, "ready"), (1, "ready")]


def test_a_step_may_take_long_without_a_limit() -> None:
    """By default nothing counts as stalled."""
    with played_session() as (s, (peer,)):
        peer.status.step_begin()
        time.sleep(0.02)
        assert told(s) == [(0, "ready")]


def test_what_the_session_knows() -> None:
    """Starting with its phase, leaving, and dead with how it died."""
    with played_session(2, on_engine_death="continue") as (s, peers):
        s.router.closed.add(0)
        peers[0].link.phase = "loading weights"
        assert [(status.condition, detail) for status, detail in conditions(s)] == [
            ("starting", "loading weights"),
            ("ready", ""),
        ]
        s.router.closed.discard(0)
        s.departing.add(1)
        assert told(s) == [(0, "ready"), (1, "leaving")]
        peers[1].link.handle.kill()
        eventually(lambda: told(s)[1] == (1, "dead"), DEADLOCK)
        assert conditions(s)[1][1].startswith("engine core 1 (pid")


def test_between_a_death_and_its_clean_up_a_rank_is_dead() -> None:
    """It never seems to be started again already; its successor does, as soon as it exists."""
    seen: list[Any] = []
    with played_session(2, on_engine_death="continue") as (s, peers):
        fail = s.fail_requests
        s.fail_requests = lambda *args: (seen.extend(told(s)), fail(*args))  # type: ignore[method-assign,assign,func-returns-value]
        peers[1].link.handle.kill()
        eventually(peers[1].link.over.done, DEADLOCK)
        assert seen == [(0, "ready"), (1, "dead")]


def test_after_the_end_all_are_dead() -> None:
    """With the client's ending."""
    with played_session(2) as (s, _):
        s.close(0.0)
        assert [(status.condition, detail) for status, detail in conditions(s)] == [
            ("dead", "the engine client is closed")
        ] * 2


def test_the_rows_of_a_card() -> None:
    """What lives has memory, uptime and load; what is dead has a reason; what is closed, or is back, has its past."""
    with played_session(2, on_engine_death="continue") as (s, peers):
        peers[0].status.idle(3, 4)
        s.links[0].meter.add(100)
        row = card_rows(s)[0]
        assert (row.rank, row.state, row.pid) == (0, "ready", peers[0].process.pid)
        assert row.memory is not None
        assert row.memory > 10_000
        assert row.uptime is not None
        assert row.uptime < DEADLOCK
        assert (row.waiting, row.running, row.error) == (3, 4, "")
        assert row.tokens_per_s > 0
        assert conditions(s)[0][0].tokens == 100
        peers[1].link.handle.kill()
        eventually(peers[1].link.over.done, DEADLOCK)
        dead = card_rows(s)[1]
        assert (dead.state, dead.memory, dead.uptime) == ("dead", None, None)
        assert "SIGKILL(-9)" in dead.error
        s.close(0.0)
        assert [(row.state, row.error) for row in card_rows(s)] == [("closed", ""), ("closed", dead.error)]
