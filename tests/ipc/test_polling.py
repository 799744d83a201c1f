"""When a wait is polled for, and until when."""

from __future__ import annotations

import os
import selectors
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from engine_client.ipc import polling as module
from engine_client.ipc.polling import Polling, poll

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
