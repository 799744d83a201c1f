"""Dead ranks are started again: after a pause that grows, as often as allowed, each on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_client.clients import restart as module
from engine_client.clients.endings import Ending
from engine_client.clients.restart import Restarter
from engine_client.config import ClientOptions
from helpers.timing import DEADLOCK, eventually

DEAD = Ending("it died")


class FakeSession:
    """What a restarter needs of a session."""

    def __init__(self, **options: Any) -> None:
        self.options = ClientOptions(on_engine_death="restart", **options)
        self.state = "running"
        self.links = {0: None, 1: None}
        self.deaths: dict[int, Ending] = {}
        self.restarts: Counter[int] = Counter()
        self.waits: list[float] = []
        self.given_up: list[Ending] = []

    def await_end(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return self.state != "running"

    def give_up(self, ending: Ending) -> None:
        self.given_up.append(ending)


class FakeElastic:
    """Does what the test says when a rank is to be brought back."""

    def __init__(self, *actions: Callable[[int], None]) -> None:
        self.actions = list(actions)
        self.asked: list[int] = []

    def bring_back(self, rank: int) -> None:
        self.asked.append(rank)
        if self.actions:
            self.actions.pop(0)(rank)


def fail(rank: int) -> None:
    """Not come up."""
    raise OSError(f"no memory for rank {rank}")


def make(elastic: FakeElastic, **options: Any) -> tuple[FakeSession, Restarter]:
    """Return a session of fakes and its restarter."""
    session = FakeSession(**options)
    return session, Restarter(session, elastic)  # type: ignore[arg-type]  # fakes


def threads() -> list[threading.Thread]:
    """Return the threads of restarters."""
    return [thread for thread in threading.enumerate() if "engine-client-restart" in thread.name]


def done() -> None:
    """Wait until nothing is being restarted."""
    eventually(lambda: not threads(), DEADLOCK)


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "engine_client.session"):
        yield


def test_a_rank_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """After the delay, with one line in the log; the thread ends with it."""
    elastic = FakeElastic()
    session, restarter = make(elastic, restart_delay=0.25)
    restarter.lost(1, DEAD)
    done()
    assert (elastic.asked, session.waits, session.given_up) == ([1], [0.25], [])
    assert "engine core 1 has been started again" in caplog.text
    assert repr(restarter) == "<Restarter lost=[]>"


def test_the_delay_doubles_up_to_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is logged with its cause; at the limit the rank is given up, with how it died."""
    elastic = FakeElastic(fail, fail, fail)
    session, restarter = make(elastic, restart_delay=0.5, restart_limit=3)
    restarter.lost(0, DEAD)
    done()
    assert session.waits == [0.5, 1.0, 2.0]
    assert session.given_up == [DEAD]
    assert caplog.text.count("engine core 0 could not be started again: OSError: no memory for rank 0") == 3
    assert "engine core 0 has died 4 times in a row and is not started again" in caplog.text


def test_without_restarts_a_rank_is_given_up_at_once() -> None:
    """A limit of zero is allowed."""
    elastic = FakeElastic()
    session, restarter = make(elastic, restart_limit=0)
    restarter.lost(0, DEAD)
    done()
    assert (elastic.asked, session.given_up) == ([], [DEAD])


def test_a_long_life_counts_and_a_long_start_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stayed up for a minute may be started as often again, however long starts and delays take."""
    elastic = FakeElastic()
    session, restarter = make(elastic, restart_limit=2)
    now = [time.monotonic()]
    monkeypatch.setattr(module, "time", type("Clock", (), {"monotonic": lambda: now[0]}))

    def wait(timeout: float) -> bool:
        now[0] += 1000.0  # a delay, or a start
        return FakeSession.await_end(session, timeout)

    session.await_end = wait  # type: ignore[method-assign]
    for life, given_up in ((100.0, 0), (59.0, 0), (61.0, 0), (1.0, 0), (1.0, 1)):
        now[0] += life
        restarter.lost(0, DEAD)
        done()
        assert len(session.given_up) == given_up
    assert session.waits == [0.1, 0.2, 0.1, 0.2]


def test_a_rank_that_was_given_up_and_brought_back_by_others_starts_anew() -> None:
    """Somebody has repaired it."""
    elastic = FakeElastic(fail)
    session, restarter = make(elastic, restart_limit=1)
    restarter.lost(0, DEAD)
    done()
    assert session.given_up == [DEAD]
    restarter.lost(0, DEAD)
    done()
    assert (elastic.asked, len(session.given_up)) == ([0, 0], 1)


def test_one_rank_does_not_wait_for_another() -> None:
    """A start that hangs holds up its own rank only; the client is not given up while another may come back."""
    going = threading.Event()
    elastic = FakeElastic(lambda rank: assert_true(going.wait(DEADLOCK)), fail, fail, fail)
    session, restarter = make(elastic, restart_limit=3)
    restarter.lost(0, DEAD)
    eventually(lambda: elastic.asked, DEADLOCK)
    restarter.lost(1, DEAD)
    eventually(lambda: len(threads()) == 1, DEADLOCK)
    assert elastic.asked == [0, 1, 1, 1]
    assert session.given_up == []
    assert repr(restarter) == "<Restarter lost=[0]>"
    going.set()
    done()
    assert session.given_up == []


def assert_true(value: bool) -> None:
    """Check what a lambda finds."""
    assert value


def test_a_second_death_during_a_restart_is_one_more() -> None:
    """It is dealt with by the same thread, once the first is."""
    restarters: list[Restarter] = []
    elastic = FakeElastic(lambda rank: restarters[0].lost(rank, Ending("again")))
    session, restarter = make(elastic, restart_limit=2)
    restarters.append(restarter)
    restarter.lost(0, DEAD)
    done()
    assert (elastic.asked, session.waits) == ([0, 0], [0.1, 0.2])


@pytest.mark.parametrize("when", ["before", "during"])
def test_the_end_of_the_session_ends_it(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """In its delay or in the middle of a start; that this then fails is no news, and nothing is given up."""

    def end(rank: int) -> None:
        session.state = "closing"
        fail(rank)

    elastic = FakeElastic(end)
    session, restarter = make(elastic)
    if when == "before":
        session.state = "closing"
    restarter.lost(0, DEAD)
    done()
    assert elastic.asked == ([] if when == "before" else [0])
    assert session.given_up == []
    assert caplog.text == ""


def test_a_rank_that_was_taken_away_is_not_called_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """Bringing it back does nothing then, and nothing is logged."""
    session, restarter = make(FakeElastic(lambda rank: assert_true(not session.links.clear())))
    restarter.lost(1, DEAD)
    done()
    assert caplog.text == ""


def test_whatever_goes_wrong_counts_as_a_failure() -> None:
    """Even in the wait for the delay: the thread ends in order, and the rank stays dead."""
    session, restarter = make(FakeElastic(), restart_limit=1)
    session.await_end = lambda timeout: fail(0)  # type: ignore[method-assign,assign,return-value]
    restarter.lost(0, DEAD)
    done()
    assert session.given_up == [DEAD]
