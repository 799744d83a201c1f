"""An event whose waits can be interrupted anywhere."""

from __future__ import annotations

import threading
import time
from queue import Empty

from engine_client.ipc.latch import LONGEST_SLEEP, Latch
from helpers.interrupts import interrupt_everywhere
from helpers.timing import DEADLOCK


def test_a_wait_ends_when_it_is_set_or_in_time() -> None:
    """Who waits goes on at ``set``, at once if that was before, or at the timeout with the answer that it is not."""
    latch = Latch()
    assert not latch.wait(0)
    assert not latch.wait(0.01)
    assert "open" in repr(latch)
    latch.set()
    latch.set()
    assert latch.wait(0)
    assert latch.wait()
    assert latch.is_set()
    assert "set" in repr(latch)


def test_all_who_wait_go_on() -> None:
    """Twenty threads that wait are all let go by one ``set``."""
    latch = Latch()
    went: list[bool] = []
    threads = [threading.Thread(target=lambda: went.append(latch.wait(DEADLOCK))) for _ in range(20)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    latch.set()
    for thread in threads:
        thread.join(DEADLOCK)
    assert went == [True] * 20


def test_no_set_is_lost_in_a_race() -> None:
    """Whichever comes first, the wait ends."""
    for _ in range(300):
        latch = Latch()
        thread = threading.Thread(target=latch.set)
        thread.start()
        assert latch.wait(DEADLOCK)
        thread.join()


def test_an_interrupted_wait_holds_nobody_up() -> None:
    """Wherever an interrupt comes, another thread can set the latch, and the next wait ends."""
    latch = Latch()

    def check(where: str) -> None:
        thread = threading.Thread(target=latch.set)
        thread.start()
        thread.join(DEADLOCK)
        assert not thread.is_alive(), where
        assert latch.wait(0)

    def prepare() -> None:
        nonlocal latch
        latch = Latch()

    assert interrupt_everywhere(lambda: latch.wait(0.001), check, prepare) >= 3


def test_a_wait_without_a_limit_looks_around(monkeypatch):
    """A signal that came just before the system call is noticed: no single sleep is without an end."""
    sleeps = []
    latch = Latch()

    class Deaf:
        """A queue whose ``get`` hears of nothing, as one that began to block right after a signal had come."""

        def get(self, timeout):
            sleeps.append(timeout)
            if len(sleeps) == 3:
                latch.set()
            raise Empty

        def put(self, item):
            """Wake nobody."""

    monkeypatch.setattr("engine_client.ipc.latch.SimpleQueue", Deaf)
    assert latch.wait()
    assert sleeps == [LONGEST_SLEEP] * 3
