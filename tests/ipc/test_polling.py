"""When a wait is polled for, and until when."""

from __future__ import annotations

import os
import selectors
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from engine_client.ipc import polling as module
from engine_client.ipc.polling import Exchange, Polling, poll

SHORT, LONG = 100e-6, 0.01


def test_short_waits_have_the_next_one_polled_for() -> None:
    """After three in a row; a long one ends that, polled for or not."""
    polling = Polling()
    for _ in range(2):
        polling.waited(SHORT)
        assert polling.spin == 0
    polling.waited(SHORT)
    assert polling.spin == 1e-3
    polling.waited(SHORT)
    assert polling.spin == 1e-3
    polling.waited(LONG)
    assert polling.spin == 0
    polling.waited(SHORT)
    assert polling.spin == 0
    assert repr(polling) == "<Polling 0 us>"


@given(st.lists(st.floats(0, 0.002)))
def test_little_is_polled_for_nothing(waits: list[float]) -> None:
    """Whatever comes: of four waits in a row at most one is polled for in vain."""
    polling, vain = Polling(), []
    for wait in waits:
        vain.append(0 < polling.spin < wait)
        polling.waited(wait)
    assert all(sum(vain[start : start + 4]) <= 1 for start in range(len(vain)))


@pytest.mark.parametrize("spin_us", [0, 20])
def test_a_number_holds_whatever_the_waits_are(spin_us: float) -> None:
    """None polls as the waits say; a number of microseconds is always polled for."""
    polling = Polling(spin_us)
    for wait in (SHORT, SHORT, SHORT, SHORT, LONG):
        polling.waited(wait)
        assert polling.spin == pytest.approx(spin_us / 1e6)
    assert repr(polling) == f"<Polling {spin_us} us, fixed>"


def test_polling_ends_with_the_first_event_or_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not sleep meanwhile."""
    now = 100.0

    def monotonic() -> float:
        nonlocal now
        now += 0.001
        return now

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    read, write = os.pipe()
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        assert poll(selector, 0.0) == []
        assert now == 100.0
        assert poll(selector, 0.01) == []
        assert 100.01 <= now < 100.02
        os.write(write, b"x")
        began = now
        assert poll(selector, 1.0)
        assert now < began + 0.01
    os.close(read)
    os.close(write)


def test_questions_in_quick_succession_are_read_by_who_asks() -> None:
    """After short waits that each began right after an answer; after a pause they count anew."""
    exchange = Exchange()

    def ask(count: int, *, can_read: bool = True) -> list[bool]:
        return [exchange.expect(can_read=can_read) is not None and exchange.arrived() for _ in range(count)]

    assert ask(7) == [False, False, False, True, False, False, True]  # whether it lends is for the reader to say
    assert True not in ask(20, can_read=False)
    assert "in quick succession" in repr(exchange)
    for _ in range(10):
        exchange._answered_at -= 1.0  # noqa: SLF001  # a pause
        assert ask(1) == [False]


def test_who_is_polled_for() -> None:
    """Answers, if waits are short; with a number of microseconds everything, and with none of them nothing."""
    assert [Exchange(None).is_polled_for(is_answer=it) for it in (True, False)] == [True, False]
    assert [Exchange(20).is_polled_for(is_answer=it) for it in (True, False)] == [True, True]
    assert [Exchange(0).is_polled_for(is_answer=it) for it in (True, False)] == [False, False]


def test_polling_for_an_answer_ends_with_it() -> None:
    """Or after its time; a frame that nobody waits for changes nothing."""
    exchange = Exchange(1e6)
    assert exchange.spin_left() == 0.0
    assert not exchange.arrived()
    assert exchange.expect(can_read=False)
    assert 0.0 < exchange.spin_left() <= 1.0
    assert not exchange.arrived()
    assert exchange.spin_left() == 0.0
    assert not Exchange(0).expect(can_read=True)
